"""A file that grows by whole records: the journal's, the events, the metrics.

A failed write leaves no part of a record behind, a torn tail inherited from a killed process is set aside in ``torn/``.
Errors are OSErrors; the caller decides whether to wait (``base/patience.py``).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeGuard

from rollcall.base.atomic import fsync
from rollcall.base.wait import warn

LARGEST_COUNT = 1 << 40


class AppendFile:
    def __init__(self, path: Path, *, good_end: Callable[[bytes], int]) -> None:
        """``good_end`` says where the last whole record of the file's bytes ends."""
        self.path = path
        self._new = not path.exists()
        data = b"" if self._new else path.read_bytes()
        self._end = good_end(data)
        self._unsynced: list[tuple[int, bytes]] = []  # what the disk may not have yet, by offset
        if self._end < len(data):
            _set_aside(path, offset=self._end, tail=data[self._end :])
        self._fd: int = self._open()
        if self._end < len(data):
            os.ftruncate(self._fd, self._end)

    def append(self, record: bytes) -> None:
        """All of it, or an OSError and nothing of it."""
        try:
            write_at(self._fd, record, self._end)
        except OSError as error:
            if error.errno == errno.ESTALE:  # the server forgot the file's handle; its name still leads there
                fresh = self._open()
                os.close(self._fd)
                self._fd = fresh
            self._drop_partial()
            raise
        self._unsynced.append((self._end, record))
        self._end += len(record)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)

    def _drop_partial(self) -> None:
        try:
            os.ftruncate(self._fd, self._end)
        except OSError as error:
            # Harmless: the next record is written over it, and a reader takes it for a torn tail.
            warn(f"{self.path}: half a record stays after offset {self._end}: {error.strerror}")

    def sync(self) -> None:
        """When the disk refuses, it raises, and everything is still to be synced."""
        kept_records, kept_new = self._unsynced, self._new
        try:
            with ExitStack() as kept:
                self.begin_sync(kept)()
        except OSError:
            self._unsynced, self._new = kept_records, kept_new
            raise

    def begin_sync(self, kept: ExitStack) -> Callable[[], None]:
        """A function that brings everything appended so far to the disk; call it again if it raises. This object may be
        closed by then: ``kept`` holds a descriptor open for it."""
        records, self._unsynced = self._unsynced, []
        new, self._new = self._new, False
        fd = os.dup(self._fd) if records else None
        if fd is not None:
            kept.callback(os.close, fd)
        failed = False

        def flush() -> None:
            nonlocal failed
            if fd is not None:
                try:
                    if failed:
                        # A kernel that failed to write a page takes it for written, and may drop it.
                        for offset, record in records:
                            write_at(fd, record, offset)
                    os.fsync(fd)
                except OSError:
                    failed = True
                    raise
            if new:
                fsync(self.path.parent)

        return flush

    def forget_unsynced(self) -> None:
        """For files that are never synced."""
        self._unsynced.clear()

    def close(self) -> None:
        os.close(self._fd)


def lines_end(data: bytes) -> int:
    """``good_end`` of a file of lines."""
    return data.rfind(b"\n") + 1


def parse_row(line: bytes | str) -> dict[str, Any] | None:
    """A line of a file of JSON objects; None if the line is not one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested deeper than anything we write
        return None
    return row if isinstance(row, dict) else None


def is_count(value: Any) -> TypeGuard[int]:
    """A number of steps, draws or versions, as such a file holds it."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of the bytes: one call of the system may write a part of them."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _set_aside(path: Path, *, offset: int, tail: bytes) -> None:
    folder = path.parent / "torn"
    target, number = folder / f"{path.name}-{offset}", 0
    while target.exists():
        number += 1
        target = folder / f"{path.name}-{offset}-{number}"
    folder.mkdir(exist_ok=True)
    try:
        target.write_bytes(tail)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    warn(f"{path}: torn tail of {len(tail)} bytes at offset {offset} moved to {target}")
