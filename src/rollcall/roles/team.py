"""All processes of a run and who holds which role: how the handles of the controller reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollcall.groups.group import WorkerGroup
from rollcall.learner.gang import balance, units_of
from rollcall.net.door import new_secret
from rollcall.net.meeting import Place
from rollcall.plan.placement import SCORERS, TRAINED, Role
from rollcall.types import Sample, attempts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    group: WorkerGroup
    members: dict[Role, list[int]]  # which processes of the group hold each role, by rank
    together: frozenset[Role] = frozenset()  # roles whose processes run every forward together

    def call(self, workers: Sequence[int], method: str, *args: Any) -> list[Any]:
        return self.group.get_all_worker_results(self.group.run_some_workers_single_data(method, workers, *args))

    def call_role(self, role: Role, method: str, *args: Any) -> list[Any]:
        return self.call(self.members[role], method, *args)

    def meetings(self) -> dict[Role, tuple[Place, int]]:
        """For each gang, under one of its roles: where its processes meet, and how many they are."""
        found: dict[Role, tuple[Place, int]] = {}
        for role in (*TRAINED, *SCORERS):
            members = self.members.get(role, [])
            # Roles in the same processes make one gang; a process listens once.
            known = any(self.members[other] == members for other in found)
            if len(members) > 1 and not known and (role in TRAINED or role in self.together):
                address = self.group.worker_metadata[members[0]]["address"]
                (port,) = self.call([members[0]], "listen", address)
                found[role] = (Place(address=address, port=port, secret=new_secret()), len(members))
        return found

    def forward(self, role: Role, method: str, samples: Sequence[Sample]) -> list[Any]:
        """One result per sample. Each process of the role computes a fair share of the tokens, the rows of an attempt together;
        processes that run every forward together divide the samples among themselves."""
        if role in self.together:
            return self.call_role(role, method, list(samples))[0]
        workers = self.members[role]
        units = units_of(attempts_of(samples).tolist())
        costs = [
            sum(len(samples[index].prompt_ids) + len(samples[index].response_ids) for index in unit) for unit in units
        ]
        shares = balance(units, costs, size=len(workers))
        busy = [(worker, share) for worker, share in zip(workers, shares, strict=True) if share]
        futures = [
            self.group.run_single_worker_single_data(method, worker, [samples[index] for index in share])
            for worker, share in busy
        ]
        results: list[Any] = [None] * len(samples)
        for (_, share), part in zip(busy, self.group.get_all_worker_results(futures), strict=True):
            for index, value in zip(share, part, strict=True):
                results[index] = value
        return results
