"""Resolves paths in a submitted run file, which refer to the cluster's file system.

An absolute path, a built-in task and a hub name stay as they are. A relative path is relative to the submitter's folder. It is
made absolute if the nodes see that folder at the same path: the submitter is a node, and the folder is on the same
mount as the cluster's rendezvous folder (or there is only this node). Otherwise it is refused: what it names is not there,
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
    """What the submitter, itself a node, knows about the cluster's shared files."""

    num_nodes: int
    folder: str | None  # a folder that all nodes see at the same path


def resolve_paths(config: Config, *, folder: Path, shared: Shared | None) -> Config:
    """Return the run's config with absolute paths. ``shared`` is None if the submitter is not a node of the cluster."""
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
    # The dump has JSON types and contains the secrets in cluster.env.
    return parse_config(run)


def _paths(run: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Return each path as its key in the run file, the dict that contains it and the name there."""
    found = [("run.dir", run["run"], "dir"), ("model.path", run["model"], "path")]
    if run["model"]["lora"] and run["model"]["lora"]["path"]:
        found.append(("model.lora.path", run["model"]["lora"], "path"))
    found += [(f"data.{split}", run["data"], split) for split in ("train", "val") if run["data"][split]]
    models = [(index, reward) for index, reward in enumerate(run["reward"]) if reward["type"] == "model"]
    return found + [(f"reward.{index}.path", reward, "path") for index, reward in models]


def _is_relative(text: str, key: str, folder: Path) -> bool:
    if text.startswith(HUB):  # a dataset's name, or a folder with the layout of a dataset
        name = text.removeprefix(HUB)
        return not Path(name).is_absolute() and (name.startswith(".") or (folder / name).exists())
    if text.startswith("builtin:") or Path(text).is_absolute():
        return False
    # A model is a folder here or a name on a hub.
    return not key.endswith(".path") or text.startswith(".") or (folder / text).exists()


def mount_of(path: Path) -> Path:
    """Return the mount point above a path; a bind mount from the same file system counts too."""
    path = path.resolve()
    points = {Path(each.mountpoint) for each in psutil.disk_partitions(all=True)}
    return next(place for place in (path, *path.parents) if place in points or place == place.parent)
