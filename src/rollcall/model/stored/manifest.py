"""Our own checkpoints: the manifest of one, and which of a run's is the newest.

A manifest is written last and names every file of its checkpoint with size and checksum. A sharded checkpoint's files may lie
on other nodes: the manifest says on which (``node``) and where there (``place``).
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
_PART, _WHOLE = re.compile(r"model/part-\d+-of-\d+\.safetensors"), re.compile(r"model/[^/]+\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``fields`` is all of it; ``files`` are the files by their names in the checkpoint."""

    path: Path  # the checkpoint
    fields: dict[str, Any]
    files: Mapping[str, StoredFile]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the run: step, score, ..."""
        return {key: value for key, value in self.fields.items() if key != "files"}

    @property
    def is_sharded(self) -> bool:
        return any(_PART.fullmatch(name) for name in self.files)

    @property
    def weights(self) -> dict[str, StoredFile]:
        """The files with the model's weights."""
        kind = _PART if self.is_sharded else _WHOLE
        return {name: file for name, file in self.files.items() if kind.fullmatch(name)}

    @property
    def here(self) -> list[StoredFile]:
        """The files that must be on this node: those in the checkpoint, and those that this node wrote elsewhere."""
        own = socket.gethostname()
        return [
            file
            for file in self.files.values()
            if file.path.is_relative_to(self.path) or file.path.is_file() or file.host == own
        ]


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(checkpoint: Path) -> Manifest:
    """Reads the manifest; ``missing_file`` tells whether its files are there."""
    path = checkpoint / MANIFEST
    if not path.exists():
        raise StoredError(f"{path} does not exist, so {checkpoint} is not a whole checkpoint; use another")
    files = {}
    with plain_damage(f"{path} cannot be read", advice="restore it, or use another checkpoint"):
        fields = json.loads(read_small(path))
        for name, facts in fields["files"].items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"it names the file {name}, which is not in the checkpoint")
            inside, place, node, host = checkpoint / name, facts.get("place"), facts.get("node"), facts.get("host")
            files[name] = StoredFile(
                # A file that was gathered lies in the checkpoint; otherwise it is where its node wrote it.
                path=Path(place) if place is not None and not inside.exists() else inside,
                size=int(facts["size"]),
                blake2b=str(facts["blake2b"]),
                node=None if node is None else str(node),
                host=None if host is None else str(host),
            )
        int(fields["step"])
    return Manifest(path=checkpoint, fields=fields, files=files)


def missing_file(files: Iterable[StoredFile]) -> str:
    """Which of the files is not here, or not of its size; empty if none. The code that reads the bytes compares checksums."""
    for file in files:
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

    Files on other nodes are not asked for: ``open_checkpoint`` says which must be copied.
    """
    for path in checkpoints_of(folder):
        try:
            manifest = read_manifest(path)
        except StoredError as error:
            warn(f"checkpoint {path} is torn ({error}) and is skipped")
            continue
        if not (why := missing_file(manifest.here)):
            return path
        warn(f"checkpoint {path} is torn ({why}) and is skipped")
    return None
