"""Files of a run directory, and only of it: whatever links a directory holds, nothing outside is read."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 64 << 20  # of a small file that is read as a whole
DEEPEST = 30  # folders in each other, of a folder whose size is asked for


class OutsideError(ValueError):
    """A path that leads out of the run directory, or to something that is not a regular file."""


def inside(root: Path, *names: str) -> Path:
    """The path of ``names`` below ``root``, which is resolved; refused if it leads elsewhere."""
    path = root.joinpath(*names)
    real = Path(os.path.realpath(path))
    if real != root and not real.is_relative_to(root):
        raise OutsideError(f"{path.name} is a link that leads out of the run directory, so it is not read")
    return real


def regular(root: Path, *names: str) -> Path:
    """The path of ``names`` below ``root``, which may be missing; refused if it is a link, a pipe, a folder or a device."""
    path = inside(root, *names)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return path
    if not stat.S_ISREG(mode):
        raise OutsideError(f"{path.name} is not a regular file, so it is not read")
    return path


def open_inside(root: Path, *names: str) -> BinaryIO:
    """A regular file below ``root``, open for reading. A pipe or a device is refused before it is opened."""
    path = regular(root, *names)
    # No part has a link left in it. Each is opened from the one before: a link that appears since then is not followed.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    at = os.open(root, flags | os.O_DIRECTORY)
    try:
        *folders, last = path.relative_to(root).parts
        for part in folders:
            below = os.open(part, flags | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        file = os.fdopen(os.open(last, flags | os.O_NONBLOCK, dir_fd=at), "rb")
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OutsideError(f"{path.name} is not a regular file, so it is not read")
    return file


def read_inside(root: Path, *names: str, most: int = MOST_BYTES) -> bytes | None:
    """The first ``most`` bytes of a file; None: it is not there, or not ours to read."""
    try:
        with open_inside(root, *names) as file:
            return file.read(most)
    except (OSError, OutsideError):
        return None


def read_json(root: Path, *names: str) -> Any:
    """None: the file is not there, or not JSON."""
    data = read_inside(root, *names)
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None


def entries(root: Path, *names: str) -> Iterator[os.DirEntry[str]]:
    """What a folder holds, links left out; nothing if it is not there."""
    try:
        with os.scandir(inside(root, *names)) as found:
            yield from (entry for entry in found if not entry.is_symlink())
    except (OSError, OutsideError):
        return


def size_of(root: Path, *names: str) -> int:
    """Bytes of all files below a folder, links not followed."""
    total, folders = 0, [names]
    while folders:
        at = folders.pop()
        for entry in entries(root, *at):
            try:
                if not entry.is_dir():
                    total += entry.stat().st_size
                elif len(at) < DEEPEST:
                    folders.append((*at, entry.name))
            except OSError:
                continue  # removed since the folder was listed
    return total
