"""Our own checkpoints: the manifest of one, and which of a run's is the newest.

A manifest is written last and names every file of its checkpoint with size and checksum. A sharded checkpoint's files may lie
on other nodes: the manifest says on which (``node``) and where there (``place``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcall.config.yaml import read_small
from rollcall.stored.files import StoredError, StoredFile
from rollcall.wait import warn

MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 1 << 28
NOT_A_MANIFEST = (OSError, KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)
STEP_NAME = re.compile(r"step-(\d{6,})")
_PART = re.compile(r"model/part-\d+-of-\d+\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``fields`` is all of it; ``files`` are the files by their names in the checkpoint."""

    path: Path  # the checkpoint
    fields: dict[str, Any]
    files: Mapping[str, StoredFile]

    @property
    def is_sharded(self) -> bool:
        return any(_PART.fullmatch(name) for name in self.files)

    @property
    def weights(self) -> dict[str, StoredFile]:
        """The files with the model's weights."""
        if self.is_sharded:
            return {name: file for name, file in self.files.items() if _PART.fullmatch(name)}
        pattern = re.compile(r"model/[^/]+\.safetensors")
        return {name: file for name, file in self.files.items() if pattern.fullmatch(name)}


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest alone; whether its files are there is another question (``missing_file``)."""
    path = checkpoint / MANIFEST
    try:
        return parse_manifest(checkpoint)
    except FileNotFoundError:
        raise StoredError(f"{path} does not exist, so {checkpoint} is not a whole checkpoint; give another") from None
    except NOT_A_MANIFEST as error:
        raise StoredError(f"{path} cannot be read ({type(error).__name__}: {error}); give another checkpoint") from None


def parse_manifest(checkpoint: Path) -> Manifest:
    """The same for those who have words of their own for what is missing or wrong: it raises what Python does."""
    fields = json.loads(read_small(checkpoint / MANIFEST, most=MOST_MANIFEST_BYTES))
    files = {}
    for name, facts in fields["files"].items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it names the file {name}, which is not in the checkpoint")
        files[name] = _file(checkpoint, name, facts)
    int(fields["step"])
    return Manifest(path=checkpoint, fields=fields, files=files)


def _file(checkpoint: Path, name: str, facts: Mapping[str, Any]) -> StoredFile:
    here, place = checkpoint / name, facts.get("place")
    node = facts.get("node")
    return StoredFile(
        # A file that was gathered lies in the checkpoint; otherwise it is where its node wrote it.
        path=Path(place) if place is not None and not here.exists() else here,
        size=int(facts["size"]),
        blake2b=str(facts["blake2b"]),
        node=None if node is None else str(node),
    )


def missing_file(manifest: Manifest) -> str:
    """Which file is not here, or not of its size; empty if none. The code that reads the bytes compares checksums."""
    for file in manifest.files.values():
        if not file.path.is_file():
            return f"{file} does not exist here"
        if (size := file.path.stat().st_size) != file.size:
            return f"{file} has {size:,} bytes instead of {file.size:,}"
    return ""


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints in a ``checkpoints/`` folder, newest first, by their names."""
    steps = {path: match for path in folder.glob("step-*") if (match := STEP_NAME.fullmatch(path.name))}
    return sorted(steps, key=lambda path: int(steps[path].group(1)), reverse=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a ``checkpoints/`` folder that is whole by its files' sizes; torn ones are named and skipped.

    One whose files are on other nodes is whole: ``open_checkpoint`` says which file must be copied.
    """
    for path in checkpoints_of(folder):
        try:
            manifest = read_manifest(path)
        except StoredError as error:
            warn(f"checkpoint {path} is torn ({error}) and is skipped")
            continue
        here = {name: file for name, file in manifest.files.items() if file.path.is_relative_to(path)}
        why = missing_file(Manifest(path=path, fields=manifest.fields, files=here))
        if not why:
            return path
        warn(f"checkpoint {path} is torn ({why}) and is skipped")
    return None
