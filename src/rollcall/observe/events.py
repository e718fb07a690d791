"""The phases of a run's steps, and marks, in ``run_dir/events.jsonl``.

A phase writes a line when it begins and another when it ends. The second line repeats the first and adds the end, the duration and the
worker that the phase waited for. A mark is one line, which records that something was lost or has come back. Times are this host's wall
clock; durations are monotonic. The controller appends lines, and anyone may read them. Readers skip a torn last line; the next controller
sets it aside.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollcall.base.append_file import AppendFile, lines_end, parse_row
from rollcall.base.patience import disk_fault
from rollcall.base.wait import warn
from rollcall.base.words import counted

EVENTS = "events.jsonl"
_STEP = re.compile(rb'"step": (\d{1,15})\b')


class StepPhase(StrEnum):
    SYNC = "sync"  # engines receive the weights
    ROLLOUT = "rollout"  # waiting for the step's groups
    AGGREGATE = "aggregate"  # waiting until all groups are on disk
    EVALUATION_DECISION = "evaluation decision"
    EVALUATION = "evaluation"
    ENGINE_RELEASE = "engine release"  # engines that share the policy finish their requests
    UPDATE = "update"
    CHECKPOINT = "checkpoint"
    ENGINE_RESTORE = "engine restore"  # engines receive requests again
    FINAL_SYNC = "final sync"  # the last step's weights
    EXPORT = "export"  # writing the trained model


@dataclass(slots=True, kw_only=True)
class PhaseOutcome:
    """What is recorded when a phase ends."""

    waited_for: str | None = None
    result: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEvent:
    phase: str
    step: int
    start_s: float  # unix time
    end_s: float | None  # None if it is still running or its process was killed
    duration_s: float | None
    waited_for: str | None
    result: str | None


class MarkKind(StrEnum):
    FAULT = "fault"  # something was lost
    RECOVERY = "recovery"  # something has come back
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in a run."""

    at_s: float  # unix time
    name: str
    kind: str  # a MarkKind
    lane: str | None  # the lane in the timeline; None if the mark concerns the whole run
    note: str


class LineFile:
    """Appends JSON lines to a file without syncing it. It never blocks a run: if the disk is full, a line stays in memory and is
    written with a later one. Any thread may write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file: AppendFile | None = None
        self._backlog: deque[bytes] = deque()

    def write(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._backlog.append((json.dumps(row) + "\n").encode())
            self._drain()

    def _drain(self) -> None:
        try:
            if self._file is None:
                self._file = AppendFile(self.path, good_end=lines_end)
            while self._backlog:
                self._file.append(self._backlog[0])
                self._file.forget_unsynced()
                self._backlog.popleft()
        except OSError as error:
            if disk_fault(error, near=self.path) is None:
                raise

    def close(self) -> None:
        with self._lock:
            if self._backlog:
                self._drain()
            if num := len(self._backlog):
                warn(f"{self.path}: {counted(num, 'line')} could not be written")
            if self._file is not None:
                self._file.close()
                self._file = None


class Events(LineFile):
    """Writes the file on the controller. ``show`` receives a phase's name when it begins, and None when it ends."""

    def __init__(self, run_dir: Path, *, show: Callable[[str | None], None] = lambda text: None) -> None:
        super().__init__(Path(run_dir) / EVENTS)
        self.current: tuple[str, int, float] | None = None  # the running phase, its step and its start (unix time)
        self._show = show

    @contextmanager
    def phase(self, phase: StepPhase, step: int) -> Iterator[PhaseOutcome]:
        """Record a phase for the duration of the block. If the block raises, the error is recorded too."""
        begun = {"phase": phase.value, "step": step, "start_s": round(time.time(), 3)}
        started, outcome = time.perf_counter(), PhaseOutcome()
        self.write(begun)
        self.current = phase.value, step, begun["start_s"]
        self._show(f"{phase.value} of step {step}")
        try:
            yield outcome
        except BaseException as error:
            is_stop = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            outcome.result = "stopped" if is_stop else f"failed: {type(error).__name__}"
            raise
        finally:
            self._show(None)
            self.current = None
            end = {"end_s": round(time.time(), 3), "duration_s": round(time.perf_counter() - started, 6)}
            self.write(begun | end | {"waited_for": outcome.waited_for, "result": outcome.result})

    def mark(self, mark: Mark) -> None:
        row = {"mark": mark.name, "at_s": round(mark.at_s, 3), "kind": mark.kind, "lane": mark.lane, "note": mark.note}
        self.write(row)


def read_phases(run_dir: Path, *, first_step: int | None = None, last_step: int | None = None) -> list[PhaseEvent]:
    """Return all phases of these steps in the order in which they began, each of them once."""
    first, last = first_step or 0, math.inf if last_step is None else last_step
    phases: dict[tuple[str, int, float], PhaseEvent] = {}
    for line in _lines(run_dir):
        step = _STEP.search(line)  # so that most lines of a long run need no parsing
        if step is not None and first <= int(step[1]) <= last and (event := _phase_event(line)) is not None:
            phases[event.phase, event.step, event.start_s] = event
    return list(phases.values())


def read_marks(run_dir: Path) -> list[Mark]:
    """Return all marks in the order in which they were written."""
    return marks_in(_lines(run_dir))


def marks_in(lines: Iterable[bytes]) -> list[Mark]:
    """Return the marks among these lines."""
    rows = (parse_row(line) for line in lines if line.startswith(b'{"mark"'))
    return [Mark(row["at_s"], row["mark"], row["kind"], row["lane"], row["note"]) for row in rows if row is not None]


def last_phase_in(lines: Iterable[bytes]) -> PhaseEvent | None:
    """Return the last phase that began in these lines, with its end if it has ended."""
    return next((event for line in reversed([*lines]) if (event := _phase_event(line)) is not None), None)


def _phase_event(line: bytes) -> PhaseEvent | None:
    """Parse a phase; None if the line is of a different kind or torn."""
    if not line.startswith(b'{"phase"') or (row := parse_row(line)) is None:
        return None
    known: dict[str, Any] = {field.name: row.get(field.name) for field in fields(PhaseEvent)}
    return PhaseEvent(**known)


def _lines(run_dir: Path) -> Iterator[bytes]:
    path = Path(run_dir) / EVENTS
    if path.is_file():
        with path.open("rb") as file:
            yield from file
