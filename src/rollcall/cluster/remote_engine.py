"""The engines of all rollout processes as one: requests go out, finished ones come back, weights are handed on.

The router says which process gets what. Each process that has something to do has two calls of ``advance`` under way, so
that it need not wait for this one between them. ``poll`` only looks and sends; ``changed`` waits for an answer in a thread,
and everything else happens in the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rollcall.aside import in_thread
from rollcall.cluster.engine_seat import Progress
from rollcall.cluster.placement import Role
from rollcall.cluster.router import Place, Router
from rollcall.cluster.team import Team
from rollcall.cluster.weight_sync import WeightSync
from rollcall.engine.protocol import Finished, Request

POLL_S = 0.5  # the longest that one look at the engines takes
HELD_S = 0.02  # between two looks while all engines wait for new weights
CALLS = 2
# An engine with nothing finished answers after this long, so that new requests and new weights reach it; with many
# engines it is longer, or their answers would keep this process busy.
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.05, 0.2
LOOKS_PER_S = 160


class RemoteEngine:
    """``room`` is how many completions a process decodes at once."""

    def __init__(self, team: Team, *, room: int, node_weights: Sequence[float] | None) -> None:
        self.version = 0
        self.num_preemptions = 0
        self._team = team
        self._weights = WeightSync(team)
        self._workers = team.members[Role.ROLLOUT]
        nodes = {worker: team.group.worker_metadata[worker]["node_rank"] for worker in self._workers}
        places = [
            Place(worker=worker, node_rank=nodes[worker], name=f"rollout-{rank} on node {nodes[worker]}")
            for rank, worker in enumerate(self._workers)
        ]
        self._look_s = min(max(len(places) / LOOKS_PER_S, SHORTEST_LOOK_S), LONGEST_LOOK_S)
        self._router = Router(places, room=room, node_weights=node_weights)
        self._new: dict[int, list[Request]] = {worker: [] for worker in self._workers}
        self._aborted: dict[int, list[str]] = {worker: [] for worker in self._workers}
        self._give_back = dict.fromkeys(self._workers, 0)
        self._held_at: dict[int, int | None] = dict.fromkeys(self._workers)
        self._calls: dict[int, list[Any]] = {worker: [] for worker in self._workers}
        self._arrived: list[tuple[int, Progress]] = []
        self._is_waiting = False  # a thread has the calls in its hands
        self._makers: dict[str, str] = {}

    @property
    def num_unfinished(self) -> int:
        return self._router.num_unfinished

    def submit(self, request: Request) -> None:
        self._router.add(request)

    def abort(self, request_id: str) -> None:
        """Only the engines make completions, so one that waits here goes to one of them first."""
        given = self._router.hand_out_now(request_id)
        if given is not None:
            self._new[given[0]].append(given[1])
        worker = self._router.worker_of(request_id)
        if worker is not None:
            self._aborted[worker].append(request_id)

    def poll(self) -> list[Finished]:
        if not self._is_waiting:
            self._receive(self._collect(self._under_way(), timeout_s=0))
        arrived, self._arrived = self._arrived, []
        finished: list[Finished] = []
        for worker, progress in arrived:
            self._held_at[worker] = progress.held_at
            self.num_preemptions += progress.num_preemptions
            for item in progress.finished:
                self._makers[item.request_id] = self._router.finish(item.request_id)
            self._router.note_waiting(worker, num_waiting=progress.num_waiting, returned=progress.returned)
            finished += progress.finished
        self._send()
        return finished

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
        return [(worker, call) for worker, calls in self._calls.items() for call in calls]

    def _collect(self, calls: list[tuple[int, Any]], *, timeout_s: float) -> list[tuple[int, Any, Progress]]:
        group = self._team.group
        if not calls:
            return []
        done = set(map(id, group.wait_for_some([call for _, call in calls], timeout_s=timeout_s)))
        ready = [(worker, call) for worker, call in calls if id(call) in done]
        results = group.get_all_worker_results([call for _, call in ready]) if ready else []
        return [(worker, call, progress) for (worker, call), progress in zip(ready, results, strict=True)]

    def _receive(self, found: list[tuple[int, Any, Progress]]) -> None:
        for worker, call, progress in found:
            self._calls[worker] = [other for other in self._calls[worker] if other is not call]
            self._arrived.append((worker, progress))

    def _send(self) -> None:
        for worker, request in self._router.hand_out(version=self.version):
            self._new[worker].append(request)
        for worker, count in self._router.ask_back().items():
            self._give_back[worker] = count
        for worker in self._workers:
            held = self._held_at[worker] is not None and self._held_at[worker] == self.version
            if self._router.load(worker) and not held:
                while len(self._calls[worker]) < CALLS:
                    self._advance(worker)

    def _advance(self, worker: int) -> None:
        requests, self._new[worker] = self._new[worker], []
        aborted, self._aborted[worker] = self._aborted[worker], []
        give_back, self._give_back[worker] = self._give_back[worker], 0
        arguments = (requests, aborted, give_back, self._look_s)
        call = self._team.group.run_single_worker_single_data("advance", worker, *arguments)
        self._calls[worker].append(call)

    def update_weights(self, version: int) -> None:
        """All processes that hold a policy take the actor's: those of the actor itself have it already."""
        self._weights.push(version)
        self.version = version
