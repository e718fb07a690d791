"""Nodes of a cluster as Ray and the node's own record describe them."""

from __future__ import annotations

from rollcall.nodes.head import NodeInfo
from rollcall.nodes.state import NodeRecord


def make_node(rank: int | None, *, slots: int = 8, alive: bool = True, started_ms: int = 1, host: str = "") -> NodeInfo:
    return NodeInfo(
        rank=rank,
        host=host or f"node{rank}",
        address=f"10.0.0.{rank or 0}",
        slots=slots,
        accelerator="gpu",
        memory_gib=100.0,
        alive=alive,
        is_head=rank == 0,
        cluster="default",
        cluster_id="id-1",
        num_nodes=4,
        node_id=f"{rank}-{started_ms}",
        started_ms=started_ms,
        temp_dir="/tmp/x",
        ports={},
    )


def make_record(*, num_nodes: int = 4) -> NodeRecord:
    return NodeRecord(
        cluster="default",
        cluster_id="id-1",
        rank=0,
        num_nodes=num_nodes,
        node_ip="10.0.0.0",
        slots=8,
        accelerator="gpu",
        head_address="10.0.0.0:6379",
        dashboard_url=None,
        temp_dir="/tmp/x",
        rendezvous="/shared",
        processes=(),
    )
