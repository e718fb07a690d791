"""Finds the run directories that a page shows: the given directories, and the runs inside given folders."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rollcall.base.errors import ConfigError
from rollcall.checkpoint.run_dir import is_run

DEFAULT_FOLDER = Path("runs")
LOOK_EVERY_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    id: str  # used in addresses; stays the same when the server restarts
    name: str  # relative to the folder that the user named
    dir: Path  # the resolved path


class UnknownRunError(LookupError):
    """No run with this id is shown."""


class ShownRuns:
    def __init__(self, given: Sequence[Path], *, is_one: bool = False) -> None:
        """With ``is_one``, the only path in ``given`` is a run directory, even while it is still empty."""
        self._given = [Path(path) for path in given] or [DEFAULT_FOLDER]
        self._is_one = is_one
        for path in self._given if not is_one else []:
            if not path.is_dir():
                problem = f"{path} is a file" if path.exists() else f"{path} does not exist"
                raise ConfigError(f"{problem}; give a run directory (run.dir), or a folder of runs")
        self._lock = threading.Lock()
        self._found: dict[str, ShownRun] = {}
        self._looked = float("-inf")

    def all(self) -> list[ShownRun]:
        """Return all shown runs. A new run in a folder appears within seconds; a removed run disappears."""
        with self._lock:
            if time.monotonic() - self._looked > LOOK_EVERY_S:
                self._found = {place.id: place for path in self._given for place in self._look(path)}
                self._looked = time.monotonic()
            return list(self._found.values())

    def find(self, id: str) -> ShownRun:
        self.all()
        if place := self._found.get(id):
            return place
        raise UnknownRunError(f"no run {id!r} is shown here; it may have been moved or removed")

    def _look(self, path: Path) -> Iterator[ShownRun]:
        real = Path(os.path.realpath(path))
        for found in [real] if self._is_one else islice(_runs_below(real, depth=3), 1000):
            yield _shown(found, name=real.name if found == real else found.relative_to(real).as_posix())


def _runs_below(folder: Path, *, depth: int) -> Iterator[Path]:
    """Yield the run directories in a folder, without following links."""
    with suppress(OSError):  # skips directories that may not be read
        if is_run(folder):
            yield folder
        elif depth:
            with os.scandir(folder) as found:
                below = sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False))
            for name in below:
                if not name.startswith("."):
                    yield from _runs_below(folder / name, depth=depth - 1)


def _shown(path: Path, *, name: str) -> ShownRun:
    mark = hashlib.blake2b(os.fsencode(path), digest_size=3).hexdigest()
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in path.name)
    return ShownRun(id=f"{plain}~{mark}", name=name.encode("utf-8", errors="replace").decode(), dir=path)
