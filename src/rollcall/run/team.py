"""A run's processes on a cluster: where they run, which roles they have, how to call them, and what they are doing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rollcall.base.errors import WorkerDiedError, WorkerLostError
from rollcall.base.process_table import STOPPED
from rollcall.base.types import Sample, attempts_of
from rollcall.base.wait import warn
from rollcall.config import ClusterSection, TrainerSection
from rollcall.learner.gang import balance, units_of
from rollcall.loop.attempts import Budget, headline
from rollcall.nodes.declared import submitted_env, worker_env
from rollcall.nodes.door import new_secret
from rollcall.nodes.meeting import Place
from rollcall.observe.calls import RecordedCall
from rollcall.observe.events import Mark, MarkKind
from rollcall.observe.live import Look, ProcessState, WorkState
from rollcall.observe.timeline import WORKER_BACK, WORKER_LOST
from rollcall.plan.placement import SCORERS, TRAINED, Plan, PlannedProcess, Role
from rollcall.process.groups.backend import Seat
from rollcall.process.groups.cluster import VirtualCluster
from rollcall.process.groups.group import WorkerBuilder, WorkerGroup
from rollcall.process.groups.sightings import Sighting

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The nodes of an attempt. The plan and the section number them from 0; ``kept`` contains their ranks in the cluster."""

    plan: Plan
    section: ClusterSection
    kept: Sequence[int]
    cluster: VirtualCluster

    def start(
        self,
        builder: WorkerBuilder,
        processes: Sequence[PlannedProcess],
        *,
        name: str,
        purposes: Mapping[str, str],
        env: Mapping[str, str] | None = None,
        takes_slots: bool = True,
    ) -> WorkerGroup:
        """Start one worker for each planned process. With ``takes_slots=False`` a worker is placed at its first slot without reserving
        it."""
        first_slots = [sum(self.plan.slots_per_node[:rank]) for rank in range(self.plan.num_nodes)]
        submitted = submitted_env(self.section)
        return WorkerGroup(
            cluster=self.cluster,
            remote_worker_builder=builder,
            name_prefix=name,
            seats=[
                Seat(
                    node_rank=self.kept[process.node_rank],
                    slots=tuple(
                        slot - first_slots[process.node_rank]
                        for slot in (process.slots if takes_slots else process.slots[:1])
                    ),
                )
                for process in processes
            ],
            titles=list(map(str, processes)),
            kinds=[process.kind for process in processes],
            purposes=purposes,
            node_env_vars={
                self.kept[rank]: {**(env or {}), **worker_env(self.section, submitted=submitted, node_rank=rank)}
                for rank in {process.node_rank for process in processes}
            },
            takes_slots=takes_slots,
        )


