"""Reserves slots and runs workers on Ray.

Slots are the bundles of one placement group, so a virtual cluster gets all of its slots or none. Each bundle is tied to its
node. A task in each bundle reports which accelerator Ray assigned to it, so slots are in (node rank, accelerator) order, whatever
order Ray chose. A worker is a Ray actor in its slot's bundle.

Who waits for whom: ``reserve`` waits for nodes with enough free slots. ``Gang.start`` waits until all processes are up (the process of
rank 0 leases the group's port), and then until every worker has been created. Each wait has a deadline and reports what is missing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollcall.base.errors import ClusterError, NoRoomError
from rollcall.base.wait import Wait, say
from rollcall.base.words import counted
from rollcall.nodes.check import missing_ranks, start_there
from rollcall.nodes.cluster import Cluster
from rollcall.process.groups.backend import Ask, NodeSeats, Reservation
from rollcall.process.ray.carrier import OnRay
from rollcall.process.ray.members import RayNode, lost_nodes, ranked_nodes, settle_ranks

# Placing a group in free slots takes milliseconds. If it takes much longer, another run has taken the slots.
PLACE_TRY_S = 10.0
POLL_S = 0.25
NODES_DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class RayBackend:
    cluster: Cluster | None = None  # None if a script joined its Ray cluster by itself

    def reserve(self, ask: Ask, *, timeout_s: float) -> Reservation:
        if not ray.is_initialized():
            raise ClusterError("this process is not connected to a cluster; call init_ray() first")
        wait = Wait(timeout_s)
        while True:
            nodes = ranked_nodes()
            if (chosen := choose_nodes(ask, nodes)) is not None:
                if (group := _place(ask, chosen, timeout_s=min(PLACE_TRY_S, max(wait.left_s, 0.1)))) is not None:
                    settle_ranks(nodes)
                    return Reservation(
                        nodes=_seats(ask, chosen, group, wait=wait),
                        carrier=partial(OnRay, group=group, may_fork=_may_fork(chosen)),
                        release=partial(remove_placement_group, group),
                    )
            missing = sorted(set(ask.node_ranks or range(len(ask.slots_per_node))) - {node.rank for node in nodes})
            awaited = _missing(self.cluster, missing) if missing else f"slots: {_lack(ask, nodes)}"
            if not wait.again(f"waiting for {awaited}", after_s=POLL_S):
                advice = "ask for fewer slots, stop the processes that use the other slots, or add nodes (see `rollcall status`)"
                more = "" if missing else f". Nodes are assigned to entries in rank order; {advice}"
                raise NoRoomError(f"not enough room after waiting {timeout_s:g} s for {awaited}{more}")


def wait_for_nodes(cluster: Cluster | None, num_nodes: int, *, fewest: int, wait_s: float) -> list[int]:
    """Return the ranks of the nodes that have joined: all of them, or at least ``fewest`` after ``wait_s``."""
    wait = Wait()
    while True:
        here = [node.rank for node in ranked_nodes() if node.rank < num_nodes]
        if not (missing := sorted(set(range(num_nodes)) - set(here))):
            return here
        awaited = _missing(cluster, missing)
        if wait.waited_s >= wait_s and len(here) >= fewest:
            say(
                f"the run continues with {counted(len(here), 'node')}; after {wait_s:g} s, it is no longer waiting for {awaited}"
            )
            return here
        if wait.waited_s >= max(wait_s, NODES_DEADLINE_S):
            raise NoRoomError(
                f"trainer.elastic.min_nodes={fewest} is more than the {counted(len(here), 'node')} that joined; after "
                f"{wait.waited_s:.0f} s, the run is still waiting for {awaited}"
            )
        wait.tell(f"waiting for {awaited}")
        time.sleep(POLL_S)


def _missing(cluster: Cluster | None, ranks: Sequence[int]) -> str:
    """Return a text that lists the missing ranks, the times when nodes were lost, and the command that starts the nodes again."""
    start = (
        start_there(cluster, ranks)
        if cluster
        else "start them (`rollcall node`, or `ray start` for your own Ray cluster)"
    )
    return f"{missing_ranks(ranks, lost_nodes())}; {start}"


def choose_nodes(ask: Ask, nodes: Sequence[RayNode]) -> list[RayNode] | None:
    """Return a node for each entry: the named nodes, or the first in rank order with enough free slots; None if there are too few."""
    if ask.node_ranks is not None:
        by_rank = {node.rank: node for node in nodes}
        found = [by_rank.get(rank) for rank in ask.node_ranks]
    else:
        left, counts = iter(nodes), ask.slots_per_node
        found = [next((node for node in left if node.free.get(ask.resource, 0) >= count), None) for count in counts]
    chosen = [node for node in found if node is not None]
    return chosen if len(chosen) == len(found) else None


def _may_fork(nodes: Sequence[RayNode]) -> bool:
    """Return whether Rollcall is certainly installed in the Python of workers on these nodes: Rollcall started Ray there, and the user
    chose no other Python."""
    chosen_by_user = {"py_executable", "pip", "uv", "conda", "image_uri", "container", "nsight", "rocprof_sys"}
    return all(node.is_ours for node in nodes) and not chosen_by_user & {*ray.get_runtime_context().runtime_env}


def _place(ask: Ask, chosen: Sequence[RayNode], *, timeout_s: float) -> PlacementGroup | None:
    bundles, selectors = [], []
    for count, node in zip(ask.slots_per_node, chosen, strict=True):
        bundles += [{ask.resource: 1, **node.tie} for _ in range(count)]
        selectors += [node.selector for _ in range(count)]
    name = f"{ask.name}-{uuid.uuid4().hex[:8]}"  # Ray accepts each name once
    group = placement_group(bundles, strategy="PACK", name=name, bundle_label_selector=selectors)
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    return None


def _lack(ask: Ask, nodes: Sequence[RayNode]) -> str:
    """Return a text that compares the request with the slots of the nodes."""
    kind, counts = "slots" if ask.use_gpus else "CPUs", list(ask.slots_per_node)
    where = f" (nodes {', '.join(map(str, ask.node_ranks))})" if ask.node_ranks is not None else ""
    said = [f"{sum(counts)} {kind} were requested, {counts} by node{where}"]
    for node in nodes:
        total, free = node.total.get(ask.resource, 0), node.free.get(ask.resource, 0)
        said.append(f"node {node.rank} ({node.address}) has {total:g}, {free:g} of them free")
    if not nodes:
        said.append("no node has joined")
    elif ask.use_gpus and not any(node.total.get("GPU") for node in nodes):
        said.append(
            "no node has declared a GPU, but each slot is a GPU that Ray counts: on nodes without GPUs, `ray start --num-gpus N` (or "
            "`rollcall node --slots N`) declares N logical GPUs"
        )
    return "; ".join(said)


@ray.remote(num_cpus=0, max_calls=0)  # the process is reused for the node's next bundle
def _look() -> tuple[int, str, str | None]:
    """Return this bundle's accelerator: its place on the node, its name, and the variable that makes it visible."""
    from ray._private.accelerators import get_accelerator_manager_for_resource
    from ray._private.worker import global_worker

    device = str(ray.get_gpu_ids()[0])
    # If a node was started with only some accelerators visible, Ray counts only those, in the order of the variable.
    visible = global_worker.original_visible_accelerator_ids.get("GPU")
    place = visible.index(device) if visible else int(device)
    manager = get_accelerator_manager_for_resource("GPU")
    return place, device, None if manager is None else manager.get_visible_accelerator_ids_env_var()


