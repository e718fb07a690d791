"""Packages the code for a job: this ``rollcall``, the run file, and the modules that the run file names.

Data, weights and version control stay where they are. The package is a zip archive, byte-identical for the same content, which
Ray unpacks on each node as the job's working directory; its modules take precedence over those installed there.
"""

from __future__ import annotations

import ast
import importlib.machinery
import io
import os
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollcall.base.errors import ClusterError
from rollcall.base.words import size
from rollcall.config import Config
from rollcall.config.environments import named_code
from rollcall.model.files import resolve_model

RUN_FILE = "run.yaml"
MAX_BYTES = 32 * 2**20  # unpacked; code is a hundredth of this

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
    """Build the archive that the run needs on the cluster. Modules are looked up in ``folder``, then on ``sys.path``."""
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
            f"the code of this run is {size(total)}, at most {size(MAX_BYTES)} travel with a job; the biggest files:\n{named}\n"
            "keep data and weights in a folder that all nodes see, outside the modules that the run file names"
        )
    contents = {RUN_FILE: run_file.encode()} | {name: path.read_bytes() for name, path in files.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))  # fixed, so that the archive is too
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, contents[name])
    return buffer.getvalue()


def own_modules(config: Config, *, folder: Path) -> dict[str, Path]:
    """Return the user's own files behind rewards and environment by their names in the archive."""
    # An environment with its own Python has its modules there.
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
    """Return the user's own files behind ``module``, including the user's modules that it imports, and so on."""
    search = [str(folder), *(entry for entry in sys.path if entry)]
    installed = [sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib", "platstdlib")]
    found: dict[str, Path] = {}
    waiting, seen = [module.partition(".")[0]], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name == "rollcall" or name in sys.stdlib_module_names:
            continue
        seen.add(name)
        origin = _find(name, search)
        if origin is None and len(seen) == 1:
            raise ClusterError(
                f"{asked}: there is no module {name!r} in {folder}; submit from the directory that holds it"
            )
        if origin is None or any(origin.is_relative_to(place) for place in installed if place):
            continue  # part of an installed distribution, which the cluster's nodes have too
        files = list(_code_files(origin)) if origin.is_dir() else [origin]
        found.update({str(path.relative_to(origin.parent)): path for path in files})
        for path in files:
            waiting += _imported(path) if path.suffix == ".py" else []
    return found


def _find(name: str, search: Sequence[str]) -> Path | None:
    """Return a module's file or a package's folder."""
    spec = importlib.machinery.PathFinder.find_spec(name, search)
    found = None if spec is None else next(iter(spec.submodule_search_locations or ()), spec.origin)
    return Path(found) if found else None


def _imported(path: Path) -> set[str]:
    """Return the top-level names that a source file imports from outside its package."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise ClusterError(f"{path}, line {error.lineno}: {error.msg}") from None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names
