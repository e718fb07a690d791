"""Which link between two nodes is slow, from what their sockets say at each look. Pure: flows in, words out.

A link is one direction of a pair of nodes. It is judged only while bytes wait for it. It is slow if it carries less than a
tenth of what the fastest link of the run has carried, divided by the number of links that share its node (a node that sends
to eight others at once gives each an eighth). Measurements are kept for ``RECENT_S`` after a node is gone: its sockets close
when it leaves, and the message about its loss comes later. Nodes are known by rank, so a node that comes back is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rollcall.groups.sockets import Flow, Flows

RECENT_S = 20.0  # a busy time is reported for this long after its end
RATE_S = 10.0  # over which a rate is measured
SLOW = 0.1  # of the fastest
TOLD_S = 10.0  # a link is reported once it has been slow for this long in all


class Link(NamedTuple):
    """By ranks of nodes."""

    sender: int
    receiver: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A link over the last time in which bytes waited for it."""

    carried: int
    seconds: float
    waiting: int  # at its end

    @property
    def rate(self) -> float:
        return self.carried / self.seconds


class Links:
    def __init__(self) -> None:
        self._owners: dict[str, set[int]] = {}  # nodes with a socket at this address
        self._fastest: dict[Link, float] = {}  # bytes a second
        self._busy: dict[Link, deque[tuple[float, Flow]]] = {}
        self._ended: set[Link] = set()  # for which nothing waited at the last look
        self._slow_s: dict[Link, float] = {}  # in all
        self._tell_at_s: dict[Link, float] = {}

    @property
    def addresses(self) -> frozenset[str]:
        """The addresses of all nodes. One that two nodes have, such as that of a container bridge, is left out."""
        return frozenset(address for address, nodes in self._owners.items() if len(nodes) == 1)

    def note(self, looks: Mapping[int, Flows], *, now_s: float) -> None:
        """Take in what the nodes have answered."""
        for node, flows in looks.items():
            for address in flows.addresses:
                self._owners.setdefault(address, set()).add(node)
            self._note(node, self._by_node(flows), now_s=now_s)
        for link in self.slow(now_s=now_s):
            last_s, flow = self._busy[link][-1]
            if last_s == now_s:
                self._slow_s[link] = self._slow_s.get(link, 0.0) + flow.busy_s

    def _by_node(self, flows: Flows) -> dict[int, list[Flow]]:
        found: dict[int, list[Flow]] = {}
        for address, flow in flows.by_peer.items():
            if len(owners := self._owners.get(address, set())) == 1:
                found.setdefault(next(iter(owners)), []).append(flow)
        return found

    def _note(self, node: int, flows: Mapping[int, list[Flow]], *, now_s: float) -> None:
        for peer in set(flows) - {node}:
            link = Link(sender=node, receiver=peer)
            busy = [flow for flow in flows[peer] if flow.waiting]
            self._fastest[link] = max(self._fastest.get(link, 0.0), *(flow.fastest for flow in flows[peer]))
            if not busy:
                self._ended.add(link)
                continue
            kept = self._busy.setdefault(link, deque())
            if link in self._ended:
                self._ended.discard(link)
                kept.clear()
            kept.append((now_s, max(busy, key=lambda flow: flow.waiting)))
            while now_s - kept[0][0] > RATE_S:
                kept.popleft()
        self._ended |= {link for link in self._busy if link.sender == node and link.receiver not in flows}

    def _recent(self, *, now_s: float) -> dict[Link, Busy]:
        return {
            link: Busy(
                carried=sum(flow.carried for _, flow in kept),
                seconds=sum(flow.busy_s for _, flow in kept),
                waiting=kept[-1][1].waiting,
            )
            for link, kept in self._busy.items()
            if kept and now_s - kept[-1][0] <= RECENT_S
        }

    def slow(self, *, now_s: float) -> set[Link]:
        """Links that carry little or nothing of what waits for them."""
        recent, best = self._recent(now_s=now_s), max(self._fastest.values(), default=0.0)
        return {link for link, busy in recent.items() if busy.rate * _sharing(link, recent) < SLOW * best}

    def words(self, nodes: Collection[int], *, now_s: float, if_slow: bool = True) -> str:
        """About the slow links to and from these nodes; without ``if_slow``, about all for which bytes wait."""
        links = self.slow(now_s=now_s) if if_slow else self._recent(now_s=now_s)
        return self._told_all([link for link in links if not set(link).isdisjoint(nodes)], now_s=now_s)

    def news(self, *, now_s: float) -> str:
        """About links that have been slow for ``TOLD_S`` in all, also in many short transfers, or for twice as long as when
        they were last reported; empty: there are none."""
        slow = self.slow(now_s=now_s)
        due = [
            link
            for link, slow_s in self._slow_s.items()
            if slow_s >= self._tell_at_s.get(link, TOLD_S) and link in slow
        ]
        self._tell_at_s |= {link: 2 * self._slow_s[link] for link in due}
        return self._told_all(due, now_s=now_s)

    def _told_all(self, links: Collection[Link], *, now_s: float) -> str:
        recent, slow = self._recent(now_s=now_s), self.slow(now_s=now_s)
        return "; ".join(self._told(link, recent[link], is_slow=link in slow) for link in sorted(links))

    def _told(self, link: Link, busy: Busy, *, is_slow: bool) -> str:
        """Both nodes are named: the way back may also be why bytes are confirmed late."""
        low, high = sorted(link)
        judged = f"the link between nodes {low} and {high} is slow: " if is_slow and busy.carried else ""
        went = f"{size(busy.rate)}/s" if busy.carried else "nothing"
        return (
            f"{judged}{went} went from node {link.sender} to node {link.receiver} over {busy.seconds:.0f} s, with "
            f"{size(busy.waiting)} still waiting ({size(self._fastest[link])}/s at its fastest in this run{self._others(link)})"
        )

    def _others(self, link: Link) -> str:
        best = max(self._fastest, key=lambda other: self._fastest[other])
        if best == link or self._fastest[best] < 2 * self._fastest[link]:
            return ""
        return f"; {size(self._fastest[best])}/s from node {best.sender} to node {best.receiver}"


def _sharing(link: Link, busy: Collection[Link]) -> int:
    """How many links share its sender, or its receiver."""
    return max(
        sum(other.sender == link.sender for other in busy), sum(other.receiver == link.receiver for other in busy)
    )


def size(num_bytes: float) -> str:
    """
    >>> size(18_240), size(95e6), size(640)
    ('18 kB', '95 MB', '640 B')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            amount = num_bytes / factor
            return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
    return f"{num_bytes:.0f} B"
