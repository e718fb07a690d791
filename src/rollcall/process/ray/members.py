"""The live nodes of the Ray cluster that this process is connected to, by rank.

Ray reads environment variables when it is imported, so the functions import it only after ``connect`` has set them.
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

RANK_LABEL = "rollcall.rank"  # set by `rollcall node`, or by a user's `ray start`

# The ranks that were assigned to nodes without a rank of their own when a run was placed on them, by Ray cluster and node's place.
_settled: dict[str, dict[str, int]] = {}
# Nodes that were silent in a run, each with a pending call and the time when it was made. Ray itself lists a dead node as
# alive for a minute or more, unless it was started with different settings.
_suspects: dict[str, tuple[Any, float]] = {}
_answered: set[str] = set()  # nodes that have answered since they were suspected


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A live node, its rank and its resources."""

    rank: int
    node_id: str
    address: str
    place: str  # its address, followed by its id if several nodes share the address
    is_labelled: bool
    is_ours: bool  # `rollcall node` started its Ray, so the Python of its workers has Rollcall
    total: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def selector(self) -> dict[str, str]:
        """Return the labels that tie a bundle to the node. If it has a rank, they tie the bundle to the rank, so a node that replaces a
        dead one gets its slots."""
        if self.is_labelled:
            return {RANK_LABEL: str(self.rank)}
        return {} if self.tie else {"ray.io/node-id": self.node_id}

    @property
    def tie(self) -> dict[str, float]:
        """Return the resource that ties a bundle to a node that has no label. A new node at this address gets the old node's slots."""
        name = f"node:{self.address}"  # every Ray node has this resource; each bundle takes so little of it that there is enough for all
        return {name: 0.001} if not self.is_labelled and self.place == self.address and name in self.total else {}


def ranked_nodes() -> list[RayNode]:
    """Return the live nodes by rank. Nodes without a rank of their own follow, by address. A silent node is left out until it answers."""
    import ray
    from ray._private import state as ray_state  # the pinned Ray has no public call for free resources

    free = ray_state.available_resources_per_node()
    alive = _without_predecessors([node for node in ray.nodes() if node["Alive"] and _answers(node["NodeID"])])
    addresses = [node["NodeManagerAddress"] for node in alive]
    own = [None if (label := node["Labels"].get(RANK_LABEL)) is None else int(label) for node in alive]
    for rank in own:
        if rank is not None and own.count(rank) > 1:
            twins = " and ".join(address for address, one in zip(addresses, own, strict=True) if one == rank)
            raise ClusterError(f"two live nodes have rank {rank}: {twins}; stop one of them")
    # If several nodes share an address, the place also contains the node's id.
    places = {
        one if addresses.count(one) == 1 else f"{one} {node['NodeID']}": node
        for one, node in zip(addresses, alive, strict=True)
    }
    ranks = rank_by_address(
        {
            place: (rank, address, node["Resources"].get("GPU", 0) > 0)
            for (place, node), address, rank in zip(places.items(), addresses, own, strict=True)
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
            is_ours="rollcall.mark" in places[place]["Labels"],  # set by `rollcall node` only
            total=places[place]["Resources"],
            free=free.get(places[place]["NodeID"], {}),
        )
        for place, rank in ranks.items()
    ]


def _without_predecessors(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out nodes that must first prove that they are alive. If a run's node was restarted, Ray may list it twice for a while: as it
    was before the restart and as it is now."""
    known, addresses = _settled.get(_this_ray(), {}), [node["NodeManagerAddress"] for node in nodes]
    for node, address in zip(nodes, addresses, strict=True):
        if address in known and addresses.count(address) > 1 and node["NodeID"] not in _answered:
            suspect(node["NodeID"])
    return [node for node in nodes if node["NodeID"] not in _suspects]


def lost_nodes() -> dict[int | None, NodeInfo]:
    """Return the dead or silent nodes by the rank that they had. If several had the same rank, return the last of them."""
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
    """Remember the ranks of the nodes that a run is placed on, so that a node that comes back in the same place gets the same rank."""
    now = {node.place: node.rank for node in nodes}
    before = _settled.get(_this_ray(), {})
    _settled[_this_ray()] = {place: rank for place, rank in before.items() if rank not in now.values()} | now


def suspect(node_id: str) -> None:
    """Leave this node out until it answers, because it is silent."""
    import ray

    if node_id not in _suspects:
        _suspects[node_id] = ray.remote(lambda: None).options(**pinned(node_id), max_retries=0).remote(), time.time()


def forget_members() -> None:
    """Forget everything because this process is leaving its Ray cluster."""
    _settled.clear()
    _suspects.clear()
    _answered.clear()


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
    except RayError:  # Ray considers the node dead, or will soon
        return False
    del _suspects[node_id]
    _answered.add(node_id)
    return True


def _this_ray() -> str:
    import ray

    return ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
