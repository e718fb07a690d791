"""Runs on nodes that share only a folder: ``rollcall train --master`` and ``--worker R``.

The master trains as on a cluster, but reaches its workers through the folder. The placement is fixed: the actor and the critic run on
node 0, and an engine runs on every node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollcall.base.errors import ConfigError
from rollcall.base.wait import say
from rollcall.config import Config, parse_config
from rollcall.loop.phases import Bounds


def train_as_master(
    config: Config,
    folder: Path,
    *,
    num_nodes: int,
    rank_weights: Sequence[float] | None,
    options: Mapping[str, str],
    fresh: bool = False,
    quiet: bool = False,
    bounds: Bounds | None = None,
) -> dict[str, Any]:
    """Train, with this node as node 0. Returns the summary."""
    from rollcall.process.groups.folder.master import FolderBackend
    from rollcall.run.training import train

    config = with_folder(config, folder, num_nodes=num_nodes, rank_weights=rank_weights)
    with FolderBackend(folder, num_nodes=num_nodes, run=config.run.name, options=options) as backend:
        say(
            f"this is the master of {num_nodes} nodes; their folder is {backend.folder}, and the run directory is {config.run.dir}"
        )
        return train(config, fresh=fresh, quiet=quiet, bounds=bounds, backend=backend)


def serve_as_worker(folder: Path, *, rank: int, num_nodes: int, options: Mapping[str, str]) -> None:
    """Serve as node ``rank`` until the master has finished the run. Raises if the options differ from the master's."""
    if not 0 < rank < num_nodes:
        raise ConfigError(
            f"--worker {rank} with --num-nodes {num_nodes} is not a worker; node 0 is the master, the workers are 1 to {num_nodes - 1}"
        )
    from rollcall.process.debug.here import serve
    from rollcall.process.debug.stopped import has_terminal
    from rollcall.process.groups.folder.worker import FolderWorker

    # Without a terminal nobody could attach, because nodes that share only a folder cannot reach each other.
    if has_terminal():
        serve()
    FolderWorker(folder, rank=rank, num_nodes=num_nodes, options=options).run()


def with_folder(config: Config, folder: Path, *, num_nodes: int, rank_weights: Sequence[float] | None) -> Config:
    """Return the config with the cluster section that the folder implies. Raises if the run file contradicts it."""
    if num_nodes < 2:
        raise ConfigError(
            f"--num-nodes {num_nodes}: a master without workers does not need a folder; leave --master out"
        )
    if config.rollout.weights not in ("auto", "file"):
        raise ConfigError(
            f"rollout.weights={config.rollout.weights} needs a network between the nodes, but they share only a folder; leave "
            "the key out, or set it to file"
        )
    if config.trainer.elastic is not None:
        raise ConfigError(
            "trainer.elastic is for nodes on Ray; with a shared folder, the other nodes do the work of a lost node until it is back; "
            "leave the key out"
        )
    document = config.model_dump(mode="json")
    implied = {
        "num_nodes": num_nodes,
        "num_gpus_per_node": 1,
        "accelerator": "cpu",  # the slot is logical: its worker can use the whole node
        "nodes": None,
        "component_placement": {"actor": 0, "rollout": "all"}
        | ({"critic": 0} if config.algorithm.name == "ppo" else {}),
        "node_weights": None if rank_weights is None else list(rank_weights),
    }
    if config.cluster is not None:
        for key, value in implied.items():
            given = document["cluster"][key]
            if key != "accelerator" and key in config.cluster.model_fields_set and given != value:
                raise ConfigError(
                    f"cluster.{key}={given} in the run file contradicts the command line, which implies {key}={value} (one slot on each "
                    "node, the actor on node 0); leave the key out of the run file"
                )
    kept = {} if config.cluster is None else {key: document["cluster"][key] for key in ("env", "env_pass", "node_env")}
    document["cluster"] = {**kept, **implied}
    document["rollout"]["weights"] = "file"
    document["run"]["dir"] = str(_shared_dir(config.run.dir, folder))
    return parse_config(document)


def _shared_dir(run_dir: Path, folder: Path) -> Path:
    """Return the absolute run directory. Raises unless it is on the same file system as the shared folder, where all nodes can read
    checkpoints and weights."""
    run_dir, folder = run_dir.absolute(), folder.absolute()
    there = [next(each for each in (path, *path.parents) if each.exists()) for path in (run_dir, folder)]
    if folder.is_relative_to(run_dir) or there[0].stat().st_dev != there[1].stat().st_dev:
        raise ConfigError(
            f"run.dir={run_dir} must be on the file system of --log-path {folder}, because the nodes share nothing else, and must not "
            f"contain that folder; use run.dir={folder / 'run'}"
        )
    return run_dir


def read_weights(text: str | None) -> list[float] | None:
    """Parse weights such as ``2,1,1``."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--rank-weights {text} is not a list of numbers; give one weight for each node, such as 2,1,1"
        ) from None
