"""The workers of a group as they were last seen, and what they did: one thread collects it, another takes it.

Times of a worker are its host's monotonic clock. ``HostClock`` turns them into unix time of this host. It trusts no clock of another
host: a node tells its monotonic time in every answer, and of the last answers the one with the shortest round trip says how far
the two clocks are apart. That is wrong by half a round trip at most. Where there is no round trip (workers that share only a
folder), the answer that was the fewest seconds old counts as if it were new.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollcall.groups.pulse import DoneCall, Seen

KEPT_ANSWERS = 64
KEPT_CALLS = 4096  # of a worker, until someone takes them
KEPT_LOG = 64 << 10  # bytes of a worker


class Turn(NamedTuple):
    """A worker is lost or back."""

    at_s: float  # unix time
    rank: int
    is_lost: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    rank: int
    pid: int
    seen: Seen | None  # None: not seen yet
    since_s: float | None  # ``seen.since_s`` as unix time
    is_silent: bool = False  # its node does not answer
    lost: str = ""  # why; empty: it is not
    log: str = ""  # the file that it prints to, on its node


@dataclass(frozen=True, slots=True, kw_only=True)
class Sightings:
    """``calls``, ``turns`` and ``logs`` are those since the last time; times are unix time."""

    workers: Sequence[Sighting] = ()
    calls: Mapping[int, Sequence[DoneCall]] = field(default_factory=dict)  # by rank
    turns: Sequence[Turn] = ()
    logs: Mapping[int, bytes] = field(default_factory=dict)  # by rank


class HostClock:
    """How far another host's monotonic clock is from this host's unix time."""

    def __init__(self) -> None:
        self._answers: deque[tuple[float, float]] = deque(maxlen=KEPT_ANSWERS)  # round trip, apart

    def note(self, there_s: float, *, asked_s: float, answered_s: float) -> None:
        """A host says ``there_s``, asked and heard at these times of ours."""
        trip_s = max(answered_s - asked_s, 0.0)
        self._answers.append((trip_s, answered_s - trip_s / 2 - there_s))

    def here(self, there_s: float) -> float:
        """A time of that host, as ours."""
        return there_s + min(self._answers)[1] if self._answers else time.time()


class Lookout:
    """Any thread may note or take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks: dict[str, HostClock] = defaultdict(HostClock)  # by node
        self._seen: dict[int, tuple[Seen, float | None]] = {}
        self._calls: dict[int, deque[DoneCall]] = defaultdict(lambda: deque(maxlen=KEPT_CALLS))
        self._logs: dict[int, bytes] = {}
        self._paths: dict[int, str] = {}
        self._turns: list[Turn] = []
        self._lost: dict[int, Turn] = {}

    def note(
        self, node: str, workers: Mapping[int, Seen], *, there_s: float, asked_s: float, answered_s: float
    ) -> None:
        """What a node tells of its workers; ``there_s`` is its monotonic time at that moment."""
        with self._lock:
            clock = self._clocks[node]
            clock.note(there_s, asked_s=asked_s, answered_s=answered_s)
            for rank, seen in workers.items():
                since_s = None if seen.since_s is None else clock.here(seen.since_s)
                self._seen[rank] = seen, since_s
                self._calls[rank] += [
                    call._replace(start_s=clock.here(call.start_s), end_s=clock.here(call.end_s)) for call in seen.calls
                ]
                if rank in self._lost and not seen.is_alive:
                    self._end_call(rank, self._lost[rank].at_s)

    def note_log(self, rank: int, path: str, added: bytes) -> None:
        with self._lock:
            self._paths[rank] = path
            self._logs[rank] = (self._logs.get(rank, b"") + added)[-KEPT_LOG:]

    def add(self, rank: int, call: DoneCall) -> None:
        """A call with times of ours."""
        with self._lock:
            self._calls[rank].append(call)

    def lose(self, rank: int, why: str) -> None:
        with self._lock:
            if rank in self._lost:
                return
            turn = self._lost[rank] = Turn(time.time(), rank, True, why)
            self._turns.append(turn)
            self._end_call(rank, turn.at_s)

    def _end_call(self, rank: int, at_s: float) -> None:
        """What it did when it was last seen ended with it. Said twice, it is the same call to a reader."""
        seen, since_s = self._seen.get(rank, (None, None))
        if seen is not None and seen.doing and since_s is not None:
            self._calls[rank].append(DoneCall(seen.doing, since_s, max(at_s, since_s)))

    def regain(self, rank: int, note: str) -> None:
        """A new process has this rank."""
        with self._lock:
            if self._lost.pop(rank, None) is not None:
                self._turns.append(Turn(time.time(), rank, False, note))
            self._seen.pop(rank, None)

    def take(self, pids: Sequence[int], *, silent: Collection[int] = ()) -> Sightings:
        """``pids``: the processes by rank. ``silent``: ranks on nodes that do not answer."""
        with self._lock:
            calls = {rank: list(own) for rank, own in self._calls.items()}
            turns, logs = self._turns, self._logs
            self._calls.clear()
            self._turns, self._logs = [], {}
            workers = [self._sighting(rank, pid, is_silent=rank in silent) for rank, pid in enumerate(pids)]
        return Sightings(workers=workers, calls=calls, turns=turns, logs=logs)

    def _sighting(self, rank: int, pid: int, *, is_silent: bool) -> Sighting:
        seen, since_s = self._seen.get(rank, (None, None))
        return Sighting(
            rank=rank,
            pid=pid,
            seen=seen,
            since_s=since_s,
            is_silent=is_silent,
            lost=self._lost[rank].why if rank in self._lost else "",
            log=self._paths.get(rank, ""),
        )
