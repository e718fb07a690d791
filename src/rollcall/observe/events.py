"""What a run does and did: the phases of its steps, in ``run_dir/events.jsonl``.

A phase is a line when it begins and a line when it ends; the second repeats the first and adds end, duration and who was
waited for. Times are this host's wall clock, durations are not. Lines are appended by the controller and read by anyone;
a last line that was cut by a kill is left out by readers and set aside by the next controller.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollcall.durable.append_file import AppendFile, is_count, lines_end, parse_row
from rollcall.durable.patience import disk_fault, persist
from rollcall.wait import warn
from rollcall.words import are, counted

EVENTS = "events.jsonl"
LATEST_S = 1e11  # unix time; no clock shows a later one


class StepPhase(StrEnum):
    SYNC = "sync"  # engines take the weights
    ROLLOUT = "rollout"  # the step's groups are waited for
    AGGREGATE = "aggregate"  # all of them on the disk
    EVALUATION_DECISION = "evaluation decision"
    EVALUATION = "evaluation"
    ENGINE_RELEASE = "engine release"  # engines that share the policy end what they have
    UPDATE = "update"
    CHECKPOINT = "checkpoint"
    ENGINE_RESTORE = "engine restore"  # engines get requests again
    FINAL_SYNC = "final sync"  # the last step's weights
    EXPORT = "export"  # the trained model is written


@dataclass(slots=True, kw_only=True)
class PhaseOutcome:
    """What a phase tells of itself at its end."""

    waited_for: str | None = None
    result: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEvent:
    phase: str
    step: int
    start_s: float  # unix time
    end_s: float | None  # None: it still runs, or its process was killed
    duration_s: float | None
    waited_for: str | None
    result: str | None


class Events:
    """The controller's side. Any thread may write. ``show`` gets the name of a phase when it begins, and None when it ends."""

    def __init__(self, run_dir: Path, *, show: Callable[[str | None], None] = lambda text: None) -> None:
        self.path = Path(run_dir) / EVENTS
        self._show = show
        self._lock = threading.Lock()
        self._file: AppendFile | None = None
        self._backlog: deque[bytes] = deque()
        self._waiter: threading.Thread | None = None  # for the disk
        self._closed = False

    @contextmanager
    def phase(self, phase: StepPhase, step: int) -> Iterator[PhaseOutcome]:
        """A phase that lasts as long as the block; if the block raises, the phase says with which error."""
        begun = {"phase": phase.value, "step": step, "start_s": round(time.time(), 3)}
        started, outcome = time.perf_counter(), PhaseOutcome()
        self.write(begun)
        self._show(f"{phase.value} of step {step}")
        try:
            yield outcome
        except BaseException as error:
            outcome.result = f"failed: {type(error).__name__}"
            raise
        finally:
            self._show(None)
            end = {"end_s": round(time.time(), 3), "duration_s": round(time.perf_counter() - started, 6)}
            self.write(begun | end | {"waited_for": outcome.waited_for, "result": outcome.result})

    def write(self, event: dict[str, Any]) -> None:
        """Returns at once: on a full disk the event is kept, and a thread writes it later."""
        with self._lock:
            self._backlog.append((json.dumps(event) + "\n").encode())
            if self._waiter is not None:
                return
            try:
                self._drain()
            except OSError as error:
                if disk_fault(error, near=self.path) is None:
                    raise
                self._waiter = threading.Thread(target=self._wait, name="events", daemon=True)
                self._waiter.start()

    def _drain(self) -> None:
        if self._file is None:
            self._file = AppendFile(self.path, good_end=lines_end)
        while self._backlog:
            self._file.append(self._backlog[0])
            self._file.forget_unsynced()
            self._backlog.popleft()

    def _wait(self) -> None:
        def attempt() -> None:
            with self._lock:
                if not self._closed:
                    self._drain()
                self._waiter = None

        persist(attempt, path=self.path, what="events")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._backlog:
                warn(f"{self.path}: {counted(len(self._backlog), 'event')} {are(len(self._backlog))} not written")
            if self._file is not None:
                self._file.close()
                self._file = None


def read_phases(run_dir: Path) -> list[PhaseEvent]:
    """All phases in the order in which they began, each once; other lines are left out."""
    phases: dict[tuple[str, int, float], PhaseEvent] = {}
    for row in read_events(run_dir):
        event = _phase_event(row)
        if event is not None:
            phases[event.phase, event.step, event.start_s] = event
    return list(phases.values())


def _phase_event(row: dict[str, Any]) -> PhaseEvent | None:
    """None: a line of another kind, or one that no controller wrote."""
    if not isinstance(row.get("phase"), str) or not is_count(row.get("step")) or not _is_time(row.get("start_s")):
        return None
    rest: dict[str, Any] = {key: row[key] if _is_time(row.get(key)) else None for key in ("end_s", "duration_s")}
    rest |= {key: str(row[key]) if row.get(key) is not None else None for key in ("waited_for", "result")}
    return PhaseEvent(phase=row["phase"], step=row["step"], start_s=row["start_s"], **rest)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LATEST_S


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    try:
        data = (Path(run_dir) / EVENTS).read_bytes()
    except FileNotFoundError:
        return []
    rows = (parse_row(line) for line in data.splitlines())
    return [row for row in rows if row is not None]  # one may be cut by a kill
