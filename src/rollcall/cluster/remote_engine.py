"""The engines of all rollout processes as one: requests go out, finished ones come back, weights are handed on."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rollcall.cluster.placement import Role
from rollcall.cluster.team import Team
from rollcall.engine.protocol import Finished, Request

POLL_S = 0.5  # the longest that one look at the engines takes


class RemoteEngine:
    """The engine of all rollout processes together: each request goes to whoever has least to do."""

    def __init__(self, team: Team) -> None:
        self.version = 0
        self.num_preemptions = 0
        self._team = team
        self._workers = team.members[Role.ROLLOUT]
        self._load: Counter[int] = Counter(dict.fromkeys(self._workers, 0))  # completions under way
        self._request: dict[str, tuple[int, int]] = {}  # where each is, and how many completions it has
        self._new: dict[int, list[Request]] = {worker: [] for worker in self._workers}
        self._aborted: dict[int, list[str]] = {worker: [] for worker in self._workers}
        self._calls: dict[int, Any] = {}  # the one call under way of each process that has something to do

    @property
    def num_unfinished(self) -> int:
        return len(self._request)

    def submit(self, request: Request) -> None:
        worker = min(self._workers, key=lambda worker: (self._load[worker], worker))
        self._load[worker] += len(request.seeds)
        self._request[request.id] = (worker, len(request.seeds))
        self._new[worker].append(request)

    def abort(self, request_id: str) -> None:
        if request_id in self._request:
            self._aborted[self._request[request_id][0]].append(request_id)

    def poll(self) -> list[Finished]:
        group = self._team.group
        for worker in self._workers:
            if self._load[worker] and worker not in self._calls:
                requests, self._new[worker] = self._new[worker], []
                aborted, self._aborted[worker] = self._aborted[worker], []
                self._calls[worker] = group.run_single_worker_single_data("advance", worker, requests, aborted)
        if not self._calls:
            return []
        done = set(map(id, group.wait_for_some(list(self._calls.values()), timeout_s=POLL_S)))
        ready = [worker for worker, call in self._calls.items() if id(call) in done]
        finished: list[Finished] = []
        for progress in group.get_all_worker_results([self._calls.pop(worker) for worker in ready]) if ready else []:
            finished += progress.finished
            self.num_preemptions += progress.num_preemptions
        for item in finished:
            worker, count = self._request.pop(item.request_id)
            self._load[worker] -= count
        return finished

    def update_weights(self, version: int) -> None:
        """All processes that hold a policy take the actor's: those of the actor itself have it already."""
        members = self._team.members
        holders = sorted({*self._workers, *members.get(Role.INFERENCE, [])})
        sharing = [worker for worker in holders if worker in members[Role.ACTOR]]
        apart = [worker for worker in holders if worker not in members[Role.ACTOR]]
        group = self._team.group
        futures = group.run_some_workers_single_data("use_weights", sharing, version, None)
        if apart:
            # The weights themselves never come here: the future of one process is the argument of the others.
            weights = group.run_single_worker_single_data("weights", members[Role.ACTOR][0])
            futures += group.run_some_workers_single_data("use_weights", apart, version, weights)
        group.get_all_worker_results(futures)
        self.version = version
