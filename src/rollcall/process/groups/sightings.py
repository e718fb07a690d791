"""The last observed state of a group's workers: which are lost (``Watch``), and their current and finished calls (``Lookout``).

``Watch`` does no I/O: it decides from the nodes' reports which workers are lost. A node that does not answer for
``SILENT_S`` is lost, with all its workers. Silence is measured in missed reports, not in seconds, so that a pause of this process
does not count against a node. A worker is lost when its process is gone, when it is suspended in two reports in a row, or when one of
its calls takes longer than ``patience_s`` allows: ten times the longest call of that method by a worker of its kind so far, and at
least a minute. While any process of the run is stopped in a debugger, the clock of every call is paused, because other processes may
be waiting for that process.

In a ``Lookout``, one thread collects the workers' calls and another thread takes them.

A worker's times come from its host's monotonic clock. ``HostClock`` converts them to this host's unix time. It does not rely on
any other host's unix time: a node sends its monotonic time in every answer, and the offset between the two clocks is taken from the
recent answer with the shortest round trip. The error is at most half a round trip.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from rollcall.process.groups.pulse import RecordedCall, Seen

LOOK_EVERY_S = 1.0
ANSWER_S = 1.0  # for a node to answer a query
SILENT_S = 8.0
FIRST_ANSWER_S = 120.0  # for the process that watches the node to start
FIRST_CALL_S = 1800.0
LEAST_S, FACTOR = 60.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A worker that must be treated as dead."""

    rank: int
    why: str
    still_runs: bool  # if True, its stacks can be read, and it must be killed


class Watch:
    """Decides which workers are lost. ``looks`` contains each node's report about its workers, by rank, or None if it did not answer."""

    def __init__(self) -> None:
        self._silent: dict[str, int] = {}  # by node: the number of consecutive queries without an answer
        self._has_answered: set[str] = set()
        self._stopped: dict[int, int] = {}  # by rank: the number of consecutive reports of a suspended process
        self._longest_s: dict[tuple[str, str], float] = {}  # by kind of worker and method
        self._lost: set[int] = set()
        # By rank: a call, and how long it had been running when the process was last stopped in a debugger.
        self._held: dict[int, tuple[int, float]] = {}

    def forgive(self, rank: int) -> None:
        """Watch this rank again because it has a new process."""
        self._lost.discard(rank)
        self._stopped.pop(rank, None)

    def judge(
        self,
        looks: Mapping[str, Mapping[int, Seen] | None],
        *,
        seats: Mapping[str, list[int]],
        gone: set[str],
        kinds: Mapping[int, str],
        is_held: bool = False,
    ) -> list[Loss]:
        """Return the workers that were lost since this was last called. ``seats`` contains the ranks on each node, ``gone`` the nodes
        that Ray declared dead, ``kinds`` the roles of each rank: an actor loads its model in seconds, but an engine may compile for
        minutes. ``is_held``: some process of the run is stopped in a debugger."""
        found: list[Loss] = []
        for node, ranks in seats.items():
            seen = looks.get(node)
            self._silent[node] = 0 if seen is not None else self._silent.get(node, 0) + 1
            if seen is not None:
                self._has_answered.add(node)
            silent_s = self._silent[node] * (LOOK_EVERY_S + ANSWER_S)
            allowed_s = SILENT_S if node in self._has_answered else FIRST_ANSWER_S
            if node in gone or silent_s >= allowed_s:
                why = (
                    "its node has left the cluster"
                    if node in gone
                    else f"its node has been silent for {silent_s:.0f} s"
                )
                found += [Loss(rank=rank, why=why, still_runs=False) for rank in ranks]
            for rank, one in (seen or {}).items():
                if is_held:
                    self._held[rank] = (one.num_done, one.busy_s)
                if (loss := self._judge(rank, one, kinds.get(rank, ""))) is not None:
                    found.append(loss)
        new = [loss for loss in found if loss.rank not in self._lost]
        self._lost |= {loss.rank for loss in new}
        return new

    def patience_s(self, kind: str, method: str) -> float:
        longest_s = self._longest_s.get((kind, method))
        return FIRST_CALL_S if longest_s is None else max(LEAST_S, FACTOR * longest_s)

    def _judge(self, rank: int, seen: Seen, kind: str) -> Loss | None:
        if not seen.is_alive:
            return Loss(rank=rank, why="its process is gone", still_runs=False)
        for method, took_s in (seen.longest_s or {}).items():
            self._longest_s[kind, method] = max(self._longest_s.get((kind, method), 0.0), took_s)
        self._stopped[rank] = self._stopped.get(rank, 0) + 1 if seen.state == psutil.STATUS_STOPPED else 0
        if self._stopped[rank] >= 2:
            during = f" during {seen.doing}" if seen.doing else ""
            return Loss(rank=rank, why=f"its process is stopped (state T){during}", still_runs=True)
        call, held_s = self._held.get(rank, (-1, 0.0))
        busy_s = seen.busy_s - (held_s if call == seen.num_done else 0.0)
        allowed_s = self.patience_s(kind, seen.doing)
        if seen.doing and busy_s > allowed_s:
            why = f"no progress in {seen.doing} for {busy_s:.0f} s, but only {allowed_s:.0f} s are allowed"
            return Loss(rank=rank, why=why, still_runs=True)
        return None


