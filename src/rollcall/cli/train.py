"""`rollcall train`: start a run, or continue it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from rollcall.base.stop import ended_by, heed, heeded_signals
from rollcall.base.wait import say
from rollcall.cli import Json, Overrides, calm_libraries, split_arguments
from rollcall.loop.phases import Bounds, Phase, Split


def _split(text: str) -> Split:
    try:
        return Split(text.removesuffix("-only"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(Split)}") from None


@heed()  # handles signals from the first import on
def train(
    file: Annotated[
        str | None, Argument(metavar="FILE|RUN_DIR", help="Run file, or run directory to continue. Default: the demo.")
    ] = None,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Start over. An existing run directory is moved aside, not deleted.")
    ] = False,
    phase: Annotated[
        Phase | None,
        Option(
            "--phase",
            "--rl-phase",
            help="rollout: sample groups for the next 1 + trainer.staleness steps into the journal, then stop. update: "
            "train on the groups in the journal, then stop. both, the default: train as usual.",
        ),
    ] = None,
    split: Annotated[
        Split | None,
        Option(
            "--split",
            "--rollout-split",
            parser=_split,
            metavar="train|eval",
            help="With --phase rollout: `eval` only evaluates the newest checkpoint.",
        ),
    ] = None,
    eval_interval: Annotated[int | None, Option(metavar="N", min=0, help="The same as trainer.eval_every=N.")] = None,
    master: Annotated[
        bool, Option("--master", help="For nodes that share only a folder: this is node 0, which trains.")
    ] = False,
    worker: Annotated[
        int | None, Option(metavar="R", help="For nodes that share only a folder: this is node R, which samples.")
    ] = None,
    num_nodes: Annotated[
        int | None, Option(metavar="N", help="With --master or --worker: number of nodes, including the master.")
    ] = None,
    rank_weights: Annotated[
        str | None,
        Option(
            metavar="W0,W1,..",
            help="With --master or --worker: each node's share of the rollouts. Default: by measured speed.",
        ),
    ] = None,
    log_path: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="The folder that the nodes share; its mode must be 700. Without run.dir, the run is in DIR/run.",
        ),
    ] = None,
    data_path: Annotated[
        Path | None,
        Option(metavar="DIR", help="Folder for shared downloads: the hub's cache is DIR/.cache/huggingface."),
    ] = None,
    post_mortem: Annotated[
        bool,
        Option(
            "--post-mortem",
            help="If a worker, a reward or an environment raises an exception, open pdb there: in this terminal, or for "
            "`rollcall debug` to attach to.",
        ),
    ] = False,
    local_debug: Annotated[
        bool,
        Option(
            "--local-debug",
            help="Run all roles in this process, with one reward process and nothing compiled, even if the run file is for a cluster. "
            "Writes to RUN_DIR-local-debug, unless run.dir=DIR is given.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model. Run the same command again to continue the run.

    \b
    Examples:
      rollcall train
      rollcall train runs/arithmetic                continue that run
      rollcall train runs/arithmetic trainer.steps=600
      rollcall train --fresh trainer.steps=50 run.dir=runs/short
      rollcall train examples/gsm8k.yaml model.path=MODEL actor.lr=2e-6
      rollcall train examples/arithmetic.yaml algorithm.name=dapo --json
      rollcall train run.yaml --phase rollout       then, here or elsewhere:
      rollcall train run.yaml --phase update
      rollcall train run.yaml --phase rollout --split eval
      RAY_ADDRESS=head:6379 rollcall train run.yaml    on a Ray cluster that you started
      rollcall train run.yaml --local-debug --post-mortem

    \b
    On three nodes that share nothing but the folder /share/x, one command on each:
      rollcall train run.yaml --master --num-nodes 3 --rank-weights 2,1,1 --log-path /share/x
      rollcall train run.yaml --worker 1 --num-nodes 3 --rank-weights 2,1,1 --log-path /share/x
      rollcall train run.yaml --worker 2 --num-nodes 3 --rank-weights 2,1,1 --log-path /share/x
    """
    from rollcall.config.checks import say_unused
    from rollcall.config.run import in_one_process
    from rollcall.nodes.cluster import wished_cluster
    from rollcall.nodes.declared import environment
    from rollcall.process.debug.here import POST_MORTEM
    from rollcall.run import api

    bounds = Bounds(phase=phase or Phase.BOTH, split=split or Split.TRAIN)
    if data_path is not None:
        if not data_path.is_dir():
            raise typer.BadParameter(f"--data-path {data_path} is not a folder")
        os.environ["HF_HOME"] = str(data_path.absolute() / ".cache/huggingface")  # the hub library reads it on import
    path, changes = split_arguments(file, overrides)
    if eval_interval is not None:
        changes = [*changes, f"trainer.eval_every={eval_interval}"]
    config = api.read_config(path, overrides=changes)
    if log_path is not None:
        if "dir" not in config.run.model_fields_set:
            config = api.read_config(path, overrides=[*changes, f"run.dir={log_path / 'run'}"])
        elif not master and worker is None:
            both = f"--log-path {log_path} and run.dir={config.run.dir}"
            raise typer.BadParameter(f"{both} both say where the run is; leave one out")
    if local_debug:
        if master or worker is not None:
            raise typer.BadParameter(
                "--local-debug runs everything in one process; leave it out with --master or --worker R"
            )
        config = in_one_process(config, keeps_dir=any(change.startswith("run.dir=") for change in changes))
    own = {"--phase": phase, "--split": split, "--rank-weights": rank_weights, "--eval-interval": eval_interval}
    run = _on_a_folder(master=master, worker=worker, num_nodes=num_nodes, log_path=log_path, fresh=fresh, own=own)
    if master:
        say_unused(config, in_folder=True)
    if run is None and config.cluster is not None:
        wished_cluster(ray_address=config.cluster.ray_address)  # refuses an invalid address before torch is loaded
    try:
        calm_libraries()
        if run is not None:
            with environment({POST_MORTEM: "1"} if post_mortem else {}):
                result = run(config, fresh=fresh, quiet=as_json, bounds=bounds)
        else:
            result = api.train(
                config,
                fresh=fresh,
                quiet=as_json,
                phase=bounds.phase,
                split=bounds.split,
                post_mortem=post_mortem,
                local_debug=local_debug,
            ).result
    except KeyboardInterrupt as stop:
        for number in (signal.SIGINT, *heeded_signals()):
            signal.signal(number, signal.SIG_IGN)  # a second signal does not change the status
        by, status = ended_by(stop)
        from rollcall.view.summary import interrupted

        say(interrupted(config.run.dir, num_steps=config.trainer.steps, by=by, fresh=fresh))
        raise typer.Exit(status) from None
    if as_json and result is not None:
        print(json.dumps(result, default=str))


