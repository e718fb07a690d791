"""Presents the engines of all rollout processes as one ``Engine``.

    generate ──▶ router: which process? ──▶ its link: queued for the next call ──▶ ``exchange`` in that process
             ◀── finished completions return with a call's answer ◀──

Each busy process has two ``exchange`` calls in flight, so that it never waits for the controller. A call sends all new requests and
cancellations, and its answer returns all finished completions. One thread waits for answers. Everything else runs in the event loop's
thread and does not block.

The run survives the loss of a process that contains only an engine. Its unfinished requests are sent to other processes before any new
ones, and ``replace`` starts a new process in another thread. The new process gets requests once the next ``serve`` or ``admit`` has sent
it the current weights.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollcall.base.errors import WorkerDiedError, WorkerError, WorkerLostError
from rollcall.base.wait import say, warn
from rollcall.engine.protocol import Made, Refused, Request, Stats
from rollcall.engine.ticker import Exchanged
from rollcall.loop.tasks import in_thread
from rollcall.plan.placement import Role
from rollcall.run.router import RolloutWorker, Router
from rollcall.run.team import Team
from rollcall.run.weight_sync import WeightSync

CALLS = 2
WAIT_S = 180.0


@dataclass(slots=True, eq=False)
class _Link:
    """A link to one process: what the next call sends, and the calls in flight."""

    new: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    ended_sessions: list[str] = field(default_factory=list)
    # call number -> call, in the order in which the process handles them
    calls: dict[int, Any] = field(default_factory=dict)
    last_cancelling: int = -1  # the last call that sent cancellations
    recalled: set[str] = field(default_factory=set)  # the requests that those calls cancelled
    num_preemptions: int = 0  # as last reported by the process

    def give(self, requests: Sequence[Request]) -> None:
        """Queue requests. If a request was cancelled after the last call, the process still has it, so only undo the cancellation."""
        there = set(self.cancelled)
        self.new += [request for request in requests if request.id not in there]
        given = {request.id for request in requests}
        self.cancelled = [each for each in self.cancelled if each not in given]

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel requests. Those that are still queued here are only dropped, because the process would handle the cancellation before
        the request."""
        waiting = {request.id for request in self.new}
        self.new = [request for request in self.new if request.id not in ids]
        self.cancelled += [each for each in ids if each not in waiting]


