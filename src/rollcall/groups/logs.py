"""What a worker prints, read on its own node as it grows: a bounded number of bytes at a time, whole lines, without secrets."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rollcall.redact import redact

FIRST_BYTES, MOST_BYTES = 8 << 10, 16 << 10  # of the first look, and of one look

OF_RAY = (b":job_id:", b":actor_name:", b":task_name:")  # lines that Ray writes for itself


class LogTail:
    """The files that standard output and standard error of a process go to."""

    def __init__(self, pid: int) -> None:
        self._ends: dict[str, int] = {}  # how far each file has been read
        for number in (1, 2):
            if (path := _file_of(pid, number)) and path not in self._ends:
                self._ends[path] = max(_size(path) - FIRST_BYTES, 0)

    @property
    def path(self) -> str:
        """The first of them; empty: it prints to no file."""
        return next(iter(self._ends), "")

    def read(self) -> bytes:
        """The lines that are new."""
        return b"".join(self._read(path) for path in self._ends)

    def close(self) -> None:
        self._ends = {}

    def _read(self, path: str) -> bytes:
        size = _size(path)
        if size <= self._ends[path]:
            self._ends[path] = min(self._ends[path], size)
            return b""
        start = max(self._ends[path], size - MOST_BYTES)
        try:
            with open(path, "rb") as file:
                file.seek(start)
                data = file.read(size - start)
        except OSError:  # taken away
            return b""
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) >= MOST_BYTES:
            whole = len(data)  # a line without an end
        self._ends[path] = start + whole
        lines = [line for line in data[:whole].splitlines(keepends=True) if not line.startswith(OF_RAY)]
        return redact(b"".join(lines).decode(errors="replace")).encode()


def _file_of(pid: int, number: int) -> str:
    try:
        path = os.readlink(f"/proc/{pid}/fd/{number}")
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return ""
    return path if is_file and Path(path).is_absolute() else ""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
