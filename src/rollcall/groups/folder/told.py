"""What a worker tells the master about its calls, in the file that shows that it lives.

The file is written every second, and a master on a slow file system may not see each one. So it has the last calls with their
numbers, and the master takes those that it does not know yet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollcall.groups.pulse import DoneCall, Reader, Seen

TOLD = "pulse"  # its key in the file
KEPT_CALLS = 64


class CallTeller:
    """The worker's side; ``facts`` is asked in another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: Reader | None = None
        self._mark = ""
        self._num_calls = 0
        self._calls: deque[DoneCall] = deque(maxlen=KEPT_CALLS)

    def begin(self, pid: int, mark: str) -> None:
        """This process is a worker of the group with this mark."""
        with self._lock:
            self._reader, self._mark, self._num_calls = Reader(pid), mark, 0
            self._calls.clear()

    def end(self) -> None:
        with self._lock:
            if self._reader is not None:
                self._reader.close()
            self._reader = None

    def facts(self) -> Mapping[str, Any]:
        with self._lock:
            if self._reader is None:
                return {}
            now_s, seen = time.monotonic(), self._reader.look()
            self._calls += seen.calls
            self._num_calls += len(seen.calls)
            calls, told = list(self._calls), asdict(seen) | {"calls": (), "longest_s": None}
            return {
                TOLD: {"mark": self._mark, "now_s": now_s, "num_calls": self._num_calls, "calls": calls, "seen": told}
            }


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    seen: Seen
    now_s: float  # of the worker's monotonic clock
    num_calls: int  # that it has told in all


def read_told(facts: Mapping[str, Any], *, mark: str, after: int) -> Heard | None:
    """What a worker of the group with this mark tells, with the calls past the first ``after``; None: nothing of this group."""
    told = facts.get(TOLD)
    if told is None or told["mark"] != mark:
        return None
    new = max(told["num_calls"] - after, 0)
    calls = tuple(DoneCall(*call) for call in told["calls"][-new:]) if new else ()
    return Heard(seen=Seen(**{**told["seen"], "calls": calls}), now_s=told["now_s"], num_calls=told["num_calls"])