class Engines:
    """``room`` is the number of completions that one process decodes at the same time.

    The run can lose the ``replaceable`` processes and continue. ``replace`` starts a new process that is ready for weights, and raises if
    it cannot. If no engine is left, the run waits up to ``wait_s`` for one.
    """

    def __init__(
        self,
        team: Team,
        *,
        room: int,
        node_weights: Sequence[float] | None,
        replaceable: Collection[int] = (),
        replace: Callable[[int], object] | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self.version = 0
        self._team = team
        self._weights = WeightSync(team)
        self._workers = team.members[Role.ROLLOUT]
        # An engine answers after this time even if nothing has finished, so that it can receive new requests and weights. With more
        # engines the time is longer, so that their answers do not overload this process.
        self._look_s = min(max(len(self._workers) / 160, 0.05), 1.0)
        self._router = Router(list(map(self._new_worker, self._workers)), room=room, node_weights=node_weights)
        self._links = {worker: _Link() for worker in self._workers}
        self._numbers = itertools.count()  # for calls
        self._asked: dict[str, asyncio.Future[Made]] = {}  # by request
        self._replaceable = frozenset(replaceable) if replace is not None else frozenset()
        self._replace = replace
        self._wait_s = wait_s
        self._away: set[int] = set()  # lost, and not serving again yet
        self._new_ones: set[int] = set()  # the part of ``_away`` that is rebuilt but has no weights yet
        self._failure: Exception | None = None
        self._idle = asyncio.Event()  # no requests are pending
        self._idle.set()
        self._open = asyncio.Event()  # requests are accepted
        self._open.set()
        self._is_still = False  # paused: no calls
        self._is_due = False  # a call of ``_look`` is scheduled
        self._collecting: asyncio.Task[None] | None = None
        self._renewing: set[asyncio.Task[None]] = set()
        self._alone: asyncio.TimerHandle | None = None
        self._busy_s, self._busy_since = 0.0, 0.0
        self._num_tokens, self._num_preemptions = 0, 0

    def _new_worker(self, worker: int) -> RolloutWorker:
        node_rank = self._team.group.worker_metadata[worker]["node_rank"]
        return RolloutWorker(worker=worker, node_rank=node_rank, name=self._name(worker))

    def _name(self, worker: int) -> str:
        return f"rollout-{self._workers.index(worker)} on node {self._team.group.worker_metadata[worker]['node_rank']}"

    def generate(self, request: Request) -> Awaitable[Made]:
        if not self._open.is_set():
            return self._generate_later(request)
        if self._failure is not None:
            raise self._failure
        if request.id in self._asked:
            raise Refused(f"request {request.id!r} is already running; give each request its own id")
        if not self._asked:
            self._idle.clear()
            self._busy_since = time.perf_counter()
        done = self._asked[request.id] = asyncio.get_running_loop().create_future()
        done.add_done_callback(partial(self._drop_cancelled, request.id))
        self._router.add(request)
        self._look_soon()
        return done

    async def _generate_later(self, request: Request) -> Made:
        while not self._open.is_set():
            await self._open.wait()
        return await self.generate(request)

    def _drop_cancelled(self, request_id: str, done: asyncio.Future[Made]) -> None:
        if self._asked.get(request_id) is done:
            worker = self._router.worker_of(request_id)
            self._forget(request_id)
            self._router.drop(request_id)
            if worker is not None:
                self._links[worker].cancel([request_id])

    async def pause(self, *, drain: bool) -> None:
        self._open.clear()
        while drain and not self._idle.is_set():
            await self._idle.wait()
        self._is_still = True
        if self._collecting is not None:
            await asyncio.wait({self._collecting})  # wait for the calls in flight; no new ones start
        if self._failure is not None:
            raise self._failure

    async def serve(self, version: int) -> None:
        """Send the actor's weights to every process with a policy; the actor's own processes already have them."""
        await self._push(version)
        self.version, self._is_still = version, False
        self._open.set()
        self._look_soon()

    async def admit(self) -> None:
        """Send the current weights to new processes, unless an update has already done so."""
        if self._new_ones:
            await self._push(self.version)
            self._look_soon()

    def begin_session(self, session: str) -> None:
        """Do nothing, because these engines never wait for a session's next request to batch it with others."""

    def end_session(self, session: str) -> None:
        """End a session with the next call. Until then the process keeps the session's memory, because nothing else needs it earlier."""
        for worker in self._router.end_session(session):
            self._links[worker].ended_sessions.append(session)

    def take_stats(self) -> Stats:
        now = time.perf_counter()
        busy_s = self._busy_s + (now - self._busy_since if self._asked else 0.0)
        stats = Stats(busy_s=busy_s, num_tokens=self._num_tokens, num_preemptions=self._num_preemptions)
        self._busy_s, self._busy_since, self._num_tokens, self._num_preemptions = 0.0, now, 0, 0
        return stats

    async def close(self) -> None:
        for task in (self._collecting, *self._renewing):
            if task is not None:
                task.cancel()
        if self._alone is not None:
            self._alone.cancel()

    # Calls

    def _look_soon(self) -> None:
        """Schedule ``_look`` after the requests that are being made now, so that a whole group is sent together."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Send out the waiting requests, without blocking."""
        self._is_due = False
        if self._is_still or self._failure is not None:
            return
        try:
            for worker, requests in self._router.take_back():
                self._links[worker].cancel(requests)
            for worker, requests in self._router.hand_out(version=self.version):
                self._links[worker].give(requests)
            for worker, link in self._links.items():
                if self._router.load(worker) or link.cancelled:
                    while len(link.calls) < CALLS:
                        self._call(worker, link)
        except Exception as error:  # noqa: BLE001 - raised in all waiting callers, who would not see it otherwise
            self._fail(error)
        if self._collecting is None and any(link.calls for link in self._links.values()):
            self._collecting = asyncio.get_running_loop().create_task(self._collect())

    def _call(self, worker: int, link: _Link) -> None:
        number = next(self._numbers)
        if link.cancelled:
            link.last_cancelling = number
            link.recalled.update(link.cancelled)
        arguments = (link.new, link.cancelled, link.ended_sessions, self._look_s)
        link.new, link.cancelled, link.ended_sessions = [], [], []
        link.calls[number] = self._team.group.run_single_worker_single_data("exchange", worker, *arguments)

    async def _collect(self) -> None:
        """Process answers until no call is in flight."""
        try:
            while calls := [(worker, *call) for worker, link in self._links.items() for call in link.calls.items()]:
                for worker, number, answer in await in_thread(self._answers, calls):
                    self._take(worker, number, answer)
                self._look()
        except Exception as error:  # noqa: BLE001 - raised in all waiting callers
            self._fail(error)
        finally:
            self._collecting = None

    def _answers(self, calls: list[tuple[int, int, Any]]) -> list[tuple[int, int, Exchanged | WorkerDiedError]]:
        """Wait briefly for answers, in a thread, and return those that have arrived."""
        group = self._team.group
        done = set(map(id, group.wait_for_some([call for _, _, call in calls], timeout_s=0.5)))
        ready = [each for each in calls if id(each[2]) in done]
        try:
            answers = group.get_all_worker_results([call for _, _, call in ready]) if ready else []
        except WorkerDiedError:
            answers = [self._answer(worker, call) for worker, _, call in ready]
        return [(worker, number, answer) for (worker, number, _), answer in zip(ready, answers, strict=True)]

    def _answer(self, worker: int, call: Any) -> Exchanged | WorkerDiedError:
        """Return one worker's answer. The loss of a replaceable worker is returned, not raised."""
        try:
            return self._team.group.get_all_worker_results([call])[0]
        except WorkerDiedError as error:
            if worker not in self._replaceable:
                raise
            return error

    def _take(self, worker: int, number: int, answer: Exchanged | WorkerDiedError) -> None:
        link = self._links[worker]
        if number not in link.calls:
            return  # the process was lost in the meantime
        if isinstance(answer, WorkerDiedError):
            self._lose(worker, answer)
            return
        del link.calls[number]
        self._num_preemptions += answer.num_preemptions - link.num_preemptions
        link.num_preemptions = answer.num_preemptions
        for request_id, completion in answer.ended.items():
            if self._router.worker_of(request_id) == worker:  # otherwise it was cancelled or moved to another worker
                self._num_tokens += len(completion.token_ids)
                maker = self._router.finish(request_id)
                done = self._forget(request_id)
                # If it finished before a recall reached the worker, the worker has since received it again.
                if request_id in link.recalled:
                    link.cancel([request_id])
                if not done.cancelled():
                    done.set_result(Made(completion=completion, worker=maker))
        for request_id, why in answer.refused.items():
            if self._router.worker_of(request_id) == worker:
                self._router.drop(request_id)
                done = self._forget(request_id)
                if not done.cancelled():
                    done.set_exception(Refused(why))
        if number >= link.last_cancelling and not link.cancelled:  # otherwise the count includes recalled requests
            self._router.note_waiting(worker, answer.num_waiting)
        if not link.calls:
            link.recalled.clear()

    def _forget(self, request_id: str) -> asyncio.Future[Made]:
        done = self._asked.pop(request_id)
        if not self._asked:
            self._busy_s += time.perf_counter() - self._busy_since
            self._idle.set()
        return done

    def _fail(self, error: Exception) -> None:
        """Make all waiting callers, and later ones, raise the error."""
        self._failure = self._failure or error
        for done in [self._forget(request_id) for request_id in list(self._asked)]:
            if not done.cancelled():
                done.set_exception(error)

    # Losses

    def _lose(self, worker: int, error: WorkerError) -> None:
        """Move a lost worker's requests to the other workers, and start a replacement."""
        if worker in self._away and worker not in self._new_ones:
            return
        self._new_ones.discard(worker)
        self._away.add(worker)
        self._links[worker] = _Link()
        self._router.lose(worker)
        why = str(error).splitlines()[0]
        warn(f"{self._name(worker)} is lost; the other workers take over its work until it is replaced: {why}")
        loop = asyncio.get_running_loop()
        renewing = loop.create_task(self._renew(worker))
        self._renewing.add(renewing)
        renewing.add_done_callback(self._renewing.discard)
        if not self._router.num_workers and self._alone is None:
            why = f"no rollout process is left, and none came back within {self._wait_s:g} s"
            none_left = WorkerLostError(why, role="rollout", ranks=range(len(self._workers)), node_ranks=[])
            self._alone = loop.call_later(self._wait_s, self._fail, none_left)

    async def _renew(self, worker: int) -> None:
        assert self._replace is not None
        try:
            await in_thread(self._replace, worker)
        except Exception as error:  # noqa: BLE001 - raised in all waiting callers
            self._fail(error)
        else:
            self._new_ones.add(worker)

    # Weights

    async def _push(self, version: int) -> None:
        while True:
            new = set(self._new_ones)
            try:
                await in_thread(self._weights.push, version, without=self._away - new, has_new=bool(new))
            except WorkerLostError as error:
                await self._lose_receivers(error)
                continue
            break
        self._new_ones -= new
        for worker in new:
            say(f"{self._name(worker)} has version {version} of the weights and is serving requests again")
            self._away.discard(worker)
            self._router.join(self._new_worker(worker))
        if self._alone is not None and self._router.num_workers:
            self._alone.cancel()
            self._alone = None

    async def _lose_receivers(self, error: WorkerLostError) -> None:
        """Replace dead receivers after a failed push. Raises the error if none is dead."""
        group = self._team.group
        # Ray may not know yet that a worker is dead.
        named = error.ranks[:1] if isinstance(error, WorkerDiedError) else ()
        serving = (self._replaceable - self._away) | self._new_ones
        dead = [worker for worker in serving if worker in named or not group.workers[worker].is_alive()]
        if not dead:
            raise error
        await in_thread(self._weights.settle, lost=dead, timeout_s=30.0)
        for worker in dead:
            self._lose(worker, error)