def _on_a_folder(
    *,
    master: bool,
    worker: int | None,
    num_nodes: int | None,
    log_path: Path | None,
    fresh: bool,
    own: Mapping[str, Any],
) -> Callable[..., dict[str, Any] | None] | None:
    """Return the function that trains on nodes that share only a folder, or None for other runs. ``own`` contains the options that a
    worker compares with the master's."""
    if not master and worker is None:
        if num_nodes is not None or own["--rank-weights"] is not None:
            raise typer.BadParameter("--num-nodes and --rank-weights need --master or --worker R")
        return None
    if master and worker is not None:
        raise typer.BadParameter("--master makes this node 0, and --worker R makes it node R; use only one of them")
    if num_nodes is None or log_path is None:
        raise typer.BadParameter("--master and --worker R need --num-nodes N and --log-path DIR")
    if worker is not None and fresh:
        raise typer.BadParameter("--fresh is for the master; leave it out with --worker")
    from rollcall.run.train_in_folder import read_weights, serve_as_worker, train_as_master

    weights = read_weights(own["--rank-weights"])
    given = {name: str(value) for name, value in own.items() if value is not None}
    if weights is not None:
        given["--rank-weights"] = ",".join(f"{weight:g}" for weight in weights)
    if worker is not None:
        return lambda config, **_: serve_as_worker(log_path, rank=worker, num_nodes=num_nodes, options=given)
    masters = {"--phase": str(Phase.BOTH), "--split": str(Split.TRAIN), **given}
    return partial(train_as_master, folder=log_path, num_nodes=num_nodes, rank_weights=weights, options=masters)
