"""Finds the weights and the config at a path by file names, and reads the manifests of our own checkpoints.

A manifest is written last and lists every file in its checkpoint with size and checksum. A sharded checkpoint's files may be on other
nodes. In that case, the manifest records the node (``node``) and the path on it (``place``).
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcall.base.wait import warn
from rollcall.config.yaml import read_small
from rollcall.model.stored.files import StoredError, StoredFile, plain_damage

MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A parsed manifest. ``fields`` is the full JSON; ``files`` maps names in the checkpoint to files."""

    path: Path  # the checkpoint
    fields: dict[str, Any]
    files: Mapping[str, StoredFile]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the run: step, score, ..."""
        return {key: value for key, value in self.fields.items() if key != "files"}

    @property
    def here(self) -> list[StoredFile]:
        """The files that must be on this node: files in the checkpoint folder, and files that this node wrote elsewhere."""
        own = socket.gethostname()
        return [
            file
            for file in self.files.values()
            if file.path.is_relative_to(self.path) or file.path.is_file() or file.host == own
        ]


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest. Use ``missing_file`` to check that its files exist."""
    path = checkpoint / MANIFEST
    if not path.exists():
        raise StoredError(f"{path} does not exist, so {checkpoint} is not a complete checkpoint; use another one")
    files = {}
    with plain_damage(f"{path} cannot be read", advice="restore it, or use another checkpoint"):
        fields = json.loads(read_small(path))
        for name, facts in fields["files"].items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"it names the file {name}, which is not in the checkpoint")
            inside, place, node, host = checkpoint / name, facts.get("place"), facts.get("node"), facts.get("host")
            files[name] = StoredFile(
                # A gathered file is in the checkpoint folder; otherwise, it is at the path where its node wrote it.
                path=Path(place) if place is not None and not inside.exists() else inside,
                size=int(facts["size"]),
                blake2b=str(facts["blake2b"]),
                node=None if node is None else str(node),
                host=None if host is None else str(host),
            )
        int(fields["step"])
    return Manifest(path=checkpoint, fields=fields, files=files)


def missing_file(files: Iterable[StoredFile]) -> str:
    """Describe the first file that is missing or has the wrong size. Return "" if there is none. Checksums are compared when the files
    are read."""
    for file in files:
        if not file.path.is_file():
            return f"{file} does not exist on this machine"
        if (size := file.path.stat().st_size) != file.size:
            return f"{file} has {size:,} bytes instead of {file.size:,}"
    return ""


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints in a ``checkpoints/`` folder, newest first by name."""
    steps = {path: match for path in folder.glob("step-*") if (match := STEP_NAME.fullmatch(path.name))}
    return sorted(steps, key=lambda path: int(steps[path].group(1)), reverse=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a ``checkpoints/`` folder, judging by file sizes. Warn about each torn checkpoint.

    Files on other nodes are not checked: ``open_checkpoint`` reports which of them must be copied.
    """
    for path in checkpoints_of(folder):
        try:
            why = missing_file(read_manifest(path).here)
        except StoredError as error:
            why = str(error)
        if not why:
            return path
        warn(f"checkpoint {path} is torn ({why}) and is skipped")
    return None


LATEST = "latest_checkpointed_iteration.txt"  # written by verl
SHARDS = ("part-*-of-*.safetensors", "model_world_size_*_rank_*.pt", ".metadata")
PROBE = "probe.json"  # in our model directories: reference outputs of the trained model (``checkpoint/probe.py``)
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's; its folder contains adapter weights, not a model
ADAPTER_WEIGHTS = "adapter_model.safetensors"
METADATA = ".metadata"  # in PyTorch's distributed checkpoints


def verl_folder(path: Path) -> Path | None:
    """Return the folder with verl's shards, or None if there are none.

    ``path`` may be that folder, one verl checkpoint (whose ``actor/`` is the policy), or verl's checkpoints folder.
    """
    candidates = [path, path / "actor"]
    if (path / LATEST).is_file():
        step = read_small(path / LATEST, most=1000).decode(errors="replace").strip()
        candidates.append(path / f"global_step_{step}" / "actor")
    return next((one for one in candidates if any(one.glob("model_world_size_*_rank_*.pt"))), None)


def is_model_dir(path: Path) -> bool:
    """Return whether transformers can open this directory by itself. A directory with shards does not count, even with a config."""
    sharded = any(any(path.glob(name)) for name in SHARDS)
    return (path / "config.json").is_file() and not sharded


def checkpoint_of(path: Path) -> Path | None:
    """Return the Rollcall checkpoint for ``path``: the path itself, the newest checkpoint of a run, or the parent of a ``model/``
    folder."""
    for folder in (path, path.parent):
        if (folder / MANIFEST).is_file() and (folder == path or path.name == "model"):
            return folder
    for folder in (path, path / "checkpoints"):
        if checkpoints_of(folder):
            return newest_checkpoint(folder)
    return None


def adapter_folder(path: Path) -> Path | None:
    """Return the adapter folder: ``path`` itself or the one inside its checkpoint; None if there is none."""
    candidates = [path]
    if not is_model_dir(path) and (checkpoint := checkpoint_of(path)) is not None:
        candidates.append(checkpoint / "model")
    return next((one for one in candidates if (one / ADAPTER_CONFIG).is_file()), None)


def config_folder(path: Path) -> Path | None:
    """Return the folder with config.json and tokenizer for the model at ``path``, or None if there is none."""
    if is_model_dir(path):
        return path
    if (checkpoint := checkpoint_of(path)) is not None:
        found = [checkpoint / "model"]
    elif (folder := verl_folder(path)) is not None:
        found = [folder / "huggingface", folder]
    else:
        found = [path, path / "huggingface", path / "model"]
    return next((folder for folder in found if (folder / "config.json").is_file()), None)
