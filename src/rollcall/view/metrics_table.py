"""``metrics.jsonl`` as columns, read once and then only where it has grown."""

from __future__ import annotations

import json
import math
import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollcall.durable.append_file import LARGEST_COUNT, is_count, parse_row
from rollcall.view.grown import GrownFile

FILE = "metrics.jsonl"
Column = NDArray[np.float64]


def _parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    """The rows of some lines; those that are not rows are left out."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")  # all at once is a third faster than one by one
        if len(rows) == len(lines) and all(type(row) is dict for row in rows):
            return rows
    except (ValueError, RecursionError):
        pass  # one of them is not JSON: which one?
    return [row for row in map(parse_row, lines) if row is not None]


class MetricsTable:
    """Any thread may ask. A resumed run writes the file again; it is then read again."""

    def __init__(self, root: Path) -> None:
        self._file = GrownFile(root, FILE)
        self._lock = threading.Lock()
        self.version = 0  # changes with every row
        self._forget()

    def _forget(self) -> None:
        self._row_of: dict[int, int] = {}  # step -> row
        self._columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        with self._lock:
            again, lines = self._file.new_lines()
            if again:
                self._forget()
                self.version += 1
            rows = [row for row in _parsed(lines) if is_count(row.get("step"))]
            if rows:
                self._add(rows)

    def _add(self, rows: list[dict[str, Any]]) -> None:
        """Column by column: a long run has half a million values."""
        self.version += len(rows)
        places = [self._row_of.setdefault(row["step"], len(self._row_of)) for row in rows]
        for name in dict.fromkeys(name for row in rows for name in row):
            column = self._columns.setdefault(name, array("d"))
            column.extend([math.nan] * (len(self._row_of) - len(column)))
            for place, row in zip(places, rows, strict=True):
                value = row.get(name)
                if type(value) is float or (type(value) is int and abs(value) < LARGEST_COUNT):
                    column[place] = value

    def names(self) -> list[str]:
        with self._lock:
            return [name for name in self._columns if name not in ("step", "time")]

    def column(self, name: str) -> tuple[Column, Column, Column]:
        """Steps, times and values of the rows that have it, by step."""
        with self._lock:
            values = np.array(self._columns.get(name, ()), dtype=np.float64)
            steps = np.array(self._columns.get("step", ()), dtype=np.float64)[: len(values)]
            times = np.array(self._columns.get("time", ()), dtype=np.float64)[: len(values)]
        times = np.pad(times, (0, len(values) - len(times)), constant_values=math.nan)
        there = np.flatnonzero(np.isfinite(values) & np.isfinite(steps))
        order = there[np.argsort(steps[there], kind="stable")]
        return steps[order], times[order], values[order]

    def last(self, name: str) -> float | None:
        _, _, values = self.column(name)
        return float(values[-1]) if len(values) else None