class Spares:
    """Replaces lost processes, as often as the restart budget allows."""

    def __init__(self, group: WorkerGroup, trainer: TrainerSection, *, role: Role) -> None:
        self._is_closed = False
        self._group = group
        self._role = role
        self._budget = Budget(most=trainer.max_restarts, window_s=trainer.restart_window_s)
        self._one = threading.Lock()

    def close(self) -> None:
        """Stop replacing processes, because the group is about to be shut down."""
        self._is_closed = True

    def replace(self, rank: int, start: Callable[[], T]) -> T:
        """Start a new process in place of ``rank`` once its node is available. Returns the result of ``start``, which prepares the
        process."""
        where = self._group.specs[rank].where
        loss: WorkerLostError = WorkerDiedError(f"{where} is lost", role=str(self._role), ranks=[rank], node_ranks=[])
        while True:
            with self._one:
                self._budget.spend(loss)
            try:
                self._group.replace(rank, timeout_s=24 * 3600.0)  # meanwhile the other processes do the work
                return start()
            except WorkerLostError as error:
                if self._is_closed:
                    raise
                loss = error
                warn(f"{where} is lost; the other workers take over its work until it is replaced: {headline(loss)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    group: WorkerGroup
    members: dict[Role, list[int]]  # role -> the processes in the group that have the role, by rank
    together: frozenset[Role] = frozenset()  # roles whose processes run every forward pass together

    def call(self, workers: Sequence[int], method: str, *args: Any) -> list[Any]:
        return self.group.get_all_worker_results(self.group.run_some_workers_single_data(method, workers, *args))

    def call_role(self, role: Role, method: str, *args: Any) -> list[Any]:
        return self.call(self.members[role], method, *args)

    def meetings(self) -> dict[Role, tuple[Place, int]]:
        """Return the address where each gang's processes connect, and the number of processes, keyed by one of the gang's roles."""
        found: dict[Role, tuple[Place, int]] = {}
        for role in (*TRAINED, *SCORERS):
            members = self.members.get(role, [])
            # Roles in the same processes form one gang, and a process listens only once.
            known = any(self.members[other] == members for other in found)
            if len(members) > 1 and not known and (role in TRAINED or role in self.together):
                address = self.group.worker_metadata[members[0]]["address"]
                (port,) = self.call([members[0]], "listen", address)
                found[role] = (Place(address=address, port=port, secret=new_secret()), len(members))
        return found

    def forward(self, role: Role, method: str, samples: Sequence[Sample]) -> list[Any]:
        """Return one result per sample. Each process with the role gets a fair share of the tokens, and an attempt's rows stay together.
        If the processes run every forward pass together, each of them gets all samples, and they split them among themselves."""
        if role in self.together:
            return self.call_role(role, method, list(samples))[0]
        workers = self.members[role]
        units = units_of(attempts_of(samples).tolist())
        lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
        costs = [sum(lengths[index] for index in unit) for unit in units]
        shares = balance(units, costs, size=len(workers))
        busy = [(worker, share) for worker, share in zip(workers, shares, strict=True) if share]
        run = self.group.run_single_worker_single_data
        futures = [run(method, worker, [samples[index] for index in share]) for worker, share in busy]
        results: dict[int, Any] = {}
        for (_, share), part in zip(busy, self.group.get_all_worker_results(futures), strict=True):
            results.update(zip(share, part, strict=True))
        return [results[index] for index in range(len(samples))]


def look_at(
    groups: Sequence[tuple[WorkerGroup, Sequence[PlannedProcess]]],
    *,
    missing_nodes: Collection[int],
    on_ray: bool,
    last: bool = False,
) -> Look:
    """Describe the workers of the groups by role, node and state. ``processes`` are in rank order."""
    states: list[ProcessState] = []
    calls: dict[str, list[RecordedCall]] = {}
    marks: list[Mark] = []
    logs: dict[str, bytes] = {}
    for group, processes in groups:
        seen = group.sightings(last=last)
        lanes = [
            f"{' + '.join(f'{role} {rank}' for role, rank in process.ranks.items())} @ node {spec.node.node_rank}"
            for process, spec in zip(processes, group.specs, strict=True)
        ]
        states += [_state(one, group, processes[one.rank], lane=lanes[one.rank]) for one in seen.workers]
        logs |= {lanes[rank]: added for rank, added in seen.logs.items()}
        calls |= {lanes[rank]: list(ended) for rank, ended in seen.calls.items()}
        for turn in seen.turns:
            name, kind = (WORKER_LOST, MarkKind.FAULT) if turn.is_lost else (WORKER_BACK, MarkKind.RECOVERY)
            why = turn.why.partition("\n")[0] if turn.is_lost else turn.why
            marks.append(Mark(turn.at_s, name, kind, lanes[turn.rank], why))
    missing = sorted(missing_nodes)
    return Look(processes=states, calls=calls, marks=marks, logs=logs, missing_nodes=missing, on_ray=on_ray)


def _state(one: Sighting, group: WorkerGroup, process: PlannedProcess, *, lane: str) -> ProcessState:
    spec, seen = group.specs[one.rank], one.seen
    state = WorkState.BUSY if seen is not None and seen.doing else WorkState.IDLE
    if one.lost:
        state = WorkState.LOST
    elif one.is_silent:
        state = WorkState.SILENT
    elif seen is not None and seen.state in STOPPED:
        state = WorkState.STOPPED
    return ProcessState(
        lane=lane,
        roles={str(role): rank for role, rank in process.ranks.items()},
        node=spec.node.node_rank,
        address=spec.node.address or spec.node.node_id,
        slots=spec.slots,
        pid=one.pid,
        state=state,
        doing=seen.doing if seen is not None else "",
        since_s=None if one.since_s is None else round(one.since_s, 3),
        num_calls=seen.num_done if seen is not None else 0,
        memory_bytes=seen.memory_bytes if seen is not None else 0,
        device_bytes=seen.device_bytes if seen is not None else 0,
        why=one.lost,
        log=one.log,
    )
