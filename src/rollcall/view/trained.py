"""Which step trained on which draw: ``journal/trained.jsonl``, read where it has grown."""

from __future__ import annotations

import threading
from pathlib import Path

from rollcall.durable.append_file import parse_row
from rollcall.durable.journal import is_trained_row
from rollcall.view.grown import GrownFile


class Trained:
    def __init__(self, root: Path) -> None:
        self._file = GrownFile(root, "journal", "trained.jsonl")
        self._lock = threading.Lock()
        self._step_of: dict[int, int] = {}

    def step_of(self, draw: int) -> int | None:
        """None: no step has trained on it yet."""
        with self._lock:
            for again, lines in self._file.pieces():
                if again:
                    self._step_of = {}
                for row in map(parse_row, lines):
                    if row is not None and is_trained_row(row):
                        self._step_of.update(dict.fromkeys(row["draws"], row["step"]))
            return self._step_of.get(draw)
