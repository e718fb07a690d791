"""``metrics.jsonl`` as columns, read once and then only where it has grown."""

from __future__ import annotations

import json
import math
import threading
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollcall.durable.append_file import LARGEST_COUNT, is_count, parse_row
from rollcall.observe.headline import GRADED, Headline, headline_of
from rollcall.view.tail import FileTail

METRICS = "metrics.jsonl"
Numbers = NDArray[np.float64]


def _parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    """The rows of some lines; those that are not rows are left out."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")  # all at once is a third faster than one by one
        if len(rows) == len(lines) and all(type(row) is dict for row in rows):
            return rows
    except (ValueError, RecursionError):
        pass  # one of them is not JSON: which one?
    return [row for row in map(parse_row, lines) if row is not None]


@dataclass(slots=True)
class _Column:
    rows: array[int] = field(default_factory=lambda: array("q"))  # that have it
    values: array[float] = field(default_factory=lambda: array("d"))
    is_whole: bool = True  # all of them are whole numbers


class MetricsTable:
    """Any thread may ask. A resumed run writes the file again; it is then read again."""

    def __init__(self, run_dir: Path, *, read_s: float = math.inf) -> None:
        self._file = FileTail(run_dir / METRICS, read_s=read_s)
        self._lock = threading.Lock()
        self.version = 0  # changes with every row
        self._forget()

    def _forget(self) -> None:
        self._row_of: dict[int, int] = {}  # step -> row
        self._columns: dict[str, _Column] = {}

    def refresh(self) -> None:
        with self._lock:
            for again, lines in self._file.pieces():
                if again:
                    self._forget()
                    self.version += 1
                rows = [row for row in _parsed(lines) if is_count(row.get("step"))]
                self.version += len(rows)
                for row in rows:
                    self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        place = self._row_of.setdefault(row["step"], len(self._row_of))
        for name, value in row.items():
            if type(value) is float or (type(value) is int and abs(value) < LARGEST_COUNT):
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = _Column()
                column.rows.append(place)
                column.values.append(value)
                column.is_whole = column.is_whole and type(value) is int

    @property
    def step(self) -> int:
        """The last step that was trained; 0: none was. An evaluation alone is not one."""
        steps = self.column("time/step_s")[0]
        return int(steps[-1]) if len(steps) else 0

    @property
    def headline(self) -> Headline:
        return headline_of({GRADED: value} for value in self.values(GRADED))

    def names(self) -> list[str]:
        with self._lock:
            return [name for name in self._columns if name not in ("step", "time")]

    def _values(self, name: str) -> Numbers:
        """One for each row, not a number where a row does not have it. The last of a step counts."""
        values = np.full(len(self._row_of), math.nan)
        if column := self._columns.get(name):
            values[np.array(column.rows)] = np.array(column.values)
        return values

    def column(self, name: str) -> tuple[Numbers, Numbers, Numbers]:
        """Steps, times and values of the rows that have it, by step."""
        with self._lock:
            values, steps, times = (self._values(each) for each in (name, "step", "time"))
        there = np.flatnonzero(np.isfinite(values) & np.isfinite(steps))
        order = there[np.argsort(steps[there], kind="stable")]
        return steps[order], times[order], values[order]

    def values(self, name: str) -> list[float]:
        """Those of a metric, by step."""
        return self.column(name)[2].tolist()

    def last(self, name: str) -> float | None:
        return next(reversed(self.values(name)), None)

    def whole_columns(self) -> dict[str, list[float | None]]:
        """Every column with a place for each step, in the order of the steps; None where a step does not have it."""
        with self._lock:
            order = np.argsort(self._values("step"), kind="stable")
            found: dict[str, list[float | None]] = {}
            for name, column in self._columns.items():
                kind = int if column.is_whole else float
                values = self._values(name)[order].tolist()
                found[name] = [kind(value) if math.isfinite(value) else None for value in values]
        return found
