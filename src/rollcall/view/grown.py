"""A file of lines that grows, read once and then only where it has grown."""

from __future__ import annotations

import os
from pathlib import Path

from rollcall.view.inside import OutsideError, open_inside


class GrownFile:
    """Another file of the same name, or one that has become shorter, is read from its beginning."""

    def __init__(self, root: Path, *names: str) -> None:
        self._root, self._names = root, names
        self._file: tuple[int, int] | None = None  # device and inode
        self._read = 0  # bytes

    def new_lines(self) -> tuple[bool, list[bytes]]:
        """Whether all that was read before is void, and the whole lines since then."""
        try:
            with open_inside(self._root, *self._names) as file:
                about = os.fstat(file.fileno())
                again = (about.st_dev, about.st_ino) != self._file or about.st_size < self._read
                if again:
                    self._file, self._read = (about.st_dev, about.st_ino), 0
                file.seek(self._read)
                data = file.read(about.st_size - self._read)
        except (OSError, OutsideError):
            gone, self._file, self._read = self._file is not None, None, 0
            return gone, []
        whole = data.rfind(b"\n") + 1
        self._read += whole
        return again, [line for line in data[:whole].split(b"\n") if line]
