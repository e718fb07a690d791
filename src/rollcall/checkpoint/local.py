"""Checkpoint parts on the nodes' own disks (``checkpoint.place: local``).

On each node, all parts of a run are in one folder inside the node's temporary folder. The run's ``checkpoints`` folder stores the name of
that folder, so the name moves with the run. A copy of the run gets a new name. The saving process knows from the manifests which files
are still needed (``tidy``). Before a resume, ``bring`` verifies the parts and copies missing ones to the run's own folder.

A crash may corrupt the file that stores the name, so the name is checked before anything in the folder is removed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollcall.base.atomic import replacing
from rollcall.base.errors import CheckpointError
from rollcall.base.wait import warn
from rollcall.model.stored.files import file_checksum
from rollcall.model.stored.find import read_manifest

FOLDER_NAME = "node-folder"  # the file with the folder's name, in the run's checkpoints folder


def name_of_run(checkpoints: Path, *, run: str) -> str:
    """Return the name of the run's folder on every node. The first checkpoint creates the name. A copy of a run gets a new name, because
    two runs that shared a folder would remove each other's parts."""
    path = checkpoints / FOLDER_NAME
    names, inode = names_of_run(checkpoints) if path.exists() else ([], None)
    if names and inode in (None, path.stat().st_ino):
        return names[0]
    if names:
        warn(
            f"{checkpoints} was copied from another run, so new parts go to another folder on each node. The parts of the copied "
            "checkpoints stay where they are: this run reads them but never removes them"
        )
    # run.name may be any string, but this must be a folder name
    word = re.sub(r"[^A-Za-z0-9_-]+", "-", run).strip("-")[:60]
    names = [f"{word or 'run'}-{uuid.uuid4().hex[:12]}", *names]
    with replacing(path) as file:
        own = os.fstat(file.fileno()).st_ino  # a rename keeps the inode, a copy does not
        file.write("\n".join([f"{names[0]} {own}", *names[1:]]).encode())
    return names[0]


def names_of_run(checkpoints: Path) -> tuple[list[str], int | None]:
    """Return the folder names of this run and of the runs that it was copied from, and the inode that the name file records, if any."""
    path = checkpoints / FOLDER_NAME
    text = path.read_text(errors="replace")
    lines = [line.split(" ") for line in text.splitlines()]
    if not lines or not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", line[0]) for line in lines):
        raise CheckpointError(
            f"{path} contains {text[:100]!r}, which is not a valid folder name; restore the file from a copy of the run, or remove it "
            "to continue without the parts on the nodes' disks"
        )
    inode = lines[0][1] if len(lines[0]) > 1 else ""
    return [line[0] for line in lines], int(inode) if inode.isdecimal() else None


def folder_of(name: str) -> Path:
    """Return the run's folder on this node."""
    root = Path(tempfile.gettempdir()) / f"rollcall-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    return root / "parts" / name


def tidy(name: str, *, keep: Collection[str]) -> None:
    """Remove the run's files on this node that no checkpoint refers to. All processes on the node may do this at the same time."""
    root, kept = folder_of(name), {os.path.realpath(path) for path in keep}
    for folder, _, names in os.walk(root, topdown=False):  # yields a folder's content before the folder
        for path in (Path(folder, one) for one in names):
            try:
                if os.path.realpath(path) not in kept:
                    path.unlink(missing_ok=True)
            except OSError as error:
                warn(f"{path} does not belong to any checkpoint, but it cannot be removed: {error.strerror}")
        if folder != str(root):
            with suppress(OSError):  # the folder is not empty, or another process was faster
                os.rmdir(folder)


def elsewhere(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest entries of checkpoint files that exist only on the nodes' own disks."""
    files: Mapping[str, dict[str, Any]] = read_manifest(directory).fields["files"]
    placed = {name: facts for name, facts in files.items() if facts.get("place") is not None}
    return {name: facts for name, facts in placed.items() if not (directory / name).is_file()}


def present(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of those files that are on this node, judging by name and size."""
    places = {name: Path(facts["place"]) for name, facts in files.items()}
    return [name for name, path in places.items() if path.is_file() and path.stat().st_size == files[name]["size"]]


def bring(directory: Path, files: Mapping[str, Mapping[str, Any]], *, copy: bool) -> None:
    """Verify the checksums of these files on this node. If ``copy`` is set, also copy them to the checkpoint's folder."""
    for name, facts in files.items():
        source, target = Path(facts["place"]), directory / name
        if copy:
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as file, replacing(target) as out:
                shutil.copyfileobj(file, out, 1 << 20)
        if file_checksum(target if copy else source) != facts["blake2b"]:
            if copy:
                target.unlink()
            raise CheckpointError(
                f"{source} on node {facts['node']} ({facts['host']}) has changed since it was written: its checksum differs; remove "
                f"{directory} to continue from an earlier checkpoint"
            )
