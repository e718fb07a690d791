"""Decides which engine gets which request. Does no I/O: it takes requests and a clock, and returns decisions.

A completion keeps its seed, so the choice of a worker only affects timing. A group's requests go to one worker together (a ``Batch``),
so that the prompt is computed only once. A worker gets as many completions as it can decode at once (``room``) and a few
more, so that it never runs out of work. The other requests wait in the router, ordered by ``Request.order``.

- With node weights, each node gets its share of the batches regardless of speed; a node's workers split the share by their speed.
- Without node weights, all workers split all batches by their speed. A batch goes to the worker that should finish it first. A slow
  worker gets no batch that the others would finish sooner. Near the end, batches that a busy worker has not started go
  to idle workers.

A session's request goes to the worker that handled the session's previous request, if that worker can start it at once, because it may
still have the session's KV. Any other worker would take longer, but the result would be the same.

Speed is measured in completions per second while a worker is busy, and in seconds from sending a batch until all of it is back. Older
measurements count less, so the router notices a node that slows down or recovers. If a worker got no work for ``RETRY_VERSIONS`` weight
versions, the router drops its measurements and assumes that it is as fast as the others.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollcall.engine.protocol import Request

KEPT = 0.98  # weight of earlier measurements after each finished batch
TOLERANCE = 1.25  # completions differ in length, so equally fast workers look slightly different
RETRY_VERSIONS = 20
_Turn = tuple[bool, float, int]  # whether the batch would have to wait, load relative to speed, worker
AHEAD = 8  # a worker may get 1/AHEAD more than its room, or one batch more if that is larger


@dataclass(slots=True, eq=False)
class Batch:
    """The requests of a group, or a single request. ``requests`` contains those that have not finished."""

    order: tuple[tuple[int, int, int], int]  # sort key: the order of its first request, then the order of arrival
    session: str | None
    pool: _Pool
    requests: dict[str, Request] = field(default_factory=dict)
    size: int = 0  # number of completions when it was handed out
    seat: RolloutWorker | None = None  # None while it waits in the queue
    when_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutWorker:
    """A rollout process: its current work and its measured speed."""

    worker: int  # its index in the team
    node_rank: int
    name: str  # recorded with the groups that it generates
    given: dict[Batch, None] = field(default_factory=dict)
    load: int = 0  # assigned completions
    num_waiting: int = 0  # completions that were not started when it last answered
    version: int = 0  # weight version when it last got a batch
    # Measured:
    done: float = 0.0  # completions; older ones count less
    busy_s: float = 0.0  # the time that they took; older times count less
    since_s: float = 0.0  # while there is work: the time up to which busy_s is counted
    latency_s: float | None = None  # per batch
    # Computed from these by ``_Pool._compare``:
    rate: float = 0.0  # completions per second, over all completions that it decodes at once
    expected_s: float = 0.0  # per batch
    share: float = 1.0  # share of the work, relative to the others

    def measured(self, now: float) -> tuple[float, float]:
        """Return the number of finished completions and the seconds that they took. If the current batch is late, its delay is
        included."""
        overdue_s = now - self.since_s - (self.latency_s or 0.0) if self.load else 0.0
        return self.done, self.busy_s + max(overdue_s, 0.0)


class Router:
    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        *,
        room: int,
        node_weights: Sequence[float] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weights: Mapping[int, float] = {0: 1.0}
        self._num_given: dict[int, int] = {}  # number of batches by pool
        self._batches: dict[str, Batch] = {}  # by request
        self._open: dict[str | None, Batch] = {}  # by group, never None; batches that are still queued
        self._arrivals = itertools.count()
        # session -> the workers that its requests were sent to, the most recent one last
        self._sessions: dict[str, list[int]] = {}
        self._seats: dict[int, RolloutWorker] = {}  # workers that can get requests
        self._by_node = node_weights is not None
        if node_weights is not None:
            nodes = sorted({one.node_rank for one in workers})
            self._weights = {rank: node_weights[rank] for rank in nodes if node_weights[rank] > 0}
        assert self._weights, "a plan whose node_weights leave no rollout process is refused"
        self._pools = {rank: _Pool(room=room, clock=clock, sessions=self._sessions) for rank in self._weights}
        for one in workers:
            self.join(one)

    @property
    def num_workers(self) -> int:
        """The number of workers that can get requests."""
        return len(self._seats)

    def load(self, worker: int) -> int:
        """Return the number of unfinished completions that the worker was given."""
        return self._seats[worker].load if worker in self._seats else 0

    def add(self, request: Request) -> None:
        """Queue a request with its group, otherwise on its session's node, otherwise on the node that is furthest behind its share."""
        if (batch := self._open.get(request.group)) is None:
            homes = [rank for rank in self._weights if self._pools[rank].home(request.session) is not None]
            pool, arrival = self._pools[self._next_pool(homes)], next(self._arrivals)
            batch = Batch(order=(request.order, arrival), session=request.session, pool=pool)
            pool.wait(batch)
            if request.group is not None:
                self._open[request.group] = batch
        batch.requests[request.id] = request
        self._batches[request.id] = batch

    def _next_pool(self, among: Sequence[int] = ()) -> int:
        """Choose one of the pools in ``among``. If it is empty, choose any pool with workers."""
        able = among or [rank for rank in self._weights if self._pools[rank].seats] or list(self._weights)
        rank = min(able, key=lambda rank: ((self._num_given.get(rank, 0) + 1) / self._weights[rank], rank))
        self._num_given[rank] = self._num_given.get(rank, 0) + 1
        return rank

    def end_session(self, session: str) -> list[int]:
        """Forget a session. Returns the workers that its requests were sent to."""
        return self._sessions.pop(session, [])

    def hand_out(self, *, version: int = 0) -> list[tuple[int, list[Request]]]:
        """Return the requests to send now, batch by batch, each with its worker. ``version`` is the weight version."""
        out: list[tuple[int, list[Request]]] = []
        for seat, batch in [given for pool in self._pools.values() for given in pool.hand_out(version)]:
            requests = list(batch.requests.values())
            self._open.pop(requests[0].group, None)  # later requests of the group get another batch
            out.append((seat.worker, requests))
        return out

    def worker_of(self, request_id: str) -> int | None:
        """Return the worker that has the request. None if the request is queued or unknown."""
        batch = self._batches.get(request_id)
        return None if batch is None or batch.seat is None else batch.seat.worker

    def finish(self, request_id: str) -> str:
        """Record that a completion has arrived. Returns the name of the worker that generated it."""
        batch = self._batches[request_id]
        seat = batch.seat
        assert seat is not None, "no worker had this request"
        self.drop(request_id)
        if not batch.requests:
            batch.pool.measure(seat, batch)
        return seat.name

    def drop(self, request_id: str) -> None:
        """Forget a request that no caller is waiting for any longer."""
        batch = self._batches.pop(request_id)
        request = batch.requests.pop(request_id)
        if batch.seat is not None:
            batch.seat.load -= 1
        if not batch.requests:
            if batch.seat is None:
                self._open.pop(request.group, None)
            else:
                del batch.seat.given[batch]

    def note_waiting(self, worker: int, num_waiting: int) -> None:
        """Record how many of its completions a worker has not started."""
        if worker in self._seats:
            self._seats[worker].num_waiting = num_waiting

    def take_back(self) -> list[tuple[int, list[str]]]:
        """If there are idle workers, queue the requests again that busy workers have not started. The caller must cancel them at the busy
        workers."""
        return [
            (seat.worker, list(batch.requests)) for pool in self._pools.values() for seat, batch in pool.take_back()
        ]

    def lose(self, worker: int) -> None:
        """Forget a lost worker. Its unfinished requests are queued again in their old order, so they are sent first."""
        for had in self._sessions.values():
            if worker in had:
                had.remove(worker)
        self._seats.pop(worker, None)
        for pool in self._pools.values():
            if worker in pool.seats:
                for batch in pool.seats.pop(worker).given:
                    pool.wait(batch)
        self._spread()

    def join(self, new: RolloutWorker) -> None:
        """Add a new process, which has no earlier requests or sessions."""
        rank = new.node_rank if self._by_node else 0
        if rank in self._pools:  # otherwise its node has weight 0
            self._seats[new.worker] = self._pools[rank].seats[new.worker] = new
            self._spread()

    def _spread(self) -> None:
        """Move batches from pools without workers to other pools."""
        for pool in self._pools.values():
            waiting, pool.queue = (sorted(pool.queue), []) if not pool.seats and self.num_workers else ([], pool.queue)
            for _, batch in waiting:
                batch.pool = self._pools[self._next_pool()]
                batch.pool.wait(batch)


