"""Which engine gets which request. Pure: requests and a clock in, decisions out.

A request keeps its seeds, so the choice of a worker changes the time and nothing else. A worker gets the requests that it
can decode at once (``room``, in completions) and one more, to start as soon as there is room. The rest waits here.

- With node weights, each node gets its share of the requests at any speed; the workers of a node divide it by speed.
- Without, all workers divide everything by speed. A request goes to the worker that is expected to finish it first. A slow
  worker gets no request that the others would finish sooner. Near the end, requests that a busy worker has not started go
  to an idle one.

A request of a session goes to the worker that had the session's last one, if that worker can start it at once: it may still have
the KV. Elsewhere it takes longer and gives the same.

Speed is measured: completions per second while a worker has any, and seconds from sending a request to its return. Old
measurements fade, so a node that slows down or recovers is noticed. A worker that was too slow for any work is tried again
with one request: first after two weight versions, then after longer and longer pauses.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollcall.engine.protocol import Request

KEPT = 0.98  # of what was measured before, with each finished request
TOLERANCE = 1.25  # completions differ in length, so workers of one speed look a little different
RETRY_VERSIONS = 20  # a worker without work is tried again after at most this many


@dataclass(slots=True)
class _Given:
    request: Request
    when_s: float

    @property
    def size(self) -> int:
        return len(self.request.seeds)


@dataclass(slots=True, kw_only=True)
class RolloutWorker:
    """One rollout process: what it has, and how fast it was."""

    worker: int  # its number in the team
    node_rank: int
    name: str  # recorded with the groups that it makes
    given: dict[str, _Given] = field(default_factory=dict)
    load: int = 0  # completions it has
    num_waiting: int = 0  # requests that it said it has not begun
    asked_back: int = 0  # how many of those were asked back
    done: float = 0.0  # completions, older ones counting less
    busy_s: float = 0.0  # the time they took, older ones counting less
    since_s: float = 0.0  # up to when busy_s is counted, while there is work
    latency_s: float | None = None
    version: int = 0  # of the weights when it last got a request
    on_trial: bool = False  # its next request alone says how fast it is
    patience: int = 1  # versions without work until it is tried again

    def measured(self, now: float) -> tuple[float, float]:
        """Completions, and the seconds they took. Time beyond that of a usual request counts too: such a worker is slow or
        stuck."""
        overdue_s = now - self.since_s - (self.latency_s or 0.0) if self.load else 0.0
        return self.done, self.busy_s + max(overdue_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speed:
    rate: float  # completions per second, over all that a worker decodes at once
    latency_s: float  # of one request
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
        self._num_given: dict[int, int] = {}  # requests by pool
        self._pool_of: dict[str, _Pool] = {}
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
        return len(self._pool_of)

    def load(self, worker: int) -> int:
        """Completions that this worker has to make."""
        return sum(pool.seats[worker].load for pool in self._pools.values() if worker in pool.seats)

    @property
    def num_workers(self) -> int:
        """Workers that can get requests."""
        return sum(len(pool.seats) for pool in self._pools.values())

    def add(self, request: Request) -> None:
        """Queue a request for the node of its session, else for the node that is furthest behind its share."""
        homes = [rank for rank in self._weights if self._pools[rank].home(request) is not None]
        pool = self._pool_of[request.id] = self._pools[self._next_pool(homes)]
        pool.queue.append(request)

    def _next_pool(self, among: Sequence[int] = ()) -> int:
        """One of these pools, else one with workers, if there is one."""
        able = among or [rank for rank in self._weights if self._pools[rank].seats] or list(self._weights)
        rank = min(able, key=lambda rank: ((self._num_given.get(rank, 0) + 1) / self._weights[rank], rank))
        self._num_given[rank] = self._num_given.get(rank, 0) + 1
        return rank

    def end_session(self, session: str) -> list[int]:
        """The workers that had requests of it."""
        return self._sessions.pop(session, [])

    def lose(self, worker: int, *, missing: Callable[[Request], Request] = lambda request: request) -> list[str]:
        """This worker is gone: its requests go to the front of the queue, in their order; returns their ids. ``missing``
        says what is left to make of one."""
        returned: list[str] = []
        for had in self._sessions.values():
            if worker in had:
                had.remove(worker)
        for pool in self._pools.values():
            if worker in pool.seats:
                returned += pool.lose(worker, missing=missing)
            if not pool.seats and self.num_workers:
                while pool.queue:  # the last one first, so that the order stays
                    request = pool.queue.pop()
                    other = self._pool_of[request.id] = self._pools[self._next_pool()]
                    other.queue.appendleft(request)
        return returned

    def join(self, new: RolloutWorker) -> None:
        """A process that is new: it knows nothing of what was given out before."""
        rank = new.node_rank if self._by_node else 0
        if rank not in self._pools:
            return  # its node has weight 0
        self._pools[rank].seats[new.worker] = new
        for pool in self._pools.values():  # requests that wait in a pool without workers
            while pool.queue and not pool.seats:
                request = pool.queue.popleft()
                other = self._pool_of[request.id] = self._pools[self._next_pool()]
                other.queue.append(request)

    def hand_out(self, *, version: int = 0) -> list[tuple[int, Request]]:
        """What goes to which worker now; ``version`` is that of the weights."""
        return [given for pool in self._pools.values() for given in pool.hand_out(version)]

    def hand_out_now(self, request_id: str) -> tuple[int, Request] | None:
        """A request that waits here goes out even if no worker has room; None: it does not wait here."""
        return self._pool_of[request_id].hand_out_now(request_id) if request_id in self._pool_of else None

    def worker_of(self, request_id: str) -> int | None:
        """The worker that has it; None: it still waits here."""
        return self._pool_of[request_id].worker_of(request_id)

    def finish(self, request_id: str) -> str:
        """A request is done; returns the name of the worker that made it."""
        return self._pool_of.pop(request_id).finish(request_id)

    def note_waiting(self, worker: int, *, num_waiting: int, returned: Sequence[str]) -> None:
        """A worker reports how many requests it has not started, and which it gives back."""
        for pool in self._pools.values():
            if worker in pool.seats:
                pool.note_waiting(worker, num_waiting=num_waiting, returned=returned)

    def ask_back(self) -> dict[int, int]:
        """Worker -> number of requests that it should give back if it has not started them: another worker is idle."""
        return {worker: count for pool in self._pools.values() for worker, count in pool.ask_back().items()}


class _Pool:
    """Workers that share one queue."""

    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        *,
        room: int,
        clock: Callable[[], float],
        sessions: dict[str, list[int]],
    ) -> None:
        """``sessions`` is the router's, and kept up here."""
        self.seats = {one.worker: one for one in workers}
        self.queue: deque[Request] = deque()
        self._room = room
        self._size = 1  # completions of a request, by the last one
        self._clock = clock
        self._sessions = sessions

    def home(self, request: Request) -> RolloutWorker | None:
        """The worker that had the last request of the same session, if it is one of these."""
        had = self._sessions.get(request.session, []) if request.session is not None else []
        return self.seats.get(had[-1]) if had else None

    def hand_out(self, version: int) -> list[tuple[int, Request]]:
        out: list[tuple[int, Request]] = []
        if not self.queue or not any(seat.load < self._room + self._size for seat in self.seats.values()):
            return out
        waiting = sum(len(request.seeds) for request in self.queue)
        now = self._clock()
        speeds = self._speeds(now)
        while self.queue:
            size = len(self.queue[0].seeds)
            seat = self.home(self.queue[0])
            if seat is None or not self._has_place(seat, size):
                seat = self._best(size, waiting=waiting, version=version, speeds=speeds)
            if seat is None:
                break
            out.append(self._give(seat, self.queue.popleft(), version=version, now=now))
            waiting -= size
            speeds.load += size
        return out

    def hand_out_now(self, request_id: str) -> tuple[int, Request] | None:
        request = next((request for request in self.queue if request.id == request_id), None)
        if request is None or not self.seats:
            return None
        self.queue.remove(request)
        seat = self.home(request) or min(self.seats.values(), key=lambda seat: seat.load)
        return self._give(seat, request, version=seat.version, now=self._clock())

    def lose(self, worker: int, *, missing: Callable[[Request], Request]) -> list[str]:
        given = self.seats.pop(worker).given.values()
        self.queue.extendleft(missing(one.request) for one in reversed(given))
        return [one.request.id for one in given]

    def worker_of(self, request_id: str) -> int | None:
        return next((worker for worker, seat in self.seats.items() if request_id in seat.given), None)

    def finish(self, request_id: str) -> str:
        worker = self.worker_of(request_id)
        assert worker is not None, "no worker had this request"
        seat, now = self.seats[worker], self._clock()
        given = seat.given.pop(request_id)
        seat.done = KEPT * seat.done + given.size
        seat.busy_s = KEPT * seat.busy_s + now - seat.since_s
        seat.since_s = now
        seat.load -= given.size
        took_s = now - given.when_s
        if seat.on_trial:
            self._judge(seat, given.size, took_s=took_s)
        seat.latency_s = took_s if seat.latency_s is None else 0.9 * seat.latency_s + 0.1 * took_s
        return seat.name

    def _judge(self, seat: RolloutWorker, size: int, *, took_s: float) -> None:
        """Measure a worker that had no work for long by this one request."""
        speeds = self._speeds(self._clock()).of
        others = [speed for worker, speed in speeds.items() if worker != seat.worker]
        latency_s = statistics.median(speed.latency_s for speed in others)
        share = min(latency_s / took_s, 1.0) if took_s and latency_s else 1.0
        seat.done = size
        seat.busy_s = size / (share * statistics.median(speed.rate for speed in others))
        seat.latency_s = None
        seat.on_trial = False
        seat.patience = 1 if TOLERANCE * share >= 1 else min(2 * seat.patience, RETRY_VERSIONS)

    def note_waiting(self, worker: int, *, num_waiting: int, returned: Sequence[str]) -> None:
        seat = self.seats[worker]
        seat.num_waiting = num_waiting
        seat.asked_back = 0
        for request_id in returned:
            given = seat.given.pop(request_id)
            seat.load -= given.size
            self.queue.appendleft(given.request)

    def ask_back(self) -> dict[int, int]:
        if self.queue or not any(seat.num_waiting > seat.asked_back for seat in self.seats.values()):
            return {}
        speeds = self._speeds(self._clock())
        places = sum(
            (self._room - seat.load) // self._size
            for seat in self.seats.values()
            if self._has_place(seat, self._size) and self._in_time(seat, self._size, waiting=0, speeds=speeds)
        )
        asked: dict[int, int] = {}
        for seat in sorted(self.seats.values(), key=lambda seat: -seat.load):
            count = min(seat.num_waiting - seat.asked_back, places)
            if count > 0:
                seat.asked_back += count
                asked[seat.worker] = count
                places -= count
        return asked

    def _give(self, seat: RolloutWorker, request: Request, *, version: int, now: float) -> tuple[int, Request]:
        given = seat.given[request.id] = _Given(request, now)
        if not seat.load:
            seat.since_s = now
        seat.load += given.size
        self._size = given.size
        seat.version = version
        if request.session is not None:
            had = self._sessions.setdefault(request.session, [])
            had[:] = [worker for worker in had if worker != seat.worker] + [seat.worker]
        return seat.worker, request

    def _best(self, size: int, *, waiting: int, version: int, speeds: _Speeds) -> RolloutWorker | None:
        """The worker that is expected to finish a request of this size first and has room for it; None: let it wait."""
        able = [seat for seat in self.seats.values() if not seat.load or seat.load < self._room + size]
        forgotten = [
            seat
            for seat in able
            if not seat.load and seat.latency_s is not None and version - seat.version > seat.patience
        ]
        if forgotten and len(self.seats) > 1:
            forgotten[0].on_trial = True
            return forgotten[0]

        fit = [seat for seat in able if self._in_time(seat, size, waiting=waiting, speeds=speeds)]

        def turn(seat: RolloutWorker) -> tuple[bool, float, int]:
            return (
                not self._has_place(seat, size),
                (seat.load + size) / speeds.of[seat.worker].share,
                seat.worker,
            )

        return min(fit, key=turn, default=None)

    def _has_place(self, seat: RolloutWorker, size: int) -> bool:
        """Whether the worker would start a request at once."""
        return seat.load + size <= self._room

    def _in_time(self, seat: RolloutWorker, size: int, *, waiting: int, speeds: _Speeds) -> bool:
        """Whether this worker would finish a request about when the others finish everything."""
        load = speeds.load
        if len(self.seats) == 1 or not load:
            return True  # one worker has to start
        own = speeds.of[seat.worker]
        turns = 1 if self._has_place(seat, size) else 2  # it starts when another request has ended
        others_s = (waiting + load - seat.load) / (speeds.rate - own.rate)
        return turns * own.latency_s <= TOLERANCE * max(speeds.latency_s, others_s)

    def _speeds(self, now: float) -> _Speeds:
        """A worker that is not measured yet counts as fast as the others; that assumption weighs as much as one request."""
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
            # A speed made of both evens out the loads of either kind; one part alone would overload one kind.
            share = (rate / usual) ** 0.75 * (latency / own if own else 1.0) ** 0.25
            speeds[worker] = _Speed(rate=rate, latency_s=latency if own is None else own, share=share)
        return _Speeds(
            of=speeds,
            rate=sum(speed.rate for speed in speeds.values()),
            latency_s=latency,
            load=sum(seat.load for seat in self.seats.values()),
        )
