"""Atomic writes: a reader sees either the old or the new content, never a partial file.

Each write goes to a temporary file next to the target, with a name that begins with ``TEMPORARY``. When the file is complete, it is
renamed to the target. A failed write removes its temporary file; only a killed writer leaves one behind.

The module also has lock files, which only one process at a time can hold.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from rollcall.base.patience import plain_disk_errors

TEMPORARY = ".tmp-"


def write_atomic(path: Path, data: str | bytes, *, durable: bool = True, private: bool = False) -> None:
    """Write the file atomically. ``durable``: the file survives a power cut. ``private``: only the owner can ever read it."""
    with replacing(path, durable=durable, private=private) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path, *, durable: bool = True, private: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces ``path`` if the block succeeds."""
    tmp = _temporary(path)
    try:
        with open(os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(tmp, path)
    except BaseException:
        with suppress(OSError):  # the original error matters more than a leftover file
            tmp.unlink()
        raise


def create_atomic(path: Path, data: bytes) -> bool:
    """Create a file with its full content. Returns False if the file already exists."""
    tmp = _temporary(path)
    try:
        tmp.write_bytes(data)
        try:
            os.link(tmp, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            # The file system has no hard links, as is the case for some object store mounts.
            with path.open("xb") as file:
                file.write(data)
        return True
    except FileExistsError:
        return False
    finally:
        tmp.unlink(missing_ok=True)


@contextmanager
def staging(final: Path) -> Iterator[Path]:
    """Yield a new folder next to ``final``. If the block does not move it into place with ``swap_in``, it is removed."""
    tmp = _temporary(final)
    try:
        tmp.mkdir(parents=True)
        with plain_disk_errors(tmp):  # checks for a full disk before the removal below frees space
            yield tmp
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def swap_in(tmp: Path, final: Path) -> None:
    """Rename a finished folder into place, replacing an older folder with the same name."""
    old = final.with_name(f".old-{final.name}")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        tmp.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    fsync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def fsync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            fsync(Path(folder) / name)
        fsync(Path(folder))


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def take_lock(path: Path) -> IO[bytes] | None:
    """Lock the file and return it. Closing it releases the lock. Returns None if another process holds the lock. The holder may remove
    the file together with its folder."""
    while True:
        with ExitStack() as opened:
            file = opened.enter_context(path.open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # some network file systems raise PermissionError
                return None
            # The last holder may have removed the file after we opened it; another process could then lock a new file. So try again.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    opened.pop_all()
                    return file


def _temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")
