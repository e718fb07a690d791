"""Parts of checkpoints on the nodes' own disks (``checkpoint.place: local``).

All of a run's are below one folder of the node's temporary folder, whose name the run's ``checkpoints`` folder keeps: it moves
with the run. The process that saves knows from its manifests which files are still of use (``tidy``). Before a resume each node
brings what others need to the run's own folder, checksums compared (``bring``).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rollcall.durable.atomic import create_atomic, replacing
from rollcall.durable.patience import plain_disk_errors
from rollcall.errors import CheckpointError
from rollcall.stored.manifest import Manifest, read_manifest

FOLDER_NAME = "node-folder"  # in the run's checkpoints folder
CHUNK_BYTES = 16 << 20


def name_of_run(checkpoints: Path, *, run: str) -> str:
    """The name of the run's folder on every node; it is made with the first checkpoint."""
    path = checkpoints / FOLDER_NAME
    create_atomic(path, f"{run}-{uuid.uuid4().hex[:12]}".encode())
    return path.read_text()


def is_used(checkpoints: Path) -> bool:
    return (checkpoints / FOLDER_NAME).exists()


def folder_of(name: str) -> Path:
    """The run's folder on this node; only this user can enter it."""
    root = Path(tempfile.gettempdir()) / f"rollcall-{os.getuid()}"
    with plain_disk_errors(root):
        root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise CheckpointError(
            f"checkpoint.place=local: {root} belongs to another user; remove it, or set TMPDIR to a folder of your own on each node"
        )
    return root / "parts" / name


def tidy(name: str, *, keep: Collection[str]) -> None:
    """Remove the run's files on this node that no checkpoint names."""
    folder, kept = folder_of(name), set(keep)
    for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder before the folder
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif str(path) not in kept:
            path.unlink(missing_ok=True)


def elsewhere(directory: Path) -> dict[str, dict[str, Any]]:
    """The files of a checkpoint that are on nodes' own disks and were not brought to it, as its manifest describes them."""
    manifest: Manifest = read_manifest(directory)
    files: Mapping[str, dict[str, Any]] = manifest.fields["files"]
    return {
        name: facts
        for name, facts in files.items()
        if facts.get("place") is not None and not (directory / name).is_file()
    }


def present(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which of these files are on this node, by name and size."""
    return [name for name, facts in files.items() if _size(Path(facts["place"])) == facts["size"]]


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def bring(directory: Path, files: Mapping[str, Mapping[str, Any]], *, copy: bool) -> None:
    """Compare these files of this node with their checksums, and ``copy`` them to the checkpoint."""
    for name, facts in files.items():
        source, target = Path(facts["place"]), directory / name
        digest = hashlib.blake2b(digest_size=16)
        with source.open("rb") as file:
            if not copy:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                with plain_disk_errors(target), replacing(target) as out:
                    while chunk := file.read(CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
        if digest.hexdigest() != facts["blake2b"]:
            target.unlink(missing_ok=True) if copy else None
            raise CheckpointError(
                f"{source} on node {facts['node']} ({facts['host']}) is not as it was written: its checksum differs; remove "
                f"{directory} to go on from an earlier checkpoint"
            )


def remove_all(name: str) -> None:
    shutil.rmtree(folder_of(name), ignore_errors=True)
