"""A file of lines that grows, read once and then only where it has grown."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

PIECE = 16 << 20  # bytes in memory at once
HEAD = 256  # bytes; a new file may get the number of one that was removed, but does not begin like it


class FileTail:
    """Another file of the same name, or one that has become shorter, is read from its beginning. ``read_s``: how long ``pieces`` may
    read; the rest of a long file comes with the next question."""

    def __init__(self, path: Path, *, read_s: float = math.inf) -> None:
        self._path, self._read_s = path, read_s
        self._file: tuple[int, int] | None = None  # device and inode
        self._head = b""
        self._read = 0  # bytes
        self._is_behind = False

    def pieces(self) -> Iterator[tuple[bool, list[bytes]]]:
        """What ``new_lines`` gives, again and again until all is read."""
        until = time.monotonic() + self._read_s
        yield self.new_lines()
        while self._is_behind and time.monotonic() < until:
            yield self.new_lines()

    def new_lines(self) -> tuple[bool, list[bytes]]:
        """Whether all that was read before is void, and the whole lines since then."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                head = file.read(HEAD)
                again = (about.st_dev, about.st_ino) != self._file or about.st_size < self._read
                again = again or not head.startswith(self._head)
                if again:
                    self._file, self._read = (about.st_dev, about.st_ino), 0
                self._head = head[: head.rfind(b"\n") + 1]  # whole lines: the last may still grow
                file.seek(self._read)
                data = file.read(min(about.st_size - self._read, PIECE))
        except OSError:
            gone, self._file, self._read, self._is_behind = self._file is not None, None, 0, False
            return gone, []
        # A line that is longer than a piece is none of ours: it is passed over, and the rest of it cannot be read as a row.
        whole = len(data) if len(data) == PIECE and b"\n" not in data else data.rfind(b"\n") + 1
        self._read += whole
        self._is_behind = whole > 0 and len(data) == PIECE
        return again, [line for line in data[:whole].split(b"\n") if line]
