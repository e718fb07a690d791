"""Calls that take much longer than earlier calls of the same method, reported with the slow links of their nodes.

A link that becomes slow does not end a run at once: the sender of new weights, their receivers and a gang in a collective all
wait for it. Their pulses show which workers wait, in which call and for how long. The nodes' sockets show which link is slow
(``links.py``). ``SlowCalls`` is pure: looks in, words out.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollcall.groups.backend import WorkerSpec
from rollcall.groups.links import Links
from rollcall.groups.pulse import Seen

LEAST_S, FACTOR = 20.0, 3.0  # a call is slow if it takes this long, and this many times the longest call of its method
LEAST_ON_SLOW_LINK_S = 3.0  # instead of LEAST_S; Ray gives up a node that has not answered for 3 to 5 s
ADVICE = "`rollcall doctor` measures the links"


class SlowCalls:
    """The caller notes the ``links`` before the calls."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._longest_s: dict[tuple[str, str], float] = {}  # by kind of worker and method
        self._tell_at_s: dict[tuple[int, str, int], float] = {}  # by rank, method and number of the call

    def note(self, workers: Mapping[int, Seen], specs: Mapping[int, WorkerSpec], *, now_s: float) -> str | None:
        """The message if a call has become slow, or has taken twice as long as when it was last reported; or about a link."""
        ends = {node for link in self._links.slow(now_s=now_s) for node in link}
        slow = {
            rank: seen
            for rank, seen in workers.items()
            if seen.doing and seen.busy_s > self._allowed_s(seen, specs[rank], ends=ends)
        }
        calls = {rank: (rank, seen.doing, seen.num_done) for rank, seen in slow.items()}
        self._tell_at_s = {call: self._tell_at_s.get(call, 0.0) for call in calls.values()}
        for rank, seen in workers.items():
            for method, took_s in (seen.longest_s or {}).items():
                call = specs[rank].kind, method
                self._longest_s[call] = max(self._longest_s.get(call, 0.0), took_s)
        news = self._links.news(now_s=now_s)
        if not any(seen.busy_s >= self._tell_at_s[calls[rank]] for rank, seen in slow.items()):
            return f"{news}; {ADVICE}" if news else None
        for rank, seen in slow.items():
            self._tell_at_s[calls[rank]] = 2 * seen.busy_s
        return self._words(slow, specs, now_s=now_s)

    def _allowed_s(self, seen: Seen, spec: WorkerSpec, *, ends: set[int]) -> float:
        """The first call of a method makes and compiles what later ones use, so only the watch limits it, except on a slow link."""
        longest_s, on_slow_link = self._longest_s.get((spec.kind, seen.doing)), spec.node.node_rank in ends
        if longest_s is None:
            return LEAST_S if on_slow_link else float("inf")
        return max(LEAST_ON_SLOW_LINK_S if on_slow_link else LEAST_S, FACTOR * longest_s)

    def _words(self, slow: Mapping[int, Seen], specs: Mapping[int, WorkerSpec], *, now_s: float) -> str:
        calls = "; ".join(
            f"{specs[rank].where} has been in {seen.doing} for {seen.busy_s:.0f} s ({self._before(specs[rank].kind, seen.doing)})"
            for rank, seen in sorted(slow.items())
        )
        named = self._links.words({specs[rank].node.node_rank for rank in slow}, now_s=now_s)
        return f"the run waits: {calls}. {f'Meanwhile {named}' if named else 'No link is known to be slow'}; {ADVICE}"

    def _before(self, kind: str, method: str) -> str:
        longest_s = self._longest_s.get((kind, method))
        return "the first such call" if longest_s is None else f"{longest_s:.1f} s at most before"