def _seats(ask: Ask, chosen: Sequence[RayNode], group: PlacementGroup, *, wait: Wait) -> list[NodeSeats]:
    starts = [sum(ask.slots_per_node[:entry]) for entry in range(len(chosen))]
    bundles = [range(start, start + count) for start, count in zip(starts, ask.slots_per_node, strict=True)]
    looks: dict[int, tuple[int, str, str | None]] = {}
    if ask.use_gpus:
        try:
            looks = _look_around(bundles, group, wait=wait)
        except (RayError, ClusterError):
            remove_placement_group(group)
            raise
    seats = []
    for node, own in zip(chosen, bundles, strict=True):
        ordered = sorted(own, key=lambda bundle: looks[bundle][0]) if looks else list(own)
        if not ordered:
            continue
        seats.append(
            NodeSeats(
                node_rank=node.rank,
                node_id=node.node_id,
                address=node.address,
                bundles=tuple(ordered),
                devices=tuple(looks[bundle][1] for bundle in ordered) if looks else (),
                visible_variable=looks[ordered[0]][2] if looks else None,
            )
        )
    return sorted(seats, key=lambda seat: seat.node_rank)


def _look_around(
    bundles: Sequence[range], group: PlacementGroup, *, wait: Wait
) -> dict[int, tuple[int, str, str | None]]:
    """Query all nodes in parallel, but the bundles of a node one after the other, so that each node starts only one process for this."""
    found: dict[int, tuple[int, str, str | None]] = {}
    for turn in range(max(map(len, bundles))):
        asked = {
            own[turn]: _look.options(
                num_gpus=0.001,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=own[turn]),
            ).remote()
            for own in bundles
            if turn < len(own)
        }
        try:
            answers = ray.get(list(asked.values()), timeout=max(wait.left_s, 30))
        except GetTimeoutError:
            raise NoRoomError(
                "Ray reserved slots on a node but started no process on it; see the node's Ray logs"
            ) from None
        found |= dict(zip(asked, answers, strict=True))
    return found
