"""The live nodes of the Ray that this process is connected to, by rank.

Ray is imported in here: it reads variables while it is imported, which ``connect`` sets before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollcall.base.errors import ClusterError
from rollcall.nodes.head import NodeInfo
from rollcall.nodes.rank import rank_by_address
from rollcall.process.ray.each_node import pinned
from rollcall.process.ray.gcs import node_rows

RANK_LABEL = "rollcall.rank"  # from `rollcall node`, or from a person's `ray start`
MARK_LABEL = "rollcall.mark"  # from `rollcall node` only

# Ranks of nodes that carry none, once a run has been placed on them: by the Ray and the node's place.
_settled: dict[str, dict[str, int]] = {}
# Nodes that were silent in a run, each with a call that is waiting for its answer, and since when. Ray itself lists a dead node as
# alive for a minute or more, unless it was started with other settings.
_suspects: dict[str, tuple[Any, float]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A live node, its rank, and what it has."""

    rank: int
    node_id: str
    address: str
    place: str  # its address; where several nodes have it, more
    is_labelled: bool
    is_ours: bool  # `rollcall node` has started its Ray, so the Python of its workers has Rollcall
    total: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def selector(self) -> dict[str, str]:
        """The labels that tie a bundle to the node, by rank if it has one: a node that replaces a dead one gets its slots."""
        if self.is_labelled:
            return {RANK_LABEL: str(self.rank)}
        return {} if self.tie else {"ray.io/node-id": self.node_id}

    @property
    def tie(self) -> dict[str, float]:
        """The resource that ties a bundle to a node without a label: what comes back at the same address gets the slots."""
        name = f"node:{self.address}"  # every node of Ray offers it; so little leaves room for all others
        return {name: 0.001} if not self.is_labelled and self.place == self.address and name in self.total else {}


def ranked_nodes() -> list[RayNode]:
    """The live nodes by rank. Those without a rank of their own follow by address; a silent one counts once it answers again."""
    import ray
    from ray._private import state as ray_state  # the pinned Ray has no public call for free resources

    free = ray_state.available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"] and _answers(node["NodeID"])]
    _refuse_twins(alive)
    addresses = [node["NodeManagerAddress"] for node in alive]
    # Where several nodes have an address, also which of them it is.
    places = {
        one if addresses.count(one) == 1 else f"{one} {node['NodeID']}": node
        for one, node in zip(addresses, alive, strict=True)
    }
    ranks = rank_by_address(
        {
            place: (_own_rank(node), node["NodeManagerAddress"], node["Resources"].get("GPU", 0) > 0)
            for place, node in places.items()
        },
        known=_settled.get(_this_ray()),
    )
    return [
        RayNode(
            rank=rank,
            node_id=places[place]["NodeID"],
            address=places[place]["NodeManagerAddress"],
            place=place,
            is_labelled=RANK_LABEL in places[place]["Labels"],
            is_ours=MARK_LABEL in places[place]["Labels"],
            total=places[place]["Resources"],
            free=free.get(places[place]["NodeID"], {}),
        )
        for place, rank in ranks.items()
    ]


def lost_nodes() -> dict[int | None, NodeInfo]:
    """The nodes that are dead or silent, by the rank that they had; of several, the last."""
    from ray._private import worker

    current: Any = worker.global_worker
    settled = _settled.get(_this_ray(), {})
    found: dict[int | None, NodeInfo] = {}
    for node in sorted(
        map(NodeInfo.of, node_rows(current.gcs_client.get_all_node_info(timeout=30))), key=lambda node: node.started_ms
    ):
        if node.node_id in _suspects:
            node = replace(node, alive=False, ended_ms=round(_suspects[node.node_id][1] * 1000))
        if not node.alive:
            found[settled.get(node.address) if node.rank is None else node.rank] = node
    return found


def settle_ranks(nodes: Sequence[RayNode]) -> None:
    """Keeps the ranks of these nodes, on which a run is placed, and of nodes that come back in their places."""
    now = {node.place: node.rank for node in nodes}
    before = _settled.get(_this_ray(), {})
    _settled[_this_ray()] = {place: rank for place, rank in before.items() if rank not in now.values()} | now


def suspect(node_id: str) -> None:
    """Leaves out this node, which does not answer, until it does."""
    import ray

    if node_id not in _suspects:
        _suspects[node_id] = ray.remote(lambda: None).options(**pinned(node_id), max_retries=0).remote(), time.time()


def forget_members() -> None:
    """Forgets everything when this process leaves its Ray."""
    _settled.clear()
    _suspects.clear()


def _answers(node_id: str) -> bool:
    import ray
    from ray.exceptions import RayError

    if node_id not in _suspects:
        return True
    call, _ = _suspects[node_id]
    if not ray.wait([call], timeout=0)[0]:
        return False
    try:
        ray.get(call)
    except RayError:  # Ray takes it for dead, or soon will
        return False
    del _suspects[node_id]
    return True


def _this_ray() -> str:
    import ray

    return ray.get_runtime_context().gcs_address if ray.is_initialized() else ""


def _own_rank(node: dict[str, Any]) -> int | None:
    label = node["Labels"].get(RANK_LABEL)
    return None if label is None else int(label)


def _refuse_twins(alive: Sequence[dict[str, Any]]) -> None:
    holders: dict[int, str] = {}
    for node in alive:
        rank, address = _own_rank(node), node["NodeManagerAddress"]
        if rank in holders:
            raise ClusterError(f"two live nodes have rank {rank}: {holders[rank]} and {address}; take one of them down")
        if rank is not None:
            holders[rank] = address
