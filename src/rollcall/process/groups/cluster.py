"""VirtualCluster: slots on nodes, reserved for worker groups.

Slots are in (node rank, slot) order. A node's rank comes from ``rollcall node --rank``; on a Ray cluster that was started
differently, nodes are ranked by address.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from rollcall.base.errors import ClusterError
from rollcall.process.groups.backend import Ask, Backend, NodeSeats, Recipe, Reservation, Seat, WorkerSpec
from rollcall.process.groups.gang import STOP_DEADLINE_S, Gang

_default: Backend | None = None


def use_by_default(backend: Backend) -> None:
    """Make this the default backend of virtual clusters."""
    global _default
    _default = backend


class VirtualCluster:
    """Slots for worker groups, reserved until ``shutdown``.

    ``bundle_ct_per_node_list`` contains the number of slots to reserve on each node; 0 leaves a node out. Each entry gets the next node
    in rank order that has enough free slots, unless ``node_ranks`` names the nodes. ``backend`` runs the workers; the default is the
    backend that ``init_ray`` has chosen.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        *,
        num_gpus_per_node: int = 8,
        use_gpus: bool = True,
        name: str = "rollcall",
        node_ranks: Sequence[int] | None = None,
        timeout_s: float = 180.0,
        backend: Backend | None = None,
    ) -> None:
        counts = tuple(bundle_ct_per_node_list)
        if not counts or min(counts) < 0 or sum(counts) == 0:
            raise ValueError(
                f"bundle_ct_per_node_list={list(counts)} has no slot; give each node's number of slots, such as [8, 8]"
            )
        if use_gpus and max(counts) > num_gpus_per_node:
            raise ValueError(
                f"bundle_ct_per_node_list={list(counts)} requests {max(counts)} slots on a node with "
                f"num_gpus_per_node={num_gpus_per_node}; request fewer, or raise num_gpus_per_node"
            )
        if node_ranks is not None and (len(node_ranks) != len(counts) or len(set(node_ranks)) != len(counts)):
            raise ValueError(
                f"node_ranks={list(node_ranks)} needs one node for each entry of {list(counts)}, without repetitions"
            )
        self._ask = Ask(
            name=name,
            slots_per_node=counts,
            use_gpus=use_gpus,
            node_ranks=None if node_ranks is None else tuple(node_ranks),
        )
        if (backend := backend or _default) is None:
            raise ClusterError("this process is not connected to a cluster; call init_ray() first")
        self._reservation: Reservation | None = backend.reserve(self._ask, timeout_s=timeout_s)
        self._nodes = {node.node_rank: node for node in self._reservation.nodes}
        self._groups: list[Any] = []  # worker groups

    @property
    def nodes(self) -> list[NodeSeats]:
        """Return the nodes with slots in this cluster, by rank."""
        return list(self._nodes.values())

    def world_size(self) -> int:
        """Return the number of slots."""
        return sum(self._ask.slots_per_node)

    def node_count(self) -> int:
        """Return the number of nodes with slots."""
        return len(self._nodes)

    def node(self, node_rank: int) -> NodeSeats:
        if node_rank not in self._nodes:
            raise ValueError(
                f"node {node_rank} has no slot in this cluster; the nodes with slots are {', '.join(map(str, self._nodes))}"
            )
        return self._nodes[node_rank]

    def check_room(self, seats: Sequence[Seat]) -> None:
        """Refuse seats that do not exist or are taken, because Ray would wait for them forever."""
        holders = {
            (spec.node.node_rank, slot): group.name_prefix
            for group in self._groups
            if group.takes_slots
            for spec in group.specs
            for slot in spec.slots
        }
        for seat in seats:
            size = len(self.node(seat.node_rank).bundles)
            for slot in seat.slots:
                if not 0 <= slot < size:
                    raise ValueError(
                        f"node {seat.node_rank} has slots 0 to {size - 1} in this cluster, but no slot {slot}"
                    )
                if holder := holders.get((seat.node_rank, slot)):
                    raise ClusterError(
                        f"slot {slot} of node {seat.node_rank} is taken by {holder}; shut down that group, or use other slots"
                    )

    def launch(self, group: Any, specs: Sequence[WorkerSpec], recipe: Recipe, *, timeout_s: float) -> Gang:
        if self._reservation is None:
            raise ClusterError("this cluster has been shut down; create a new one")
        gang = Gang(specs, recipe, self._reservation.carrier(recipe))
        try:
            gang.start(timeout_s=timeout_s)
        except BaseException:  # also on KeyboardInterrupt, so that no process is left behind
            gang.stop(timeout_s=STOP_DEADLINE_S)
            raise
        self._groups.append(group)
        return gang

    def forget(self, group: Any) -> None:
        self._groups.remove(group)

    def shutdown(self) -> None:
        """Shut down the groups in this cluster, the last one first, and release the slots even if a group cannot be stopped."""
        reservation, self._reservation = self._reservation, None
        with ExitStack() as ends:
            if reservation is not None:
                ends.callback(reservation.release)
            for group in self._groups:
                ends.callback(group.shutdown)

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()


RayVirtualCluster = VirtualCluster
