"""Our own checkpoints: reads their manifests and finds the newest one of a run.

A manifest is written last and lists every file in its checkpoint with size and checksum. A sharded checkpoint's files may be
on other nodes: the manifest records the node (``node``) and the path there (``place``).
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
    """A parsed manifest. ``fields`` is the full JSON; ``files`` maps names in the checkpoint to files."""

    path: Path  # the checkpoint
    fields: dict[str, Any]
    files: Mapping[str, StoredFile]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the run: step, score, ..."""
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
        """The files that must be on this node: files in the checkpoint folder, and files that this node wrote elsewhere."""
        own = socket.gethostname()
        return [
            file
            for file in self.files.values()
            if file.path.is_relative_to(self.path) or file.path.is_file() or file.host == own
        ]


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest. Use ``missing_file`` to check that its files exist."""
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
                # A gathered file is in the checkpoint folder; otherwise it is where its node wrote it.
                path=Path(place) if place is not None and not inside.exists() else inside,
                size=int(facts["size"]),
                blake2b=str(facts["blake2b"]),
                node=None if node is None else str(node),
                host=None if host is None else str(host),
            )
        int(fields["step"])
    return Manifest(path=checkpoint, fields=fields, files=files)


def missing_file(files: Iterable[StoredFile]) -> str:
    """Describe the first file that is missing or has the wrong size; empty if none. Checksums are compared when files are read."""
    for file in files:
        if not file.path.is_file():
            return f"{file} does not exist here"
        if (size := file.path.stat().st_size) != file.size:
            return f"{file} has {size:,} bytes instead of {file.size:,}"
    return ""


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints in a ``checkpoints/`` folder, newest first by name."""
    steps = {path: match for path in folder.glob("step-*") if (match := STEP_NAME.fullmatch(path.name))}
    return sorted(steps, key=lambda path: int(steps[path].group(1)), reverse=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a ``checkpoints/`` folder, judging by file sizes. Warns about torn ones it skips.

    Files on other nodes are not checked: ``open_checkpoint`` reports which of them must be copied.
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