class _Pool:
    """A set of workers that share one queue."""

    def __init__(self, *, room: int, clock: Callable[[], float], sessions: dict[str, list[int]]) -> None:
        """``sessions`` belongs to the router and is updated here."""
        self.seats: dict[int, RolloutWorker] = {}
        self.queue: list[tuple[tuple[tuple[int, int, int], int], Batch]] = []  # a heap
        self._room = room
        self._size = 1  # completions per batch, as in the last batch
        self._clock = clock
        self._sessions = sessions
        # For all workers together, computed by ``_compare``:
        self._rate = 0.0
        self._latency_s = 0.0  # the median worker's ``latency_s``
        self._load = 0

    def wait(self, batch: Batch) -> None:
        batch.seat = None
        heapq.heappush(self.queue, (batch.order, batch))

    def first(self) -> Batch | None:
        """Return the next batch to send. Drops batches without requests."""
        while self.queue and not self.queue[0][1].requests:
            heapq.heappop(self.queue)
        return self.queue[0][1] if self.queue else None

    def home(self, session: str | None) -> RolloutWorker | None:
        """Return the worker that this session's last request was sent to, if it is in this pool."""
        had = self._sessions.get(session, []) if session is not None else []
        return self.seats.get(had[-1]) if had else None

    def hand_out(self, version: int) -> list[tuple[RolloutWorker, Batch]]:
        """Assign waiting batches to workers. An assignment changes only the sort key of that worker, because the sum of waiting and
        assigned requests stays the same."""
        out: list[tuple[RolloutWorker, Batch]] = []
        if self.first() is None or not any(self._may_get(seat, self._size) for seat in self.seats.values()):
            return out
        now = self._clock()
        for seat in self.seats.values():
            if not seat.load and version - seat.version > RETRY_VERSIONS:
                seat.done, seat.busy_s, seat.latency_s = 0.0, 0.0, None
        self._compare(now)
        waiting = sum(len(batch.requests) for _, batch in self.queue)
        turns, size = list[_Turn](), 0
        while (batch := self.first()) is not None:
            if size != len(batch.requests):
                size = len(batch.requests)
                turns = [turn for seat in self.seats.values() if (turn := self._turn(seat, size, waiting)) is not None]
                heapq.heapify(turns)
            seat = self.home(batch.session)
            if seat is None or not self._has_place(seat, size):
                seat = self._best(turns, size, waiting)
            if seat is None:
                break
            heapq.heappop(self.queue)
            self._give(seat, batch, version=version, now=now)
            waiting, self._load = waiting - size, self._load + size
            out.append((seat, batch))
        return out

    def _best(self, turns: list[_Turn], size: int, waiting: int) -> RolloutWorker | None:
        """Return the worker that should finish a batch of this size first, or None if the batch should wait."""
        while turns:
            seat = self.seats[turns[0][2]]
            turn = self._turn(seat, size, waiting)
            if turn == turns[0]:
                return seat
            if turn is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, turn)
        return None

    def _turn(self, seat: RolloutWorker, size: int, waiting: int) -> _Turn | None:
        """Return the worker's sort key (lowest first), or None if it must not get the batch."""
        if not self._may_get(seat, size) or not self._in_time(seat, size, waiting=waiting):
            return None
        return not self._has_place(seat, size), (seat.load + size) / seat.share, seat.worker

    def _give(self, seat: RolloutWorker, batch: Batch, *, version: int, now: float) -> None:
        batch.seat, batch.when_s, batch.size = seat, now, len(batch.requests)
        seat.given[batch] = None
        if not seat.load:
            seat.since_s = now
        seat.load += batch.size
        self._size = batch.size
        seat.version = version
        if batch.session is not None:
            had = self._sessions.setdefault(batch.session, [])
            had[:] = [worker for worker in had if worker != seat.worker] + [seat.worker]

    def measure(self, seat: RolloutWorker, batch: Batch) -> None:
        """Add a finished batch to the worker's measurements."""
        now = self._clock()
        seat.done = KEPT * seat.done + batch.size
        seat.busy_s = KEPT * seat.busy_s + now - seat.since_s
        seat.since_s = now
        took_s = now - batch.when_s
        seat.latency_s = took_s if seat.latency_s is None else 0.9 * seat.latency_s + 0.1 * took_s

    def take_back(self) -> list[tuple[RolloutWorker, Batch]]:
        if self.first() is not None or not any(seat.num_waiting for seat in self.seats.values()):
            return []
        self._compare(self._clock())
        places = sum(
            self._room - seat.load
            for seat in self.seats.values()
            if self._has_place(seat, self._size) and self._in_time(seat, self._size, waiting=0)
        )
        taken: list[tuple[RolloutWorker, Batch]] = []
        for seat in sorted(self.seats.values(), key=lambda seat: -seat.load):
            # A worker starts its requests in this order.
            for batch in sorted(seat.given, key=lambda batch: batch.order, reverse=True) if seat.num_waiting else ():
                size = len(batch.requests)
                if size > min(seat.num_waiting, places):
                    break
                places -= size
                seat.num_waiting -= size
                seat.load -= size
                del seat.given[batch]
                self.wait(batch)
                taken.append((seat, batch))
        return taken

    def _may_get(self, seat: RolloutWorker, size: int) -> bool:
        return not seat.load or seat.load < self._room + max(size, self._room // AHEAD)

    def _has_place(self, seat: RolloutWorker, size: int) -> bool:
        """Whether the worker would start a batch at once."""
        return seat.load + size <= self._room

    def _in_time(self, seat: RolloutWorker, size: int, *, waiting: int) -> bool:
        """Whether this worker would finish a batch by about the time that the other workers finish everything."""
        if len(self.seats) == 1 or not self._load:
            return True  # otherwise no worker would ever start
        turns = 1 if self._has_place(seat, size) else 2  # 2: the batch starts after another one has finished
        others_s = (waiting + self._load - seat.load) / (self._rate - seat.rate)
        return turns * seat.expected_s <= TOLERANCE * max(self._latency_s, others_s)

    def _compare(self, now: float) -> None:
        """Compute the speed of every worker. One batch at the usual speed is added to its measurements, so a worker without measurements
        gets the usual speed."""
        measured = [(seat, *seat.measured(now)) for seat in self.seats.values()]
        known = [done / max(spent, 1e-6) for _, done, spent in measured if done]
        usual = sum(known) / len(known) if known else 1.0
        latencies = [seat.latency_s for seat in self.seats.values() if seat.latency_s is not None]
        self._latency_s = statistics.median(latencies) if latencies else 0.0
        for seat, done, spent in measured:
            seat.rate = (done + self._size) / (spent + self._size / usual)
            seat.expected_s = self._latency_s if seat.latency_s is None else seat.latency_s
            # With more work, some engines decode faster at the same latency, and others take longer at the same rate. Combining rate and
            # latency balances the load over both kinds; either of them by itself would overload one kind.
            relative = self._latency_s / seat.latency_s if seat.latency_s else 1.0
            seat.share = (seat.rate / usual) ** 0.75 * relative**0.25
        self._rate = sum(seat.rate for seat in self.seats.values())
        self._load = sum(seat.load for seat in self.seats.values())
