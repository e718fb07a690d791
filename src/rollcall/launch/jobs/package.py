"""Packs a job's code (this ``rollcall``, the run file and the modules that it names) and resolves its paths for the nodes.

Data, weights and version-control files are not packed. The package is a zip archive, byte-identical for the same content. Ray
unpacks it on each node as the job's working directory, and its modules take precedence over installed ones.
"""

from __future__ import annotations

import ast
import importlib.machinery
import io
import os
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rollcall.base.errors import ClusterError
from rollcall.base.words import size
from rollcall.config import Config, parse_config
from rollcall.config.checks import HUB
from rollcall.config.environments import named_code
from rollcall.model.files import resolve_model

RUN_FILE = "run.yaml"
MAX_BYTES = 32 * 2**20  # unpacked; code usually needs a hundredth of this

_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages")
# Weights, data, archives and compiled Python files.
_NOT_CODE = frozenset(
    (
        ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".npy", ".npz", ".pkl", ".h5", ".pyc", ".parquet", ".arrow",
        ".jsonl", ".csv", ".tsv", ".db", ".sqlite", ".log", ".png", ".jpg", ".jpeg", ".mp4", ".pdf", ".zip", ".tar", ".gz", ".tgz",
        ".bz2", ".xz", ".zst", ".whl",
    )
)  # fmt: skip


def build_package(config: Config, *, run_file: str, folder: Path) -> bytes:
    """Build the archive with the run's code. Modules are looked up in ``folder``, then on ``sys.path``."""
    root = Path(__file__).parents[2]
    files = {f"rollcall/{path.relative_to(root)}": path for path in _code_files(root)}
    if config.model.path.startswith("builtin:"):
        embedded = Path(resolve_model(config.model.path))
        files |= {f"rollcall/{path.relative_to(root)}": path for path in sorted(embedded.iterdir())}
    files |= own_modules(config, folder=folder)
    sizes = {path: path.stat().st_size for path in files.values()}
    total = sum(sizes.values()) + len(run_file)
    if total > MAX_BYTES:
        biggest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:5]
        named = "\n".join(f"  {size(sizes[path]):>10}  {path}" for path in biggest)
        raise ClusterError(
            f"the code of this run takes {size(total)}, but the limit is {size(MAX_BYTES)}; the largest files:\n{named}\n"
            "keep data and weights in a folder that all nodes see, outside the modules that the run file names"
        )
    contents = {RUN_FILE: run_file.encode()} | {name: path.read_bytes() for name, path in files.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name)  # with a fixed date, so the archive is reproducible
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, contents[name])
    return buffer.getvalue()


def own_modules(config: Config, *, folder: Path) -> dict[str, Path]:
    """Return the user's own files that the rewards and the environment need, by their names in the archive."""
    # An environment with its own Python has its modules installed there.
    environment = None if getattr(config.environment, "python", None) else config.environment
    found: dict[str, Path] = {}
    for key, path in named_code(config.reward, environment).items():
        found |= _module_files(path.partition(":")[0], folder=folder, asked=f"{key}={path}")
    return found


def _code_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and Path(name).suffix.lower() not in _NOT_CODE:
                yield Path(folder) / name


def _module_files(module: str, *, folder: Path, asked: str) -> dict[str, Path]:
    """Return the user's own files of ``module`` and of all modules that it imports, directly or indirectly."""
    search = [str(folder), *(entry for entry in sys.path if entry)]
    installed = [sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib", "platstdlib")]
    found: dict[str, Path] = {}
    waiting, seen = [module.partition(".")[0]], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name == "rollcall" or name in sys.stdlib_module_names:
            continue
        seen.add(name)
        spec = importlib.machinery.PathFinder.find_spec(name, search)
        place = None if spec is None else next(iter(spec.submodule_search_locations or ()), spec.origin)
        origin = Path(place) if place else None  # a module's file or a package's folder
        if origin is None and len(seen) == 1:
            raise ClusterError(
                f"{asked}: there is no module {name!r} in {folder}; submit from the folder that contains it"
            )
        if origin is None or any(origin.is_relative_to(place) for place in installed if place):
            continue  # part of an installed distribution, which the cluster's nodes have too
        files = list(_code_files(origin)) if origin.is_dir() else [origin]
        found.update({str(path.relative_to(origin.parent)): path for path in files})
        for path in files:
            waiting += _imported(path) if path.suffix == ".py" else []
    return found


def _imported(path: Path) -> set[str]:
    """Return the top-level names that a source file imports from outside its package."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise ClusterError(f"{path}, line {error.lineno}: {error.msg}") from None
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


# Paths in the run file, which refer to the cluster's file system
#
# An absolute path, a built-in task and a hub name stay as they are. A relative path is relative to the submitter's folder. It is made
# absolute if the nodes see that folder at the same path: the submitter is a node, and the folder is on the same mount as the cluster's
# rendezvous folder (or there is only this node). Otherwise it is refused, because the nodes would look for it in the job's working
# directory: its files are not there, and a run directory there would be deleted with the cluster.


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the submitter, if it is a node, knows about the cluster's shared files."""

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
            f"{wrong}: relative paths start at {folder}, which the cluster's nodes cannot see; use absolute paths on the nodes, such as "
            f"{key}=/SHARED/{place[name]}"
        )
    for _, place, name in relative:
        kind = HUB if place[name].startswith(HUB) else ""
        place[name] = f"{kind}{folder / place[name].removeprefix(kind)}"
    # The dump has JSON types and contains the secrets in cluster.env.
    return parse_config(run)


def _paths(run: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """For each path, return its key in the run file, the dict that contains it, and its name in that dict."""
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
    # A model is either a folder on this machine or a name on a hub.
    return not key.endswith(".path") or text.startswith(".") or (folder / text).exists()


def mount_of(path: Path) -> Path:
    """Return the mount point above a path; a bind mount from the same file system counts too."""
    path = path.resolve()
    points = {Path(each.mountpoint) for each in psutil.disk_partitions(all=True)}
    return next(place for place in (path, *path.parents) if place in points or place == place.parent)
