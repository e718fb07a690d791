"""Reads a run's growing files: first all lines, and later only the new lines. Thread-safe."""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollcall.base.append_file import LARGEST_COUNT, is_count, parse_row
from rollcall.base.journal import is_trained_row
from rollcall.observe.events import EVENTS, Mark, PhaseEvent, last_phase_in, marks_in
from rollcall.observe.headline import GRADED, Headline, headline_of

Numbers = NDArray[np.float64]
PIECE = 16 << 20  # bytes in memory at once
HEAD = 256  # bytes; a new file may reuse a removed file's inode, but its first bytes differ


class GrowingFile(ABC):
    """A file to which lines are appended. If it is replaced or gets shorter, it is read from the start. ``read_s`` bounds the time of one
    ``refresh``; the next one reads the rest of a long file."""

    NAME: str  # in the run directory

    def __init__(self, run_dir: Path, *, read_s: float = math.inf) -> None:
        self._path, self._read_s = run_dir / self.NAME, read_s
        self._lock = threading.RLock()
        self._file: tuple[int, int] | None = None  # its device and inode
        self._head = b""
        self._read = 0  # bytes read so far
        self._forget()

    @abstractmethod
    def _forget(self) -> None:
        """Forget all lines so far, because the file will be read again from the start."""

    @abstractmethod
    def _take(self, lines: list[bytes]) -> None:
        """Process complete lines in order."""

    def refresh(self) -> None:
        until = time.monotonic() + self._read_s
        with self._lock:
            while self._read_piece() and time.monotonic() < until:
                pass

    def _read_piece(self) -> bool:
        """Read one piece and return whether there may be more."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                head = file.read(HEAD)
                same = (about.st_dev, about.st_ino) == self._file and about.st_size >= self._read
                if not (same and head.startswith(self._head)):
                    self._start_over((about.st_dev, about.st_ino))
                self._head = head[: head.rfind(b"\n") + 1]  # only complete lines, because the last line may still grow
                file.seek(self._read)
                data = file.read(min(about.st_size - self._read, PIECE))
        except OSError:
            if self._file is not None:
                self._start_over(None)
            return False
        # Skip a line that is longer than a piece, because Rollcall did not write it. The rest of the line does not parse as a row.
        whole = len(data) if len(data) == PIECE and b"\n" not in data else data.rfind(b"\n") + 1
        self._read += whole
        self._take([line for line in data[:whole].split(b"\n") if line])
        return whole > 0 and len(data) == PIECE

    def _start_over(self, file: tuple[int, int] | None) -> None:
        self._file, self._read = file, 0
        self._forget()


class EventLog(GrowingFile):
    """The marks and the last phase in a run's events."""

    NAME = EVENTS

    def _forget(self) -> None:
        self._marks: list[Mark] = []
        self._phase: PhaseEvent | None = None

    def _take(self, lines: list[bytes]) -> None:
        self._marks = [*self._marks, *marks_in(lines)]
        self._phase = last_phase_in(lines) or self._phase

    def marks(self) -> list[Mark]:
        self.refresh()
        return self._marks

    def last_phase(self) -> PhaseEvent | None:
        """Return the phase that began last, including its end if it has ended."""
        self.refresh()
        return self._phase


class TrainedDraws(GrowingFile):
    """Finds the step that trained on a draw."""

    NAME = "journal/trained.jsonl"

    def _forget(self) -> None:
        self._step_of: dict[int, int] = {}

    def _take(self, lines: list[bytes]) -> None:
        for row in map(parse_row, lines):
            if row is not None and is_trained_row(row):
                self._step_of.update(dict.fromkeys(row["draws"], row["step"]))

    def step_of(self, draw: int) -> int | None:
        """Return the step that trained on a draw, or None if the draw is untrained."""
        self.refresh()
        return self._step_of.get(draw)


@dataclass(slots=True)
class _Column:
    rows: array[int] = field(default_factory=lambda: array("q"))  # rows that have a value
    values: array[float] = field(default_factory=lambda: array("d"))
    is_whole: bool = True  # whether all values are integers


class MetricsTable(GrowingFile):
    """The metrics as columns. A resumed run rewrites the file, which is then read again."""

    NAME = "metrics.jsonl"
    version = 0  # changes with every row

    def _forget(self) -> None:
        self.version += 1
        self._row_of: dict[int, int] = {}  # step -> row
        self._columns: dict[str, _Column] = {}

    def _take(self, lines: list[bytes]) -> None:
        rows = [row for row in map(parse_row, lines) if row is not None and is_count(row.get("step"))]
        self.version += len(rows)
        for row in rows:
            place = self._row_of.setdefault(row["step"], len(self._row_of))
            for name, value in row.items():
                if type(value) is float or (type(value) is int and abs(value) < LARGEST_COUNT):
                    column = self._columns.setdefault(name, _Column())
                    column.rows.append(place)
                    column.values.append(value)
                    column.is_whole = column.is_whole and type(value) is int

    @property
    def step(self) -> int:
        """The last trained step, or 0. An evaluation does not count as a step."""
        steps = self.column("time/step_s")[0]
        return int(steps[-1]) if len(steps) else 0

    @property
    def headline(self) -> Headline:
        return headline_of({GRADED: value} for value in self.values(GRADED))

    def names(self) -> list[str]:
        with self._lock:
            return [name for name in self._columns if name not in ("step", "time")]

    def _values(self, name: str) -> Numbers:
        """Return one value per row, NaN if the row lacks the metric. If a step has several values, the last one counts."""
        values = np.full(len(self._row_of), math.nan)
        if column := self._columns.get(name):
            values[np.array(column.rows)] = np.array(column.values)
        return values

    def column(self, name: str) -> tuple[Numbers, Numbers, Numbers]:
        """Return steps, times and values for the rows that have this metric, sorted by step."""
        with self._lock:
            values, steps, times = (self._values(each) for each in (name, "step", "time"))
        there = np.flatnonzero(np.isfinite(values) & np.isfinite(steps))
        order = there[np.argsort(steps[there], kind="stable")]
        return steps[order], times[order], values[order]

    def values(self, name: str) -> list[float]:
        """Return a metric's values, sorted by step."""
        return self.column(name)[2].tolist()

    def last(self, name: str) -> float | None:
        return next(reversed(self.values(name)), None)

    def whole_columns(self) -> dict[str, list[float | None]]:
        """Return every column with one entry per step, in step order. The entry is None if the step lacks the metric."""
        with self._lock:
            order = np.argsort(self._values("step"), kind="stable")
            found: dict[str, list[float | None]] = {}
            for name, column in self._columns.items():
                kind = int if column.is_whole else float
                values = self._values(name)[order].tolist()
                found[name] = [kind(value) if math.isfinite(value) else None for value in values]
        return found
