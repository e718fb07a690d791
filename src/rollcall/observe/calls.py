"""Records the calls that each worker handled, in ``run_dir/calls.jsonl``.

Every few seconds the controller appends a line: a time, and for each lane the calls that have ended since the previous line. A
lane is a worker's name in the timeline. Consecutive short calls of the same method become one entry with a count. Times are unix
times on the controller host's clock. Lines are sorted by time, so a reader that needs only some steps finds the first line by
binary search and skips the rest.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ValidationError

from rollcall.base.append_file import parse_row
from rollcall.observe.events import LineFile
from rollcall.process.groups.pulse import RecordedCall

CALLS = "calls.jsonl"
JOIN_S = 0.02  # calls of the same method with a shorter pause between them are merged


class _Line(BaseModel):
    time: float
    calls: dict[str, list[tuple[str, float, float, int]]]


class CallFile(LineFile):
    """Writes the file on the controller."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(Path(run_dir) / CALLS)

    def append(self, calls: Mapping[str, Sequence[RecordedCall]], *, time_s: float) -> None:
        rows = {
            lane: [
                (one.name, round(one.start_s - time_s, 3), round(one.end_s - one.start_s, 4), one.count) for one in own
            ]
            for lane, own in calls.items()
            if own
        }
        if rows:
            self.write({"time": round(time_s, 3), "calls": rows})


class BusySpans:
    """Records the periods in which something in this process was busy. One thread calls ``note``; any thread may read."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.since_s: float | None = None  # unix time at which the current work began; None if there is none
        self._ended: list[RecordedCall] = []
        self._lock = threading.Lock()

    def note(self, is_busy: bool) -> None:
        """Record that the work starts or stops now. Calling it again with the same state has no effect."""
        if is_busy == (self.since_s is not None):
            return
        now = time.time()
        with self._lock:
            if self.since_s is None:
                self.since_s = now
                return
            since, self.since_s = self.since_s, None
            last = self._ended[-1] if self._ended else None
            if last is not None and since - last.end_s < JOIN_S and now - last.start_s < 30.0:
                self._ended[-1] = last._replace(end_s=now, count=last.count + 1)
            else:
                self._ended.append(RecordedCall(self._name, since, now))

    def take(self) -> list[RecordedCall]:
        """Return the calls that have ended since the last ``take``."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended


def read_calls(run_dir: Path, *, first_s: float = -math.inf, last_s: float = math.inf) -> dict[str, list[RecordedCall]]:
    """Return the calls that overlap a time window, by lane."""
    found: dict[str, list[RecordedCall]] = {}
    path = Path(run_dir) / CALLS
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        if first_s > -math.inf:
            _seek(file, first_s)
        past: set[str] = set()  # lanes that already have a call after the window
        until: int | None = None
        while line := file.readline():
            try:
                row = _Line.model_validate_json(line)
            except ValidationError:
                continue  # the process was killed while writing this line
            for lane, calls in row.calls.items():
                for name, offset_s, took_s, count in calls:
                    start_s = row.time + offset_s
                    if start_s > last_s:
                        past.add(lane)
                    elif start_s + took_s > first_s:
                        found.setdefault(lane, []).append(RecordedCall(name, start_s, start_s + took_s, count))
            if row.time > last_s:
                # A call is written when it ends, which may be long after the window. Look for it in the next 8 MiB.
                until = file.tell() + (8 << 20) if until is None else until
                if past >= found.keys() or file.tell() > until:
                    break
    return found


def _seek(file: BinaryIO, first_s: float) -> None:
    """Seek to a line such that all earlier lines are older than ``first_s``."""
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
