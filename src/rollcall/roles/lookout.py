"""The processes of a run on a cluster, as those who look at the run see them: what the group knows, in the words of the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rollcall.groups.group import WorkerGroup
from rollcall.groups.sightings import Sighting, Turn
from rollcall.observe.calls import RecordedCall
from rollcall.observe.events import Mark, MarkKind
from rollcall.observe.live import Look, ProcessState, WorkState
from rollcall.observe.timeline import WORKER_BACK, WORKER_LOST
from rollcall.plan.placement import PlannedProcess
from rollcall.process_table import STOPPED


def look_at(
    group: WorkerGroup, processes: Sequence[PlannedProcess], *, missing_nodes: Collection[int] = (), last: bool = False
) -> Look:
    """``processes`` by rank in the group."""
    seen = group.sightings(last=last)
    lanes = {rank: lane_of(process, node=group.specs[rank].node.node_rank) for rank, process in enumerate(processes)}
    return Look(
        processes=[_state(one, group, processes[one.rank], lane=lanes[one.rank]) for one in seen.workers],
        calls={
            lanes[rank]: [RecordedCall(call.method, call.start_s, call.end_s, call.count) for call in own]
            for rank, own in seen.calls.items()
        },
        marks=[_mark(turn, lanes) for turn in seen.turns],
        logs={lanes[rank]: added for rank, added in seen.logs.items()},
        missing_nodes=sorted(missing_nodes),
    )


def joined(*looks: Look) -> Look:
    """Of several groups, as one."""
    return Look(
        processes=[one for look in looks for one in look.processes],
        calls={lane: calls for look in looks for lane, calls in look.calls.items()},
        marks=[mark for look in looks for mark in look.marks],
        logs={lane: added for look in looks for lane, added in look.logs.items()},
        missing_nodes=looks[0].missing_nodes,
    )


def lane_of(process: PlannedProcess, *, node: int) -> str:
    """``actor 0 + rollout 0 @ node 1``"""
    roles = " + ".join(f"{role} {rank}" for role, rank in process.ranks.items())
    return f"{roles} @ node {node}"


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


def _mark(turn: Turn, lanes: Mapping[int, str]) -> Mark:
    if turn.is_lost:
        return Mark(turn.at_s, WORKER_LOST, MarkKind.FAULT, lanes[turn.rank], turn.why.partition("\n")[0])
    return Mark(turn.at_s, WORKER_BACK, MarkKind.RECOVERY, lanes[turn.rank], turn.why)
