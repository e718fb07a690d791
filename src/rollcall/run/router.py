"""Decides which engine gets which requests. Pure: requests and a clock in, decisions out.

A completion keeps its seed, so the choice of a worker changes the time and nothing else. The requests of a group go to one worker
together (a ``Batch``), because the prompt is computed once for them. A worker gets what it can decode at once (``room``, in
completions) and some more, so that it never runs empty. The rest waits here, in ``Request.order``.

- With node weights, each node gets its share of the batches at any speed; the workers of a node divide it by speed.
- Without, all workers divide everything by speed. A batch goes to the worker that is expected to finish it first. A slow
  worker gets no batch that the others would finish sooner. Near the end, batches that a busy worker has not begun go
  to an idle one.

A request of a session goes to the worker that had the session's last one, if that worker can begin it at once: it may still have
the KV. Elsewhere it takes longer and gives the same.

Speed is measured: completions per second while a worker has any, and seconds from sending a batch until all of it is back. Old
measurements fade, so a node that slows down or recovers is noticed. A worker that was too slow for any work is tried again
with one batch: first after two weight versions, then after longer and longer pauses.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollcall.engine.protocol import Request

KEPT = 0.98  # of what was measured before, with each finished batch
TOLERANCE = 1.25  # completions differ in length, so workers of one speed look a little different
RETRY_VERSIONS = 20  # a worker without work is tried again after at most this many
AHEAD = 8  # a worker gets this part of its room beyond it, or one batch if that is more


@dataclass(slots=True, eq=False)
class Batch:
    """The requests of a group, or a single one. ``requests`` are those that have not ended."""

    order: tuple[tuple[int, int, int], int]  # that of its first request, then its arrival
    session: str | None
    pool: _Pool
    requests: dict[str, Request] = field(default_factory=dict)
    size: int = 0  # completions when it was given out
    seat: RolloutWorker | None = None  # absent while it waits here
    when_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutWorker:
    """A rollout process: the work that it has, and how fast it was."""

    worker: int  # its number in the team
    node_rank: int
    name: str  # recorded with the groups that it makes
    given: dict[Batch, None] = field(default_factory=dict)
    load: int = 0  # completions it has
    num_waiting: int = 0  # completions that it has not begun, when it last answered
    done: float = 0.0  # completions, older ones counting less
    busy_s: float = 0.0  # the time they took, older ones counting less
    since_s: float = 0.0  # up to when busy_s is counted, while there is work
    latency_s: float | None = None
    version: int = 0  # of the weights when it last got a batch
    on_trial: bool = False  # only its next batch says how fast it is
    patience: int = 1  # versions without work until it is tried again

    def measured(self, now: float) -> tuple[float, float]:
        """Completions, and the seconds they took. Time beyond that of a usual batch counts too, because such a worker is slow or stuck."""
        overdue_s = now - self.since_s - (self.latency_s or 0.0) if self.load else 0.0
        return self.done, self.busy_s + max(overdue_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speed:
    rate: float  # completions per second, over all that a worker decodes at once
    latency_s: float  # of one batch
    share: float  # of the work, relative to the others


@dataclass(slots=True, kw_only=True)
class _Speeds:
    """Of all workers of a pool, and together."""

    of: dict[int, _Speed]
    rate: float
    latency_s: float  # of a worker in the middle
    load: int


class Router:
    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        *,
        room: int,
        node_weights: Sequence[float] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools: dict[int, _Pool] = {}
        self._weights: Mapping[int, float] = {0: 1.0}
        self._num_given: dict[int, int] = {}  # batches by pool
        self._batches: dict[str, Batch] = {}  # by request
        self._open: dict[str, Batch] = {}  # by group, of those that wait here
        self._arrivals = itertools.count()
        self._sessions: dict[str, list[int]] = {}  # session -> the workers that had requests of it, the latest last
        self._by_node = node_weights is not None
        if node_weights is None:
            self._pools[0] = _Pool(workers, room=room, clock=clock, sessions=self._sessions)
            return
        nodes = sorted({one.node_rank for one in workers})
        self._weights = {rank: node_weights[rank] for rank in nodes if node_weights[rank] > 0}
        assert self._weights, "a plan whose node_weights leave no rollout process is refused"
        for rank in self._weights:
            here = [one for one in workers if one.node_rank == rank]
            self._pools[rank] = _Pool(here, room=room, clock=clock, sessions=self._sessions)

    @property
    def num_unfinished(self) -> int:
        return len(self._batches)

    @property
    def num_workers(self) -> int:
        """Workers that can get requests."""
        return sum(len(pool.seats) for pool in self._pools.values())

    def load(self, worker: int) -> int:
        """Completions that this worker has to make."""
        return sum(pool.seats[worker].load for pool in self._pools.values() if worker in pool.seats)

    def add(self, request: Request) -> None:
        """Queue a request: with its group, else for the node of its session, else for the node that is furthest behind its share."""
        batch = self._open.get(request.group) if request.group is not None else None
        if batch is None:
            homes = [rank for rank in self._weights if self._pools[rank].home(request.session) is not None]
            pool, arrival = self._pools[self._next_pool(homes)], next(self._arrivals)
            batch = Batch(order=(request.order, arrival), session=request.session, pool=pool)
            pool.wait(batch)
            if request.group is not None:
                self._open[request.group] = batch
        batch.requests[request.id] = request
        self._batches[request.id] = batch

    def _next_pool(self, among: Sequence[int] = ()) -> int:
        """Choose one of these pools, else one with workers, if there is one."""
        able = among or [rank for rank in self._weights if self._pools[rank].seats] or list(self._weights)
        rank = min(able, key=lambda rank: ((self._num_given.get(rank, 0) + 1) / self._weights[rank], rank))
        self._num_given[rank] = self._num_given.get(rank, 0) + 1
        return rank

    def end_session(self, session: str) -> list[int]:
        """Forget a session; returns the workers that had requests of it."""
        return self._sessions.pop(session, [])

    def hand_out(self, *, version: int = 0) -> list[tuple[int, list[Request]]]:
        """The requests that go out now, with their worker, batch by batch; ``version`` is that of the weights."""
        out: list[tuple[int, list[Request]]] = []
        for seat, batch in [given for pool in self._pools.values() for given in pool.hand_out(version)]:
            requests = list(batch.requests.values())
            self._close(requests[0])
            out.append((seat.worker, requests))
        return out

    def worker_of(self, request_id: str) -> int | None:
        """The worker that has it, unless it waits here or nobody has asked for it."""
        batch = self._batches.get(request_id)
        return None if batch is None or batch.seat is None else batch.seat.worker

    def finish(self, request_id: str) -> str:
        """Note that a completion has arrived; returns the name of the worker that made it."""
        batch = self._batches[request_id]
        seat = batch.seat
        assert seat is not None, "no worker had this request"
        self.drop(request_id)
        if not batch.requests:
            batch.pool.measure(seat, batch)
        return seat.name

    def drop(self, request_id: str) -> None:
        """Forget a request that nobody waits for any more."""
        batch = self._batches.pop(request_id)
        request = batch.requests.pop(request_id)
        if batch.seat is not None:
            batch.seat.load -= 1
        if not batch.requests:
            if batch.seat is None:
                self._close(request)
            else:
                del batch.seat.given[batch]

    def _close(self, request: Request) -> None:
        """Its group gets no more requests in this batch."""
        if request.group is not None:
            self._open.pop(request.group, None)

    def note_waiting(self, worker: int, num_waiting: int) -> None:
        """Note how many of its completions a worker has not begun."""
        for pool in self._pools.values():
            if worker in pool.seats:
                pool.seats[worker].num_waiting = num_waiting

    def take_back(self) -> list[tuple[int, list[str]]]:
        """Take back requests that busy workers have not begun while others are idle. They wait here again; the caller cancels them there."""
        return [
            (seat.worker, list(batch.requests)) for pool in self._pools.values() for seat, batch in pool.take_back()
        ]

    def lose(self, worker: int) -> None:
        """Forget a worker that is gone. The rest of its batches waits here again in the old order, so it is the first to go out."""
        for had in self._sessions.values():
            if worker in had:
                had.remove(worker)
        for pool in self._pools.values():
            if worker in pool.seats:
                for batch in pool.seats.pop(worker).given:
                    pool.wait(batch)
        self._spread()

    def join(self, new: RolloutWorker) -> None:
        """Add a new process, which knows nothing of what was given out before."""
        rank = new.node_rank if self._by_node else 0
        if rank in self._pools:  # else its node has weight 0
            self._pools[rank].seats[new.worker] = new
            self._spread()

    def _spread(self) -> None:
        """Move the batches that wait in a pool without workers to the others."""
        for pool in self._pools.values():
            waiting, pool.queue = (sorted(pool.queue), []) if not pool.seats and self.num_workers else ([], pool.queue)
            for _, batch in waiting:
                batch.pool = self._pools[self._next_pool()]
                batch.pool.wait(batch)


class _Pool:
    """Workers that share one queue."""

    def __init__(
        self,
        workers: Iterable[RolloutWorker],
        *,
        room: int,
        clock: Callable[[], float],
        sessions: dict[str, list[int]],
    ) -> None:
        """``sessions`` is the router's, and kept up here."""
        self.seats = {one.worker: one for one in workers}
        self.queue: list[tuple[tuple[tuple[int, int, int], int], Batch]] = []  # a heap
        self._room = room
        self._size = 1  # completions of a batch, by the last one
        self._clock = clock
        self._sessions = sessions

    def wait(self, batch: Batch) -> None:
        batch.seat = None
        heapq.heappush(self.queue, (batch.order, batch))

    def first(self) -> Batch | None:
        """The next batch to go out; drops those of which nothing is left."""
        while self.queue and not self.queue[0][1].requests:
            heapq.heappop(self.queue)
        return self.queue[0][1] if self.queue else None

    def home(self, session: str | None) -> RolloutWorker | None:
        """The worker that had the last request of this session, if it is one of these."""
        had = self._sessions.get(session, []) if session is not None else []
        return self.seats.get(had[-1]) if had else None

    def hand_out(self, version: int) -> list[tuple[RolloutWorker, Batch]]:
        out: list[tuple[RolloutWorker, Batch]] = []
        if self.first() is None or not any(self.may_get(seat, self._size) for seat in self.seats.values()):
            return out
        now = self._clock()
        waiting = sum(len(batch.requests) for _, batch in self.queue)
        choice = _Choice(self, waiting=waiting, version=version, speeds=self._speeds(now))
        while (batch := self.first()) is not None:
            size = len(batch.requests)
            seat = self.home(batch.session)
            if seat is None or not self.has_place(seat, size):
                seat = choice.best(size)
            if seat is None:
                break
            heapq.heappop(self.queue)
            self._give(seat, batch, version=version, now=now)
            choice.note_given(size)
            out.append((seat, batch))
        return out

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
        """Measure a worker by a batch of which everything is back."""
        now = self._clock()
        seat.done = KEPT * seat.done + batch.size
        seat.busy_s = KEPT * seat.busy_s + now - seat.since_s
        seat.since_s = now
        took_s = now - batch.when_s
        if seat.on_trial:
            self._judge(seat, batch.size, took_s=took_s)
        seat.latency_s = took_s if seat.latency_s is None else 0.9 * seat.latency_s + 0.1 * took_s

    def _judge(self, seat: RolloutWorker, size: int, *, took_s: float) -> None:
        """Measure a worker that had no work for long by this batch, forgetting older measurements."""
        speeds = self._speeds(self._clock()).of
        others = [speed for worker, speed in speeds.items() if worker != seat.worker]
        latency_s = statistics.median(speed.latency_s for speed in others)
        share = min(latency_s / took_s, 1.0) if took_s and latency_s else 1.0
        seat.done = size
        seat.busy_s = size / (share * statistics.median(speed.rate for speed in others))
        seat.latency_s = None
        seat.on_trial = False
        seat.patience = 1 if TOLERANCE * share >= 1 else min(2 * seat.patience, RETRY_VERSIONS)

    def take_back(self) -> list[tuple[RolloutWorker, Batch]]:
        if self.first() is not None or not any(seat.num_waiting for seat in self.seats.values()):
            return []
        speeds = self._speeds(self._clock())
        places = sum(
            self._room - seat.load
            for seat in self.seats.values()
            if self.has_place(seat, self._size) and self.in_time(seat, self._size, waiting=0, speeds=speeds)
        )
        taken: list[tuple[RolloutWorker, Batch]] = []
        for seat in sorted(self.seats.values(), key=lambda seat: -seat.load):
            # A worker begins its requests in their order.
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

    def may_get(self, seat: RolloutWorker, size: int) -> bool:
        return not seat.load or seat.load < self._room + max(size, self._room // AHEAD)

    def has_place(self, seat: RolloutWorker, size: int) -> bool:
        """Whether the worker would begin a batch at once."""
        return seat.load + size <= self._room

    def in_time(self, seat: RolloutWorker, size: int, *, waiting: int, speeds: _Speeds) -> bool:
        """Whether this worker would finish a batch about when the others finish everything."""
        load = speeds.load
        if len(self.seats) == 1 or not load:
            return True  # one worker has to start
        own = speeds.of[seat.worker]
        turns = 1 if self.has_place(seat, size) else 2  # it starts when another batch has ended
        others_s = (waiting + load - seat.load) / (speeds.rate - own.rate)
        return turns * own.latency_s <= TOLERANCE * max(speeds.latency_s, others_s)

    def _speeds(self, now: float) -> _Speeds:
        """The speeds of all workers. One that is not measured yet counts as fast as the others, an assumption that weighs as much as one
        batch."""
        size = self._size
        measured = {worker: seat.measured(now) for worker, seat in self.seats.items()}
        known = [done / max(spent, 1e-6) for done, spent in measured.values() if done]
        usual = sum(known) / len(known) if known else 1.0
        latencies = [seat.latency_s for seat in self.seats.values() if seat.latency_s is not None]
        latency = statistics.median(latencies) if latencies else 0.0
        speeds: dict[int, _Speed] = {}
        for worker, (done, spent) in measured.items():
            rate = (done + size) / (spent + size / usual)
            own = self.seats[worker].latency_s
            # With more work some engines have a higher rate at the same latency, others a higher latency at the same rate.
            # A speed made of both evens out the loads of either kind; only one of them would overload one kind.
            share = (rate / usual) ** 0.75 * (latency / own if own else 1.0) ** 0.25
            speeds[worker] = _Speed(rate=rate, latency_s=latency if own is None else own, share=share)
        return _Speeds(
            of=speeds,
            rate=sum(speed.rate for speed in speeds.values()),
            latency_s=latency,
            load=sum(seat.load for seat in self.seats.values()),
        )


class _Choice:
    """Chooses the best worker for one batch after the other. Giving a worker a batch changes only that worker's turn, because the sum of
    what waits and what is given out stays the same."""

    def __init__(self, pool: _Pool, *, waiting: int, version: int, speeds: _Speeds) -> None:
        self._pool, self._waiting, self._speeds = pool, waiting, speeds
        self._size = 0  # that the turns are of
        self._turns: list[tuple[tuple[bool, float, int], RolloutWorker]] = []  # a heap
        self._forgotten = [
            seat
            for seat in pool.seats.values()
            if not seat.load and seat.latency_s is not None and version - seat.version > seat.patience
        ]

    def best(self, size: int) -> RolloutWorker | None:
        """The worker that has room for a batch of this size and is expected to finish it first; None if the batch should wait."""
        while self._forgotten and len(self._pool.seats) > 1:
            seat = self._forgotten.pop(0)
            if not seat.load:
                seat.on_trial = True
                return seat
        if size != self._size:
            self._size = size
            self._turns = [(turn, seat) for seat in self._pool.seats.values() if (turn := self._turn(seat)) is not None]
            heapq.heapify(self._turns)
        while self._turns:
            noted, seat = self._turns[0]
            turn = self._turn(seat)
            if turn == noted:
                return seat
            if turn is None:
                heapq.heappop(self._turns)
            else:
                heapq.heapreplace(self._turns, (turn, seat))
        return None

    def note_given(self, size: int) -> None:
        self._waiting -= size
        self._speeds.load += size

    def _turn(self, seat: RolloutWorker) -> tuple[bool, float, int] | None:
        """A worker's place in the order, the lowest first; None if it gets nothing."""
        pool, size = self._pool, self._size
        if not pool.may_get(seat, size) or not pool.in_time(seat, size, waiting=self._waiting, speeds=self._speeds):
            return None
        share = self._speeds.of[seat.worker].share
        return not pool.has_place(seat, size), (seat.load + size) / share, seat.worker
