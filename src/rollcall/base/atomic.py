"""Atomic writes: a reader sees either the old content or the new, never a partial file.

Each write goes to a temporary file next to the target, whose name begins with ``TEMPORARY``, and is renamed when it is
complete. A failed write removes its temporary file; only a killed writer leaves one behind.

Also lock files, which one process at a time can hold.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from rollcall.base.patience import plain_disk_errors

TEMPORARY = ".tmp-"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def write_atomic(path: Path, data: str | bytes, *, durable: bool = True, private: bool = False) -> None:
    """``durable``: the file survives a power cut. ``private``: only the owner can read the file, at any time."""
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
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without hard links, such as some object store mounts.
            try:
                with path.open("xb") as file:
                    file.write(data)
            except FileExistsError:
                return False
        return True
    finally:
        tmp.unlink(missing_ok=True)


@contextmanager
def staging(final: Path) -> Iterator[Path]:
    """Yield a new folder next to ``final``, to be filled and then moved with ``swap_in``. Leftovers are removed at the end."""
    tmp = _temporary(final)
    try:
        tmp.mkdir(parents=True)
        with plain_disk_errors(tmp):  # checked before the folder is removed, which frees space
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
    """Flush a file or a directory entry list to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def take_lock(path: Path) -> IO[bytes] | None:
    """Lock the file and return it; closing it releases the lock. Returns None if another process holds the lock. The holder may remove
    the file along with its folder."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between open and lock; another process could then lock a new one.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except (BlockingIOError, PermissionError):  # PermissionError: on some network file systems
            file.close()
            return None
        except FileNotFoundError:
            pass  # removed: look again
        except BaseException:
            file.close()
            raise
        file.close()


def _temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")
