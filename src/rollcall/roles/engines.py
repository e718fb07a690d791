"""The engines of all rollout processes as one: requests go out, finished ones come back, new weights go to all.

The router decides which process gets which request. Each busy process has two calls of ``advance`` under way, so that it
does not wait for this process between them. ``poll`` only looks and sends. ``changed`` waits for an answer in a thread;
everything else happens in the thread of the event loop.

A process that holds only an engine may be lost: its requests go back to the router, and ``replace`` makes a new process in
a thread of its own. The new one serves once it has the current weights, from the next push or from ``admit``. Lists and
sets that both threads touch are changed by single operations.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollcall.engine.protocol import Ended, Finished, Request
from rollcall.errors import WorkerDiedError, WorkerError, WorkerLostError
from rollcall.loop.aside import in_thread
from rollcall.plan.placement import Role
from rollcall.roles.engine_seat import Advance
from rollcall.roles.router import RolloutWorker, Router
from rollcall.roles.team import Team
from rollcall.roles.unfinished import Unfinished
from rollcall.roles.weight_sync import WeightSync
from rollcall.wait import say, warn

POLL_S = 0.5  # the longest that one look at the engines takes
HELD_S = 0.02  # between two looks while all engines wait for new weights
CALLS = 2
WAIT_S = 180.0
SETTLE_S = 30.0  # for a sender to notice that a receiver is gone
# An engine with nothing finished answers after this long, so that new requests and new weights reach it; with many
# engines it is longer, or their answers would keep this process busy.
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.05, 0.2
LOOKS_PER_S = 160


@dataclass(slots=True)
class _Line:
    """To one process: what the next call takes along, and the calls under way."""

    new: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # sessions
    give_back: int = 0
    held_at: int | None = None
    calls: list[Any] = field(default_factory=list)


class RemoteEngine:
    """``room`` is how many completions a process decodes at once.

    The run can go on without the ``replaceable`` processes; ``replace`` makes a new one, ready for weights, and raises if it
    cannot. With no engine left, the run waits ``wait_s`` for one.
    """

    def __init__(
        self,
        team: Team,
        *,
        room: int,
        node_weights: Sequence[float] | None,
        replaceable: Collection[int] = (),
        replace: Callable[[int], None] | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self.version = 0
        self.num_preemptions = 0
        self._team = team
        self._weights = WeightSync(team)
        self._workers = team.members[Role.ROLLOUT]
        self._look_s = min(max(len(self._workers) / LOOKS_PER_S, SHORTEST_LOOK_S), LONGEST_LOOK_S)
        self._router = Router(list(map(self._new_worker, self._workers)), room=room, node_weights=node_weights)
        self._lines = {worker: _Line() for worker in self._workers}
        self._arrived: list[tuple[int, Advance]] = []
        self._is_waiting = False  # a thread waits for the calls
        self._makers: dict[str, str] = {}
        self._unfinished = Unfinished()
        self._ended: list[Ended] = []
        self._to_abort: set[str] = set()
        self._replaceable = frozenset(replaceable) if replace is not None else frozenset()
        self._replace = replace
        self._wait_s = wait_s
        self._away: set[int] = set()  # lost, and not yet serving again
        self._lost: list[int] = []  # lost, and the router does not know it yet
        self._new_ones: set[int] = set()  # built, without weights
        self._joining: list[int] = []  # with weights, and the router does not know it yet
        self._failure: Exception | None = None
        self._alone_since: float | None = None

    def _new_worker(self, worker: int) -> RolloutWorker:
        node_rank = self._team.group.worker_metadata[worker]["node_rank"]
        return RolloutWorker(worker=worker, node_rank=node_rank, name=self._name(worker))

    def _name(self, worker: int) -> str:
        return f"rollout-{self._workers.index(worker)} on node {self._team.group.worker_metadata[worker]['node_rank']}"

    @property
    def num_unfinished(self) -> int:
        return self._router.num_unfinished

    def submit(self, request: Request) -> None:
        self._router.add(request)

    def abort(self, request_id: str) -> None:
        """Only an engine can return what an aborted request has made, so a request that waits here goes to one first."""
        self._to_abort.add(request_id)
        given = self._router.hand_out_now(request_id)
        if given is not None:
            self._lines[given[0]].new.append(given[1])
        worker = self._router.worker_of(request_id)
        if worker is not None:
            self._lines[worker].aborted.append(request_id)

    def end_session(self, session: str) -> None:
        """Goes along with the next call: what a process without work keeps is in nobody's way."""
        for worker in self._router.end_session(session):
            self._lines[worker].ended.append(session)

    def poll(self) -> list[Finished]:
        if not self._is_waiting:
            self._receive(self._collect(self._under_way(), timeout_s=0))
        arrived, self._arrived = self._arrived, []
        finished: list[Finished] = []
        for worker, progress in arrived:
            self._lines[worker].held_at = progress.held_at
            self.num_preemptions += progress.num_preemptions
            self._ended += map(self._unfinished.note, progress.ended)
            for item in progress.finished:
                self._makers[item.request_id] = self._router.finish(item.request_id)
                self._to_abort.discard(item.request_id)
            self._router.note_waiting(worker, num_waiting=progress.num_waiting, returned=progress.returned)
            finished += map(self._unfinished.whole, progress.finished)
        self._change_places()
        self._send()
        return finished

    def _change_places(self) -> None:
        """Tell the router which processes are gone and which are back."""
        if self._failure is not None:
            raise self._failure
        while self._lost:
            worker = self._lost.pop(0)
            self._lines[worker] = _Line()
            for request_id in self._router.lose(worker, missing=self._unfinished.missing):
                if request_id in self._to_abort:
                    self.abort(request_id)
        while self._joining:
            worker = self._joining.pop(0)
            self._router.join(self._new_worker(worker))
            self._away.discard(worker)
        if self._router.num_workers:
            self._alone_since = None
            return
        self._alone_since = self._alone_since or time.monotonic()
        if time.monotonic() - self._alone_since > self._wait_s:
            raise WorkerLostError(
                f"no rollout process is left, and none came back within {self._wait_s:g} s",
                role="rollout",
                ranks=range(len(self._workers)),
                node_ranks=[],
            )

    def take_ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    async def changed(self) -> None:
        """Returns when some process has answered, or after a moment."""
        calls = self._under_way()
        if not calls:
            await asyncio.sleep(HELD_S)
            return
        self._is_waiting = True
        try:
            found = await in_thread(self._collect, calls, timeout_s=POLL_S)
        finally:
            self._is_waiting = False
        self._receive(found)

    def take_maker(self, request_id: str) -> str:
        return self._makers.pop(request_id)

    def _under_way(self) -> list[tuple[int, Any]]:
        return [(worker, call) for worker, line in self._lines.items() for call in line.calls]

    def _collect(
        self, calls: list[tuple[int, Any]], *, timeout_s: float
    ) -> list[tuple[int, Any, Advance | WorkerDiedError]]:
        group = self._team.group
        if not calls:
            return []
        done = set(map(id, group.wait_for_some([call for _, call in calls], timeout_s=timeout_s)))
        ready = [(worker, call) for worker, call in calls if id(call) in done]
        try:
            results = group.get_all_worker_results([call for _, call in ready]) if ready else []
        except WorkerDiedError:
            results = [self._result(worker, call) for worker, call in ready]
        return [(worker, call, progress) for (worker, call), progress in zip(ready, results, strict=True)]

    def _result(self, worker: int, call: Any) -> Advance | WorkerDiedError:
        """The answer of one worker; the loss of a replaceable one is returned, not raised."""
        try:
            return self._team.group.get_all_worker_results([call])[0]
        except WorkerDiedError as error:
            if worker not in self._replaceable:
                raise
            return error

    def _receive(self, found: list[tuple[int, Any, Advance | WorkerDiedError]]) -> None:
        for worker, call, progress in found:
            line = self._lines[worker]
            if not any(other is call for other in line.calls):
                continue  # its process was lost in the meantime
            if isinstance(progress, WorkerDiedError):
                self._lose(worker, progress)
                continue
            line.calls = [other for other in line.calls if other is not call]
            self._arrived.append((worker, progress))

    def _lose(self, worker: int, error: WorkerError) -> None:
        """Start to replace it; the router is told at the next poll."""
        if worker in self._away and worker not in self._new_ones:
            return
        self._new_ones.discard(worker)
        self._away.add(worker)
        self._lost.append(worker)
        why = str(error).splitlines()[0]
        warn(f"{self._name(worker)} is lost; the others do its work until it is replaced: {why}")
        threading.Thread(target=self._renew, args=(worker,), name=f"replacing {worker}", daemon=True).start()

    def _renew(self, worker: int) -> None:
        assert self._replace is not None
        try:
            self._replace(worker)
        except Exception as error:  # noqa: BLE001 - raised by the next poll, whatever it is
            self._failure = error
            return
        self._new_ones.add(worker)

    def _send(self) -> None:
        for worker, request in self._router.hand_out(version=self.version):
            self._lines[worker].new.append(request)
        for worker, count in self._router.ask_back().items():
            self._lines[worker].give_back = count
        for worker, line in self._lines.items():
            if self._router.load(worker) and line.held_at != self.version:
                while len(line.calls) < CALLS:
                    self._advance(worker, line)

    def _advance(self, worker: int, line: _Line) -> None:
        arguments = (line.new, line.aborted, line.ended, line.give_back, self._look_s)
        line.new, line.aborted, line.ended, line.give_back = [], [], [], 0
        line.calls.append(self._team.group.run_single_worker_single_data("advance", worker, *arguments))

    def update_weights(self, version: int) -> None:
        """Every process with a policy gets the actor's weights; the actor's own processes have them already."""
        while True:
            new = set(self._new_ones)
            if new:
                self._weights.invite_again()
            try:
                self._weights.push(version, without=self._away - new)
            except WorkerLostError as error:
                self._lose_receivers(error)
                continue
            break
        self.version = version
        self._new_ones -= new
        for worker in new:
            say(f"{self._name(worker)} has weights of version {version} and serves again")
            self._joining.append(worker)

    @property
    def is_due(self) -> bool:
        return bool(self._new_ones)

    def _lose_receivers(self, error: WorkerLostError) -> None:
        """A push broke off: replace the receivers that are dead. If none of them is, raise the error."""
        group = self._team.group
        # It may be dead before Ray knows it.
        named = error.ranks[:1] if isinstance(error, WorkerDiedError) else ()
        serving = (self._replaceable - self._away) | self._new_ones
        dead = [worker for worker in serving if worker in named or not group.workers[worker].is_alive()]
        if not dead:
            raise error
        self._weights.settle(lost=dead, timeout_s=SETTLE_S)
        for worker in dead:
            self._lose(worker, error)
