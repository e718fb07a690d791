"""The calls that each worker answered: ``run_dir/calls.jsonl``.

The controller appends a line every few seconds: a time, and by lane the calls that have ended since the line before. A lane
is a worker as the timeline names it. Short calls of one method that follow each other are one entry with a count. Lines are in
the order of their times, so a reader of some steps looks for the first line by halving, and does not read the others.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pydantic import BaseModel, ValidationError

from rollcall.base.append_file import parse_row
from rollcall.observe.events import LineFile

CALLS = "calls.jsonl"
JOIN_S = 0.02  # calls of one method with a shorter pause between them are one entry
MOST_AFTER = 8 << 20  # bytes read after the end of a window, for calls that began in it


class RecordedCall(NamedTuple):
    """One call, or several short ones of the same method. Times are unix time, by the clock of the controller's host."""

    name: str
    start_s: float
    end_s: float
    count: int = 1


class _Line(BaseModel):
    time: float
    calls: dict[str, list[tuple[str, float, float, int]]]


class CallFile(LineFile):
    """The controller's side."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(Path(run_dir) / CALLS)

    def append(self, calls: Mapping[str, Sequence[RecordedCall]], *, time_s: float) -> None:
        rows = {
            lane: [
                [one.name, round(one.start_s - time_s, 3), round(one.end_s - one.start_s, 4), one.count] for one in own
            ]
            for lane, own in calls.items()
            if own
        }
        if rows:
            self.write({"time": round(time_s, 3), "calls": rows})


class BusySpans:
    """Records when something in this process was busy. Any thread may ask; one thread notes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since: float | None = None
        self._ended: list[RecordedCall] = []
        self._lock = threading.Lock()

    def note(self, is_busy: bool) -> None:
        """Whether it is busy from now on. Repeating the same costs nothing."""
        if is_busy == (self._since is not None):
            return
        now = time.time()
        with self._lock:
            if self._since is None:
                self._since = now
                return
            since, self._since = self._since, None
            last = self._ended[-1] if self._ended else None
            if last is not None and since - last.end_s < JOIN_S and now - last.start_s < 30.0:
                self._ended[-1] = last._replace(end_s=now, count=last.count + 1)
            else:
                self._ended.append(RecordedCall(self._name, since, now))

    def take(self) -> list[RecordedCall]:
        """The calls that have ended since the last ``take``."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    @property
    def since_s(self) -> float | None:
        """Unix time, or None if it is not busy."""
        return self._since


def read_calls(run_dir: Path, *, first_s: float = -math.inf, last_s: float = math.inf) -> dict[str, list[RecordedCall]]:
    """The calls that overlap a window of time, by lane."""
    found: dict[str, list[RecordedCall]] = {}
    try:
        file = (Path(run_dir) / CALLS).open("rb")
    except FileNotFoundError:
        return {}
    with file:
        if first_s > -math.inf:
            _seek(file, first_s)
        past: set[str] = set()  # lanes that were seen after the window
        until: int | None = None
        while line := file.readline():
            try:
                row = _Line.model_validate_json(line)
            except ValidationError:
                continue  # it was cut by a kill
            for lane, calls in row.calls.items():
                for name, offset_s, took_s, count in calls:
                    start_s = row.time + offset_s
                    if start_s > last_s:
                        past.add(lane)
                    elif start_s + took_s > first_s:
                        found.setdefault(lane, []).append(RecordedCall(name, start_s, start_s + took_s, count))
            if row.time > last_s:
                # A call is written when it has ended, which may be long after the window.
                until = file.tell() + MOST_AFTER if until is None else until
                if past >= found.keys() or file.tell() > until:
                    break
    return found


def _seek(file: BinaryIO, first_s: float) -> None:
    """Moves to a line before which all lines are older."""
    low, high = 0, file.seek(0, 2)
    while high - low > 1 << 16:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        rows = (parse_row(file.readline()) for _ in range(3))
        time_s = next((row["time"] for row in rows if row), None)
        if time_s is None or time_s >= first_s:
            high = middle
        else:
            low = middle
    file.seek(low)
    if low:
        file.readline()
