"""Lists the nodes that have joined, and waits for the given number of accelerators. All information comes from the head."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollcall.base.errors import ClusterError
from rollcall.base.wait import Wait
from rollcall.base.words import plural, ranges
from rollcall.nodes.address import split_address
from rollcall.nodes.cluster import Cluster
from rollcall.nodes.head import HeadUnreachable, NodeInfo

ASK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The nodes of a cluster at one moment."""

    cluster: str
    title: str
    cluster_id: str | None  # `None` if `rollcall node` did not start the cluster
    has_token: bool
    head_address: str
    dashboard_url: str | None
    num_nodes: int
    nodes: tuple[NodeInfo, ...]  # one for each rank that ever joined: the living node, or else the node that died last

    @property
    def alive(self) -> list[NodeInfo]:
        return [node for node in self.nodes if node.alive]

    @property
    def num_slots(self) -> int:
        return sum(node.slots for node in self.alive)

    @property
    def missing(self) -> list[int]:
        """The ranks without a living node."""
        return sorted(set(range(self.num_nodes)) - {node.rank for node in self.alive if node.rank is not None})


def list_nodes(cluster: Cluster) -> Roster:
    """Ask the head for its nodes."""
    answer = cluster.ask()
    newest: dict[object, NodeInfo] = {}
    for node in sorted(answer.nodes, key=lambda node: (node.alive, node.started_ms)):
        newest[node.node_id if node.rank is None else node.rank] = node
    return Roster(
        cluster=cluster.name,
        title=cluster.title,
        cluster_id=answer.cluster_id,
        has_token=not answer.is_open,
        head_address=cluster.head_address,
        dashboard_url=cluster.dashboard_url(answer),
        num_nodes=cluster.num_nodes(answer),
        nodes=tuple(sorted(newest.values(), key=lambda node: (node.rank is None, node.rank or 0, node.node_id))),
    )


def wait_for_slots(cluster: Cluster, *, num_slots: int, timeout_s: float) -> Roster:
    """Return once exactly ``num_slots`` have joined. Raise at once if there are more, or after ``timeout_s`` if there are fewer."""
    wait = Wait(timeout_s, first_s=0, every_s=4)
    cluster.wait_until_known(wait)
    while True:
        try:
            found = list_nodes(cluster)
            state = describe(found, num_slots=num_slots)
        except HeadUnreachable as error:
            found, state = None, str(error)
        if found is not None and found.num_slots == num_slots:
            return found
        if found is not None and found.num_slots > num_slots:
            raise ClusterError(
                f"{found.num_slots} accelerators have joined, but {num_slots} were expected: {who(found.alive)}; run "
                f"`{cluster.leave_command}` on the surplus nodes, or ask for {found.num_slots}"
            )
        if not wait.again(state, after_s=ASK_EVERY_S):
            raise ClusterError(f"after {timeout_s:.0f} s (--timeout): {state}{_advice(cluster, found)}")


def describe(found: Roster, *, num_slots: int) -> str:
    """Return one line with the number of slots that have joined, their nodes, and the missing ranks."""
    parts = [f"{found.num_slots} of {num_slots} accelerators have joined: {who(found.alive) or 'none'}"]
    if found.missing:
        parts.append(f"missing: {missing_ranks(found.missing, {node.rank: node for node in found.nodes})}")
    return "; ".join(parts)


def missing_ranks(ranks: Sequence[int], lost: Mapping[int | None, NodeInfo]) -> str:
    """List lost ranks with their address and time of loss, and ranks that never joined as ranges, so that 100 ranks fit on a line."""
    parts = [
        f"{rank} ({lost[rank].address}, lost at {time.strftime('%H:%M:%S', time.localtime(lost[rank].ended_ms / 1000))})"
        for rank in ranks
        if rank in lost
    ]
    parts += filter(None, ranges(rank for rank in ranks if rank not in lost).split(","))
    return f"{plural('rank', len(ranks))} {', '.join(parts)}"


def start_there(cluster: Cluster, ranks: Sequence[int]) -> str:
    """Return a hint with the command that starts these ranks."""
    if len(ranks) == 1:
        return f"on its host, run `{cluster.join_command(ranks[0])}`"
    return f"on each of their hosts, run `{cluster.join_command('R')}`"


def who(nodes: Sequence[NodeInfo]) -> str:
    return ", ".join(f"rank {'?' if n.rank is None else n.rank} {n.host} ({n.address}) {n.slots}" for n in nodes)


def _advice(cluster: Cluster, found: Roster | None) -> str:
    if found is None:
        return f"; run `rollcall status` on {split_address(cluster.head_address)[0]} to see whether the cluster is up"
    if found.missing:
        return f"; {start_there(cluster, found.missing)}"
    fewer = f"ask for {found.num_slots}, or " if found.num_slots else ""
    return f"; all {found.num_nodes} nodes have joined, so {fewer}give them more slots (`{cluster.more_slots('N')}`)"
