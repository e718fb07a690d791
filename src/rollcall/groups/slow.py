"""Calls that take much longer than earlier calls of the same method, reported with the traffic of the nodes' links.

A link that becomes slow does not end a run at once: the sender of new weights, their receivers and a gang in a collective all
wait for it. Their pulses show which workers wait, in which call and for how long. The nodes' sockets show which link is slow
(``links.py``). If they show none, the counters of the nodes' interfaces say how many bytes they move. ``SlowCalls`` is pure:
looks in, words out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollcall.groups.backend import WorkerSpec
from rollcall.groups.links import Links
from rollcall.groups.pulse import Seen
from rollcall.groups.sockets import Flows

LEAST_S, FACTOR = 20.0, 3.0  # a call is slow if it takes this long, and this many times the longest call of its method
LEAST_ON_SLOW_LINK_S = 3.0  # instead of LEAST_S; Ray gives up a node that has not answered for 3 to 5 s
RATE_S = 10.0  # over which a rate is measured
KEPT = 3600  # looks kept for each node
ADVICE = "`rollcall doctor` measures it"
COUNTERS = Path("/proc/net/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes over a node's interfaces since it was booted, without loopback."""

    received: int
    sent: int


def read_traffic(path: Path = COUNTERS) -> Traffic:
    """The traffic of this node."""
    received = sent = 0
    for line in path.read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        if name.strip() != "lo":
            fields = counts.split()
            received += int(fields[0])
            sent += int(fields[8])
    return Traffic(received=received, sent=sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """What a node answers at a look."""

    workers: Mapping[int, Seen]  # by rank
    traffic: Traffic
    flows: Flows = Flows()


class SlowCalls:
    """The caller notes the ``links`` before the calls."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._longest_s: dict[str, float] = {}
        self._tell_at_s: dict[tuple[int, str, int], float] = {}  # by rank, method and number of the call
        self._moved: dict[str, deque[tuple[float, Traffic]]] = {}
        self._fastest: dict[str, float] = {}  # bytes a second, by node

    def note(self, looks: Mapping[str, NodeLook], specs: Mapping[int, WorkerSpec], *, now_s: float) -> str | None:
        """The message if a call has become slow, or has taken twice as long as when it was last reported; or about a link."""
        for node, look in looks.items():
            self._count(node, look.traffic, now_s=now_s)
        workers = {rank: seen for look in looks.values() for rank, seen in look.workers.items() if rank in specs}
        ends = {node for link in self._links.slow(now_s=now_s) for node in link}
        slow = {
            rank: seen
            for rank, seen in workers.items()
            if seen.doing and seen.busy_s > self._allowed_s(seen, on_slow_link=specs[rank].node.node_rank in ends)
        }
        calls = {rank: (rank, seen.doing, seen.num_done) for rank, seen in slow.items()}
        self._tell_at_s = {call: self._tell_at_s.get(call, 0.0) for call in calls.values()}
        for seen in workers.values():
            for method, took_s in (seen.longest_s or {}).items():
                self._longest_s[method] = max(self._longest_s.get(method, 0.0), took_s)
        news = self._links.news(now_s=now_s)
        if not any(seen.busy_s >= self._tell_at_s[calls[rank]] for rank, seen in slow.items()):
            return f"{news}; {ADVICE}" if news else None
        for rank, seen in slow.items():
            self._tell_at_s[calls[rank]] = 2 * seen.busy_s
        return self._words(slow, specs, now_s=now_s)

    def _allowed_s(self, seen: Seen, *, on_slow_link: bool) -> float:
        """The first call of a method makes and compiles what later ones use, so only the watch limits it, except on a slow link."""
        longest_s = self._longest_s.get(seen.doing)
        if longest_s is None:
            return LEAST_S if on_slow_link else float("inf")
        return max(LEAST_ON_SLOW_LINK_S if on_slow_link else LEAST_S, FACTOR * longest_s)

    def _count(self, node: str, traffic: Traffic, *, now_s: float) -> None:
        kept = self._moved.setdefault(node, deque(maxlen=KEPT))
        kept.append((now_s, traffic))
        self._fastest[node] = max(self._fastest.get(node, 0.0), *self._rates(node, over_s=RATE_S, now_s=now_s))

    def _since(self, node: str, *, over_s: float, now_s: float) -> tuple[float, int, int]:
        """Seconds, bytes received and bytes sent since the latest look that is at least ``over_s`` ago."""
        kept = self._moved[node]
        then_s, then = next((entry for entry in reversed(kept) if now_s - entry[0] >= over_s), kept[0])
        last_s, last = kept[-1]
        return last_s - then_s, last.received - then.received, last.sent - then.sent

    def _rates(self, node: str, *, over_s: float, now_s: float) -> tuple[float, float]:
        seconds, received, sent = self._since(node, over_s=over_s, now_s=now_s)
        return (received / seconds, sent / seconds) if seconds else (0.0, 0.0)

    def _words(self, slow: Mapping[int, Seen], specs: Mapping[int, WorkerSpec], *, now_s: float) -> str:
        calls = "; ".join(
            f"{specs[rank].where} has been in {seen.doing} for {seen.busy_s:.0f} s ({self._before(seen.doing)})"
            for rank, seen in sorted(slow.items())
        )
        nodes = {specs[rank].node.node_id: specs[rank].node.node_rank for rank in slow}
        if named := self._links.words(set(nodes.values()), now_s=now_s):
            return f"the run waits: {calls}. Meanwhile {named}; {ADVICE}"
        links = "; ".join(
            self._link(
                node,
                rank,
                over_s=max(seen.busy_s for at, seen in slow.items() if specs[at].node.node_id == node),
                now_s=now_s,
            )
            for node, rank in sorted(nodes.items(), key=lambda entry: entry[1])
            if node in self._moved
        )
        between = " and ".join(str(rank) for rank in sorted(nodes.values()))
        of = f"between nodes {between}" if len(nodes) > 1 else f"of node {between}"
        return f"the run waits: {calls}. Meanwhile {links}; if that is little, the link {of} may have become slow: {ADVICE}"

    def _before(self, method: str) -> str:
        longest_s = self._longest_s.get(method)
        return "the first such call" if longest_s is None else f"{longest_s:.1f} s at most before"

    def _link(self, node: str, rank: int, *, over_s: float, now_s: float) -> str:
        _, received, sent = self._since(node, over_s=over_s, now_s=now_s)
        received_s, sent_s = self._rates(node, over_s=RATE_S, now_s=now_s)
        return (
            f"node {rank} received {_mb(received)} MB and sent {_mb(sent)} MB, now {_mb(received_s)} and {_mb(sent_s)} MB/s "
            f"({_mb(self._fastest[node])} MB/s at its fastest in this run)"
        )


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}"
