"""Slot numbers and their syntax: ``all``, a slot, an inclusive range ``a-b``, or a comma-separated list of these.
Slots are numbered node by node.

Each part may specify the process ranks over which its slots are spread: ``0-7:0-3`` is four processes with two slots each.
Without ranks, a part has one process per slot.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from rollcall.base.errors import PlacementError
from rollcall.base.words import counted, plural, ranges
from rollcall.config import SLOT_SYNTAX, ClusterSection

WHERE = "cluster.component_placement"
_PART = re.compile(r"(?:(all)|([0-9]+)(?:-([0-9]+))?)(?::([0-9]+)(?:-([0-9]+))?)?")


class Nodes:
    """The number of slots on each node, and the number of its first slot."""

    def __init__(self, cluster: ClusterSection) -> None:
        self.sizes = tuple(cluster.slots_per_node)
        self.starts = (0, *accumulate(self.sizes[:-1]))
        self.node_of = tuple(node for node, size in enumerate(self.sizes) for _ in range(size))  # by slot
        self.num_slots = len(self.node_of)

    def sum(self) -> str:
        """Describe the total: '4 nodes x 8 = 32 slots', or '8 + 4 = 12 slots on 2 nodes'."""
        if len(set(self.sizes)) == 1:
            return f"{counted(len(self.sizes), 'node')} x {self.sizes[0]} = {self.num_slots} {plural('slot', self.num_slots)}"
        shown = " + ".join(
            f"{count} x {size}" if count > 1 else str(size)
            for size, run in groupby(self.sizes)
            for count in (len(list(run)),)
        )
        return f"{shown} = {self.num_slots} slots on {len(self.sizes)} nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    text: str
    slots: range
    ranks: range | None  # of its processes

    @property
    def num_processes(self) -> int:
        return len(self.slots) if self.ranks is None else self.ranks.stop - self.ranks.start


def read_slots(text: str, *, nodes: Nodes, key: str) -> list[tuple[int, ...]]:
    """Return the slots of each process, in slot order."""
    given = f"{WHERE}: {key}: {text}"
    parts = sorted(
        (_parse_part(part.strip(), nodes=nodes, given=given) for part in text.split(",")),
        key=lambda part: (part.slots.start, part.slots.stop),
    )
    for before, after in pairwise(parts):
        if (slot := after.slots.start) in before.slots:
            raise PlacementError(f"{given} names slot {slot} twice, in {before.text} and in {after.text}; name it once")
    spans: list[tuple[int, ...]] = []
    for part in parts:
        _check_ranks(part, num_before=len(spans), given=given)
        width = len(part.slots) // part.num_processes
        for start in part.slots[::width]:
            end = start + width - 1
            if nodes.node_of[start] != nodes.node_of[end]:
                raise PlacementError(_crossing(start, end, rank=len(spans), nodes=nodes, given=given))
            spans.append(tuple(range(start, end + 1)))
    return spans


def _parse_part(text: str, *, nodes: Nodes, given: str) -> _Part:
    match = _PART.fullmatch(text)
    if match is None:
        what = f"{text!r} is not a set of slots" if text else "one part is empty"
        raise PlacementError(f"{given}: {what}; {SLOT_SYNTAX}")
    everything, low, high, first_rank, last_rank = match.groups()
    first, last = (0, nodes.num_slots - 1) if everything else (int(low), int(high if high is not None else low))
    if first > last:
        raise PlacementError(f"{given}: {first}-{last} runs backwards; write {last}-{first}")
    if last >= nodes.num_slots:
        raise PlacementError(
            f"{given} asks for slot {last}, but the cluster has {nodes.sum()}, numbered 0 to {nodes.num_slots - 1}; "
            f"use slots below {nodes.num_slots}, or make the cluster larger (cluster.num_nodes)"
        )
    ranks = None
    if first_rank is not None:
        low, high = int(first_rank), int(last_rank if last_rank is not None else first_rank)
        if low > high:
            raise PlacementError(f"{given}: process ranks {low}-{high} run backwards; write {high}-{low}")
        ranks = range(low, high + 1)
    return _Part(text=text, slots=range(first, last + 1), ranks=ranks)


def _check_ranks(part: _Part, *, num_before: int, given: str) -> None:
    """Check that the ranks are in slot order and that each process gets the same number of slots."""
    if part.ranks is None:
        return
    slots, processes = len(part.slots), part.num_processes
    if slots % processes:
        sizes = [size for size in range(1, slots + 1) if slots % size == 0]
        near = max(size for size in sizes if size < processes)
        raise PlacementError(
            f"{given}: {part.text} spreads {slots} {plural('slot', slots)} over {processes} processes, but {slots} = {processes} x "
            f"{slots // processes} + {slots % processes}; use {either(sizes)} {plural('process', sizes[-1])}, such as "
            f"{ranges(part.slots)}:{ranges(range(num_before, num_before + near))}"
        )
    if part.ranks.start != num_before:
        raise PlacementError(
            f"{given}: {part.text} starts at process rank {part.ranks.start}, but lower slots have "
            f"{num_before} {plural('process', num_before)} of the role already, so its ranks start at {num_before}; write "
            f"{ranges(part.slots)}:{ranges(range(num_before, num_before + processes))}"
        )


def _crossing(start: int, end: int, *, rank: int, nodes: Nodes, given: str) -> str:
    where = " and ".join(
        f"node {node} (slots {ranges(range(nodes.starts[node], nodes.starts[node] + nodes.sizes[node]))})"
        for node in (nodes.node_of[start], nodes.node_of[end])
    )
    return (
        f"{given}: process {rank} would have slots {start}-{end}, which are on {where}, but a process runs on one node; use a "
        f"number of slots per process that divides each node's share, or a part for each node"
    )


def either(sizes: Sequence[int]) -> str:
    shown = [str(size) for size in sizes]
    if len(shown) > 8:
        shown = [*shown[:6], f"... {shown[-1]}"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
