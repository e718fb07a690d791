"""What of a cluster is open to the network, and the firewall rule that closes it to all but its nodes. Pure.

Ray (2.60) listens on every interface of a node, whatever address it is given, and ends its head or a raylet on one malformed
call (``RaySyncer/StartSync`` without metadata) before it asks for the token. With TLS such a call does not get through;
without it a firewall must keep it out. Nothing here sends that call: a connection is opened and closed, no more.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from rollcall.doctor.checks import Finding, NodeFacts, find
from rollcall.nodes.address import FIRST_PORT

LAST_PORT = 65535


def firewall_rule(nodes: Sequence[NodeFacts], *, head_port: int) -> str:
    """For each node, as root: allow new connections to the ports of Ray and the run only from these nodes."""
    ports = f"{FIRST_PORT}-{LAST_PORT}"
    if not FIRST_PORT <= head_port <= LAST_PORT:
        ports = f"{{ {head_port}, {ports} }}"
    kinds = {4: "ip", 6: "ip6"}
    rules = ["add table inet rollcall", "add chain inet rollcall input { type filter hook input priority 0; }"]
    for version, name in kinds.items():
        addresses = sorted({node.address for node in nodes if ipaddress.ip_address(node.address).version == version})
        others = f"{name} saddr != {{ {', '.join(addresses)} }}" if addresses else f"meta nfproto ipv{version}"
        rules.append(f'add rule inet rollcall input iif != "lo" {others} tcp dport {ports} ct state new drop')
    return "nft '" + "; ".join(rules) + "'"


def judge_exposure(
    nodes: Sequence[NodeFacts], *, tls: bool, open_at: Mapping[int, Sequence[str]], head_port: int
) -> Iterator[Finding]:
    """``open_at``: by rank, addresses beside the cluster's own at which the node's Ray takes connections."""
    exposed = [f"{address} (rank {node.rank} {node.host})" for node in nodes for address in open_at.get(node.rank, ())]
    if tls or not exposed:
        return
    shown = ", ".join(exposed[:4]) + (f" and {len(exposed) - 4} more" if len(exposed) > 4 else "")
    yield find(
        None, "warns", f"Ray also listens outside the cluster's own network, at {shown}",
        why="Ray 2.60 cannot be bound to one interface, and one malformed call from anyone who reaches its ports ends "
        "the head or a node, before a token is asked for; the run then waits until that node is started again",
        fix=f"start the nodes with --tls; or, on each node as root: {firewall_rule(nodes, head_port=head_port)}",
    )  # fmt: skip
