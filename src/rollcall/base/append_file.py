"""An append-only file of complete records, such as those of the journal, the events and the metrics.

A failed write leaves no partial record behind. If a killed process left a torn tail, it is moved to ``torn/``.
Errors are raised as OSError, and the caller decides whether to wait (``base/patience.py``).
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
        """``good_end`` takes the file's bytes and returns the offset at which the last complete record ends."""
        self.path = path
        self._new = not path.exists()
        data = b"" if self._new else path.read_bytes()
        self._end = good_end(data)
        self._unsynced: list[tuple[int, bytes]] = []  # records that may not be on disk yet, with their offsets
        if self._end < len(data):
            _set_aside(path, offset=self._end, tail=data[self._end :])
        self._fd: int = self._open()
        if self._end < len(data):
            os.ftruncate(self._fd, self._end)

    def append(self, record: bytes) -> None:
        """Write the whole record, or raise OSError and leave the file unchanged."""
        try:
            write_at(self._fd, record, self._end)
        except OSError as error:
            # The file server dropped the handle, but the file can still be opened by name.
            if error.errno == errno.ESTALE:
                fresh = self._open()
                os.close(self._fd)
                self._fd = fresh
            try:
                os.ftruncate(self._fd, self._end)
            except OSError as problem:
                # A leftover partial record is harmless: the next record overwrites it, and readers treat it as a torn tail.
                warn(f"{self.path}: a partial record remains after offset {self._end}: {problem.strerror}")
            raise
        self._unsynced.append((self._end, record))
        self._end += len(record)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)

    def sync(self) -> None:
        """Sync all appended records to disk. If this fails, raises OSError, and all of them still count as unsynced."""
        kept_records, kept_new = self._unsynced, self._new
        try:
            with ExitStack() as kept:
                self.begin_sync(kept)()
        except OSError:
            self._unsynced, self._new = kept_records, kept_new
            raise

    def begin_sync(self, kept: ExitStack) -> Callable[[], None]:
        """Return a function that flushes everything appended so far to disk. If the function raises, call it again. It works even after
        this object is closed, because ``kept`` holds a separate file descriptor."""
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
                        # Write again, because the kernel marks pages as clean after a failed write and may drop them.
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
        """Drop the records that are kept for ``sync``. Use this for files that are never synced."""
        self._unsynced.clear()

    def close(self) -> None:
        os.close(self._fd)


def lines_end(data: bytes) -> int:
    """``good_end`` for line-based files."""
    return data.rfind(b"\n") + 1


def parse_row(line: bytes | str) -> dict[str, Any] | None:
    """Parse a line of a JSON Lines file. Returns None if the line is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested deeper than anything we write
        return None
    return row if isinstance(row, dict) else None


def is_count(value: Any) -> TypeGuard[int]:
    """Whether the value is a valid step, draw or version number."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes. A single system call may write only some of them."""
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
    warn(f"{path}: torn tail of {len(tail)} bytes at offset {offset} was moved to {target}")
