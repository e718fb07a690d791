"""Shrinks a cluster section to fewer nodes: the same placement without the slots of missing nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollcall.base.errors import PlacementError
from rollcall.config import ClusterSection, NodeSection
from rollcall.plan.placement import Plan, Role


def shrink(section: ClusterSection, plan: Plan, *, kept: Sequence[int]) -> ClusterSection:
    """Return the section for only the ``kept`` nodes (ranks, in order), renumbered from 0. ``plan`` is for all nodes."""
    lost = [rank for rank in range(plan.num_nodes) if rank not in kept]
    old = [slot for rank in kept for slot in plan.node_slots(rank)]
    number = {slot.index: new for new, slot in enumerate(old)}
    placement: dict[str, str | int] = {}
    for role, processes in plan.processes.items():
        left = [process for process in processes if process.node_rank in kept]
        if not left:
            names = ", ".join(map(str, lost))
            raise PlacementError(
                f"all {role} processes were on nodes that are missing ({names}), and the run needs one; bring one "
                f"back with `rollcall node`, or place {role} on several nodes"
            )
        if role is Role.ENVIRONMENT:
            placement[role.value] = ",".join(str(number[slot]) for process in left for slot in process.slots)
        else:
            spans = [(number[process.slots[0]], number[process.slots[-1]]) for process in left]
            placement[role.value] = ",".join(f"{first}-{last}:{rank}" for rank, (first, last) in enumerate(spans))
    weights = None if section.node_weights is None else [section.node_weights[rank] for rank in kept]
    return section.model_copy(
        update={
            "num_nodes": len(kept),
            "nodes": [NodeSection(gpus=plan.slots_per_node[rank]) for rank in kept],
            "num_gpus_per_node": max(plan.slots_per_node[rank] for rank in kept),
            "component_placement": placement,
            "node_weights": weights,
            "node_env": {new: section.node_env[rank] for new, rank in enumerate(kept) if rank in section.node_env},
        }
    )
