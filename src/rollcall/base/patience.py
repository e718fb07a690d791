"""Writes that survive a full or read-only disk.

``persist`` performs a write. While the disk refuses the write, ``persist`` retries it every ``RETRY_S``. It warns at once and then every
``SAY_EVERY_S``, with one line for all writes that are waiting for the same disk. It gives up after ``DEADLINE_S``, after Ctrl-C, or when
a process that was asked to stop has no time left. The calling thread waits. The write is repeated, so it must leave nothing half-done
when it raises.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rollcall.base.errors import ConfigError
from rollcall.base.stop import heeded
from rollcall.base.wait import Wait, warn

T = TypeVar("T")

DEADLINE_S = 3600.0
RETRY_S = 1.0
SAY_EVERY_S = 10.0
# Errors that a user can fix while the write is waiting.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)


class DiskError(RuntimeError, ValueError):
    """The disk did not accept a write within the deadline; the message says which write, why and what to do."""


class NodeDiskError(OSError):
    """An error on a node's local disk. The file name has the form HOST:PATH."""


def persist(action: Callable[[], T], *, path: Path, what: str, refuse: Callable[[str], Exception] = DiskError) -> T:
    """Call ``action`` until the disk accepts the write, and return its result. Messages contain ``path`` and ``what`` ("the group of
    draw 3")."""
    disk: object = None  # the disk that refused the write, if any
    began, wait = time.monotonic(), Wait()
    while True:
        try:
            result = action()
        except Exception as error:
            fault = disk_fault(error, near=path)
            if fault is None:
                raise
            if disk is None:
                disk, began = _disk_of(fault, path), time.monotonic()
            waited_s, on_node = time.monotonic() - began, isinstance(fault, NodeDiskError)
            why = f"{path}: cannot write {what}: {f'{fault.filename}: ' if on_node else ''}{fault.strerror}"
            if waited_s >= DEADLINE_S or heeded().is_late:
                waited = f" (waited {waited_s:.0f} s)" if waited_s >= 1 else ""
                raise refuse(
                    f"{why}{waited}; {_advice(fault)}, then run the same command again: it resumes, and nothing that was "
                    "written before is lost"
                ) from error
            wait.note(why)
            with _lock:
                is_due = time.monotonic() - _said.get(disk, -math.inf) >= SAY_EVERY_S
                if is_due:
                    _said[disk] = time.monotonic()
            if is_due:
                free = None if on_node else free_bytes(path)
                left = "" if free is None else f"; {free:,} bytes are free"
                warn(f"{why}{left}; retrying until it succeeds; meanwhile, {_advice(fault)}")
            time.sleep(RETRY_S)
        else:
            if disk is not None and _said.pop(disk, None) is not None:
                warn(f"{path}: wrote {what} after {time.monotonic() - began:.0f} s; continuing")
            return result


_said: dict[object, float] = {}  # when each disk's last warning was printed; all writes to the disk share it
_lock = threading.Lock()


def _disk_of(fault: OSError, path: Path) -> object:
    if isinstance(fault, NodeDiskError):
        return fault.errno, fault.filename.partition(":")[0]
    return fault.errno, next((os.stat(one).st_dev for one in (path, *path.parents) if os.path.exists(one)), None)


def disk_fault(error: BaseException, *, near: Path) -> OSError | None:
    """Return the temporary disk error that caused ``error``, or None if it has another cause. ``near`` is the path that was being
    written."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        number = getattr(link, "errno", None)
        if number in PASSING:
            if isinstance(link, NodeDiskError):
                return NodeDiskError(number, os.strerror(number), link.filename)
            return OSError(number, os.strerror(number), str(near))
        found = None if _is_a_report(link) else re.search(r"\(os error (\d+)\)|(No space left)", str(link))
        if found and (number := int(found[1] or errno.ENOSPC)) in PASSING:
            return OSError(number, os.strerror(number), str(near))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    # A serialiser may hide the reason. A worker's error does not count, because freeing space does not revive a dead worker.
    if isinstance(error, RuntimeError) and not isinstance(error, OSError) and not _is_a_report(error):
        if (free := free_bytes(near)) is not None and free < 4096:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(near))
    return None


@contextmanager
def refusing(run_dir: Path, *, folder: Path) -> Iterator[None]:
    """Wrap a run's first writes. A disk error in ``folder`` raises ConfigError at once, with a message that names the folder."""
    try:
        yield
    except OSError as error:
        what = f"{_advice(error)}, or " if error.errno in PASSING else ""
        raise ConfigError(
            f"run.dir={run_dir}: cannot write to the folder {folder}: {error.strerror}; {what}choose another run.dir"
        ) from error


@contextmanager
def plain_disk_errors(path: Path) -> Iterator[None]:
    """Raise a disk error as its original OSError, even if a serialiser raised something else, because an OSError can be passed
    between processes."""
    try:
        yield
    except Exception as error:
        fault = disk_fault(error, near=path)
        if fault is None or isinstance(error, OSError):
            raise
        try:
            raise fault from error
        finally:
            del fault  # a reference here would create a cycle that keeps the failed write's files open


def _is_a_report(error: BaseException) -> bool:
    """Whether the error's text quotes other errors, such as a worker's traceback. In such an error, only the cause is searched for a disk
    error, not the text."""
    return type(error).__module__.startswith(("rollcall.", "ray."))


def free_bytes(path: Path) -> int | None:
    """Return the free bytes on the path's disk, or None if they are unknown. The path need not exist."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _advice(fault: OSError) -> str:
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space" if fault.errno == errno.ENOSPC else "free space, or raise the quota"
    if fault.errno == errno.EROFS:
        return "mount the file system writable"
    if fault.errno in (errno.EACCES, errno.EPERM):
        return f"make the folder writable for user {os.getuid()}"
    return "check the disk or the mount"
