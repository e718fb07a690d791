"""The paths of a run file that is submitted: they mean the cluster's side.

An absolute path, a built-in task and a hub name stay as they are. A relative path is relative to the folder of the submitter. It
is made absolute if the nodes see that folder at the same place: the submitter is a node, and the folder is on the same
mount as the cluster's rendezvous folder (or there is only this node). Elsewhere it is refused: what it names is not there,
and a run directory inside Ray's own folders would be lost with the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rollcall.base.errors import ClusterError
from rollcall.config import Config, parse_config
from rollcall.config.checks import HUB


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The files of a cluster, as the submitter, one of its nodes, knows them."""

    num_nodes: int
    folder: str | None  # that all nodes see at the same place


def resolve_paths(config: Config, *, folder: Path, shared: Shared | None) -> Config:
    """The run with absolute paths. ``shared`` is None if the submitter is not a node of the cluster."""
    run = config.model_dump(mode="json")
    relative = [(key, place, name) for key, place, name in _paths(run) if _is_relative(place[name], key, folder)]
    if not relative:
        return config
    is_seen = shared is not None and (
        shared.num_nodes == 1 or (shared.folder is not None and mount_of(folder) == mount_of(Path(shared.folder)))
    )
    if not is_seen:
        wrong = ", ".join(f"{key}={place[name]}" for key, place, name in relative)
        key, place, name = relative[0]
        raise ClusterError(
            f"{wrong}: relative to {folder}, which the cluster's nodes do not see; write paths as they are there, such as "
            f"{key}=/SHARED/{place[name]}"
        )
    for _, place, name in relative:
        kind = HUB if place[name].startswith(HUB) else ""
        place[name] = f"{kind}{folder / place[name].removeprefix(kind)}"
    # The dump is in JSON's terms and holds the secrets of cluster.env.
    return parse_config(run)


def _paths(run: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Each path with its key in the run file and the place that holds it."""
    found = [("run.dir", run["run"], "dir"), ("model.path", run["model"], "path")]
    if run["model"]["lora"] and run["model"]["lora"]["path"]:
        found.append(("model.lora.path", run["model"]["lora"], "path"))
    found += [(f"data.{split}", run["data"], split) for split in ("train", "val") if run["data"][split]]
    models = [(index, reward) for index, reward in enumerate(run["reward"]) if reward["type"] == "model"]
    return found + [(f"reward.{index}.path", reward, "path") for index, reward in models]


def _is_relative(text: str, key: str, folder: Path) -> bool:
    if text.startswith(HUB):  # the name of a dataset, or a folder laid out as one
        name = text.removeprefix(HUB)
        return not Path(name).is_absolute() and (name.startswith(".") or (folder / name).exists())
    if text.startswith("builtin:") or Path(text).is_absolute():
        return False
    # A model is a folder here, or else the name of one on a hub.
    return not key.endswith(".path") or text.startswith(".") or (folder / text).exists()


def mount_of(path: Path) -> Path:
    """The mount point that a path lies under; a folder that is bound from the same file system is one too."""
    path = path.resolve()
    points = {Path(each.mountpoint) for each in psutil.disk_partitions(all=True)}
    return next(place for place in (path, *path.parents) if place in points or place == place.parent)