class Turn(NamedTuple):
    """A worker was lost, or a new process has replaced it."""

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
    lost: str = ""  # why it was lost; empty: it was not lost
    log: str = ""  # the file that it prints to, on its node


@dataclass(frozen=True, slots=True, kw_only=True)
class Sightings:
    """The last observed state of the workers. ``calls``, ``turns`` and ``logs`` are new since it was last taken. Times are unix time."""

    workers: Sequence[Sighting] = ()
    calls: Mapping[int, Sequence[RecordedCall]] = field(default_factory=dict)  # by rank
    turns: Sequence[Turn] = ()
    logs: Mapping[int, bytes] = field(default_factory=dict)  # by rank


class HostClock:
    """The offset between another host's monotonic clock and this host's unix time."""

    def __init__(self) -> None:
        self._answers: deque[tuple[float, float]] = deque(maxlen=64)  # round trip, offset

    def note(self, there_s: float, *, asked_s: float, answered_s: float) -> None:
        """Record that a host's clock showed ``there_s``. The query was sent at ``asked_s``, and the answer arrived at ``answered_s``."""
        trip_s = max(answered_s - asked_s, 0.0)
        self._answers.append((trip_s, answered_s - trip_s / 2 - there_s))

    def here(self, there_s: float) -> float:
        """Convert a time on that host to this host's unix time."""
        return there_s + min(self._answers)[1] if self._answers else time.time()


class Lookout:
    """Collects the workers' states and calls for one reader. Any thread may call ``note`` and ``take``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks: dict[str, HostClock] = defaultdict(HostClock)  # by node
        self._seen: dict[int, tuple[Seen, float | None]] = {}
        self._calls: dict[int, deque[RecordedCall]] = defaultdict(lambda: deque(maxlen=4096))
        self._logs: dict[int, bytes] = {}
        self._paths: dict[int, str] = {}
        self._turns: list[Turn] = []
        self._lost: dict[int, Turn] = {}

    def note(
        self, node: str, workers: Mapping[int, Seen], *, there_s: float, asked_s: float, answered_s: float
    ) -> None:
        """Record a node's report about its workers; ``there_s`` is the node's monotonic time at that moment."""
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
            self._logs[rank] = (self._logs.get(rank, b"") + added)[-(64 << 10) :]

    def add(self, rank: int, call: RecordedCall) -> None:
        """Add a call whose times are in this host's unix time."""
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
        """Record the end of the call that a lost worker was last seen running. If a call is reported twice, readers count it once."""
        seen, since_s = self._seen.get(rank, (None, None))
        if seen is not None and seen.doing and since_s is not None:
            self._calls[rank].append(RecordedCall(seen.doing, since_s, max(at_s, since_s)))

    def regain(self, rank: int, note: str) -> None:
        """Record that a new process has this rank."""
        with self._lock:
            if self._lost.pop(rank, None) is not None:
                self._turns.append(Turn(time.time(), rank, False, note))
            self._seen.pop(rank, None)

    def take(self, pids: Sequence[int], *, silent: Collection[int] = ()) -> Sightings:
        """Return the new calls, turns and logs. ``pids``: the processes by rank. ``silent``: ranks on nodes that do not answer."""
        with self._lock:
            calls = {rank: list(own) for rank, own in self._calls.items()}
            turns, logs = self._turns, self._logs
            self._calls.clear()
            self._turns, self._logs = [], {}
            workers = []
            for rank, pid in enumerate(pids):
                seen, since_s = self._seen.get(rank, (None, None))
                is_silent, log = rank in silent, self._paths.get(rank, "")
                lost = self._lost[rank].why if rank in self._lost else ""
                own = Sighting(rank=rank, pid=pid, seen=seen, since_s=since_s, is_silent=is_silent, lost=lost, log=log)
                workers.append(own)
        return Sightings(workers=workers, calls=calls, turns=turns, logs=logs)
