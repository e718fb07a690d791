"""Which role's processes sit on which slots: ``cluster.component_placement`` read into a ``Plan``. Pure: no Ray, no torch.

Slots are numbered node by node. A value is ``all``, a slot, a range ``a-b`` (both ends in), or a list of these joined by
commas; each part may say over which process ranks its slots are spread: ``0-7:0-3`` is four processes of two slots each.
Without ranks a part has one process per slot. Ranks of a role follow its slots and count from 0.

Roles that share a slot share its process. So two processes of two roles have either the same slots, and are then one
operating-system process that holds both roles, or none in common. With ``rollout: all, actor: 0-3`` on eight slots, slots
0-3 hold one process each with both roles (rollout ranks 0-3 are actor ranks 0-3) and slots 4-7 a rollout process each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, groupby

from rollcall.config import SLOT_SYNTAX, ClusterSection, Config
from rollcall.config.errors import nearest
from rollcall.errors import PlacementError

WHERE = "cluster.component_placement"
_PART = re.compile(r"(?:(all)|([0-9]+)(?:-([0-9]+))?)(?::([0-9]+)(?:-([0-9]+))?)?")


class Role(StrEnum):
    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    ROLLOUT = "rollout"
    INFERENCE = "inference"
    REWARD = "reward"


HOLDERS = (Role.ROLLOUT, Role.INFERENCE)  # they read the policy without training it

# A run that needs one of these and does not place it gets it in the actor's processes.
WITH_THE_ACTOR = (Role.REFERENCE, Role.REWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    index: int  # in the cluster
    node_rank: int
    local: int  # on its node
    roles: tuple[Role, ...]  # at least one


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleProcess:
    """One process as one of its roles sees it."""

    rank: int  # of the role
    slots: tuple[int, ...]  # global, consecutive, all on one node
    node_rank: int
    local_rank: int  # among the role's processes on the node


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedProcess:
    """One operating-system process and its rank in each role it holds."""

    slots: tuple[int, ...]
    node_rank: int
    ranks: Mapping[Role, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleGroup:
    """All processes that hold exactly these roles, in slot order."""

    roles: tuple[Role, ...]
    processes: tuple[SharedProcess, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A role's slots as data x tensor; neighbours in slot order share a tensor group."""

    data: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run asks of its placement."""

    roles: frozenset[Role]
    tensor_parallel: Mapping[Role, int] = field(default_factory=dict)  # slots per tensor group; else a process's slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    slots_per_node: tuple[int, ...]
    slots: tuple[Slot, ...]  # by global slot
    processes: Mapping[Role, tuple[RoleProcess, ...]]  # by rank
    groups: tuple[RoleGroup, ...]  # every process of the cluster is in one of them
    meshes: Mapping[Role, Mesh]
    notes: tuple[str, ...]  # what was decided for the user

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(self.processes)

    @property
    def num_nodes(self) -> int:
        return len(self.slots_per_node)

    def world_size(self, role: Role | str) -> int:
        """Processes of the role; 0 when it has none."""
        return len(self.processes.get(Role(role), ()))

    def node_slots(self, node_rank: int) -> tuple[Slot, ...]:
        start = sum(self.slots_per_node[:node_rank])
        return self.slots[start : start + self.slots_per_node[node_rank]]

    def role_slots(self, role: Role) -> tuple[int, ...]:
        return tuple(slot for process in self.processes[role] for slot in process.slots)


def needs_of(config: Config) -> Needs:
    """The roles a run cannot do without."""
    roles = {Role.ACTOR, Role.ROLLOUT}
    if config.algorithm.name == "ppo":
        roles.add(Role.CRITIC)
    if config.needs_reference:
        roles.add(Role.REFERENCE)
    if any(reward.type == "model" for reward in config.reward):
        roles.add(Role.REWARD)
    sizes = {Role.ACTOR: config.actor.tensor_parallel_size, Role.CRITIC: config.critic.tensor_parallel_size}
    return Needs(
        roles=frozenset(roles),
        tensor_parallel={role: size for role, size in sizes.items() if role in roles and size > 1},
    )


def plan_placement(cluster: ClusterSection, *, needs: Needs | None = None) -> Plan:
    """The plan, or a PlacementError. Without ``needs``, the roles that are placed are the ones needed."""
    layout = _Layout.of(cluster)
    placed: dict[Role, list[_Span]] = {}
    for key, value in cluster.component_placement.items():
        roles = _roles_of(key)
        spans = _spans_of(str(value), layout=layout, key=key)
        for role in roles:
            if role in placed:
                raise PlacementError(
                    f"{WHERE} places {role} twice (the second time in {key!r}); write its slots once, as a list such as "
                    f"{role}: 0-3,8"
                )
            placed[role] = spans
    notes: list[str] = []
    if needs is not None:
        placed = _meet_needs(placed, needs, notes)
    ordered = {role: placed[role] for role in Role if role in placed}
    _check_all_used(ordered, layout, notes)
    processes = {role: _number(spans) for role, spans in ordered.items()}
    _check_gangs(processes)
    shared = _share(processes, layout)
    sizes = needs.tensor_parallel if needs is not None else {}
    meshes = {role: _mesh_of(role, spans, sizes.get(role), notes) for role, spans in processes.items()}
    return Plan(
        slots_per_node=layout.sizes,
        slots=tuple(
            Slot(index=slot, node_rank=process.node_rank, local=slot - layout.starts[process.node_rank], roles=roles)
            for process in shared
            for roles in (tuple(process.ranks),)
            for slot in process.slots
        ),
        processes=processes,
        groups=_groups_of(shared),
        meshes=meshes,
        notes=tuple(notes),
    )


def _check_gangs(processes: Mapping[Role, tuple[RoleProcess, ...]]) -> None:
    """A process trains in one gang: actor and critic have all their processes in common, or none."""
    actor, critic = ({process.slots for process in processes.get(role, ())} for role in (Role.ACTOR, Role.CRITIC))
    shared = actor & critic
    if shared and actor != critic:
        raise PlacementError(
            f"{WHERE} gives actor {len(actor)} and critic {len(critic)} processes, {len(shared)} of them the same; give both the "
            "same slots, or none in common"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    node_of: tuple[int, ...]  # by slot

    @classmethod
    def of(cls, cluster: ClusterSection) -> _Layout:
        sizes = tuple(cluster.slots_per_node)
        node_of = tuple(node for node, size in enumerate(sizes) for _ in range(size))
        return cls(sizes=sizes, starts=(0, *accumulate(sizes[:-1])), node_of=node_of)

    @property
    def num_slots(self) -> int:
        return len(self.node_of)

    def sum(self) -> str:
        """'4 nodes x 8 = 32 slots', or '8 + 4 = 12 slots on 2 nodes'."""
        if len(set(self.sizes)) == 1:
            nodes = "1 node" if len(self.sizes) == 1 else f"{len(self.sizes)} nodes"
            return f"{nodes} x {self.sizes[0]} = {self.num_slots} {_plural('slot', self.num_slots)}"
        shown = " + ".join(
            f"{count} x {size}" if count > 1 else str(size)
            for size, run in groupby(self.sizes)
            for count in (len(list(run)),)
        )
        return f"{shown} = {self.num_slots} slots on {len(self.sizes)} nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The slots of one process."""

    slots: tuple[int, ...]
    node_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    text: str
    first: int
    last: int
    ranks: tuple[int, int] | None  # first and last

    @property
    def num_slots(self) -> int:
        return self.last - self.first + 1

    @property
    def num_processes(self) -> int:
        return self.num_slots if self.ranks is None else self.ranks[1] - self.ranks[0] + 1

    @property
    def slots(self) -> str:
        return slot_text(range(self.first, self.last + 1))


def _roles_of(key: str) -> list[Role]:
    names = [name.strip() for name in key.split(",")]
    for name in names:
        if name not in list(Role):
            near = nearest(name, [role.value for role in Role]) if name else None
            hint = f"did you mean {near}? " if near else ""
            raise PlacementError(f"{WHERE}: {name!r} in {key!r} is not a role; {hint}the roles are {', '.join(Role)}")
    if len(set(names)) < len(names):
        raise PlacementError(f"{WHERE}: {key!r} names a role twice; write {','.join(dict.fromkeys(names))}")
    return [Role(name) for name in names]


def _spans_of(text: str, *, layout: _Layout, key: str) -> list[_Span]:
    """One entry per process, in slot order."""
    given = f"{WHERE}: {key}: {text}"
    parts = sorted(
        (_parse_part(part.strip(), layout=layout, given=given) for part in text.split(",")),
        key=lambda part: (part.first, part.last),
    )
    for before, after in zip(parts, parts[1:], strict=False):
        if after.first <= before.last:
            raise PlacementError(
                f"{given} has slot {after.first} twice, in {before.text} and in {after.text}; name it once"
            )
    spans: list[_Span] = []
    for part in parts:
        _check_ranks(part, num_before=len(spans), given=given)
        width = part.num_slots // part.num_processes
        for start in range(part.first, part.last + 1, width):
            end = start + width - 1
            if layout.node_of[start] != layout.node_of[end]:
                raise PlacementError(_crossing(start, end, rank=len(spans), layout=layout, given=given))
            spans.append(_Span(slots=tuple(range(start, end + 1)), node_rank=layout.node_of[start]))
    return spans


def _parse_part(text: str, *, layout: _Layout, given: str) -> _Part:
    match = _PART.fullmatch(text)
    if match is None:
        what = f"{text!r} is not a set of slots" if text else "there is an empty part"
        raise PlacementError(f"{given}: {what}; {SLOT_SYNTAX}")
    everything, low, high, first_rank, last_rank = match.groups()
    first, last = (0, layout.num_slots - 1) if everything else (int(low), int(high if high is not None else low))
    if first > last:
        raise PlacementError(f"{given}: {first}-{last} runs backwards; write {last}-{first}")
    if last >= layout.num_slots:
        raise PlacementError(
            f"{given} asks for slot {last}, but {layout.sum()}, numbered 0 to {layout.num_slots - 1}; "
            f"stay below {layout.num_slots}, or make the cluster larger (cluster.num_nodes)"
        )
    ranks = None
    if first_rank is not None:
        ranks = (int(first_rank), int(last_rank if last_rank is not None else first_rank))
        if ranks[0] > ranks[1]:
            raise PlacementError(
                f"{given}: process ranks {ranks[0]}-{ranks[1]} run backwards; write {ranks[1]}-{ranks[0]}"
            )
    return _Part(text=text, first=first, last=last, ranks=ranks)


def _check_ranks(part: _Part, *, num_before: int, given: str) -> None:
    """Ranks given by the user follow the slots, and the slots can be dealt out evenly."""
    if part.ranks is None:
        return
    slots, processes = part.num_slots, part.num_processes
    if slots % processes:
        sizes = [size for size in range(1, slots + 1) if slots % size == 0]
        near = max(size for size in sizes if size < processes) if processes < slots else slots
        wide = f"{slots} = {processes} x {slots // processes} + {slots % processes}"
        many = f"{processes} processes cannot each have a slot of {slots}"
        raise PlacementError(
            f"{given}: {part.text} spreads {slots} {_plural('slot', slots)} over {processes} processes, and "
            f"{many if processes > slots else wide}; use {_either(sizes)} {_plural('process', sizes[-1])}, such as "
            f"{part.slots}:{_range_text(num_before, num_before + near - 1)}"
        )
    if part.ranks[0] != num_before:
        raise PlacementError(
            f"{given}: {part.text} starts at process rank {part.ranks[0]}, but {num_before} "
            f"{_plural('process', num_before)} of the role sit on lower slots, so its ranks start at {num_before}; write "
            f"{part.slots}:{_range_text(num_before, num_before + processes - 1)}"
        )


def _crossing(start: int, end: int, *, rank: int, layout: _Layout, given: str) -> str:
    nodes = [layout.node_of[start], layout.node_of[end]]
    where = " and ".join(
        f"node {node} (slots {slot_text(range(layout.starts[node], layout.starts[node] + layout.sizes[node]))})"
        for node in nodes
    )
    return (
        f"{given}: process {rank} would have slots {start}-{end}, which lie on {where}; a process lives on one node: use a "
        f"number of slots per process that divides each node's share, or a part for each node"
    )


def _meet_needs(placed: dict[Role, list[_Span]], needs: Needs, notes: list[str]) -> dict[Role, list[_Span]]:
    for role in (Role.ACTOR, Role.ROLLOUT):
        if role in needs.roles and role not in placed:
            others = " and ".join(dict.fromkeys(placed)) or "nothing"
            raise PlacementError(
                f"{WHERE} places {others}, and no run goes without {role}; write for example 'actor,rollout: all'"
            )
    if Role.CRITIC in needs.roles and Role.CRITIC not in placed:
        raise PlacementError(
            f"{WHERE} places {' and '.join(dict.fromkeys(placed))}, and algorithm.name=ppo needs a critic too, which is "
            "trained like the actor and is as large; give it slots of its own (critic: 4-7), or the actor's ('actor,critic': ...)"
        )
    kept = {}
    for role, spans in placed.items():
        if role is Role.INFERENCE or role in needs.roles:
            kept[role] = spans
        else:
            notes.append(f"{role} is placed, but this run has none ({_asks_for(role)}); its processes are left out")
    for role in WITH_THE_ACTOR:
        if role in needs.roles and role not in kept:
            kept[role] = kept[Role.ACTOR]
            notes.append(
                f"{role} is not placed, so it lives in the actor's processes; {WHERE}.{role} gives it slots of its own"
            )
    return kept


def _asks_for(role: Role) -> str:
    match role:
        case Role.CRITIC:
            return "algorithm.name=ppo asks for one"
        case Role.REFERENCE:
            return "algorithm.kl_coef above 0 asks for one"
        case Role.REWARD:
            return "a reward of type model asks for one"
    return "nothing asks for one"


def _check_all_used(placed: Mapping[Role, Sequence[_Span]], layout: _Layout, notes: Sequence[str]) -> None:
    used = {slot for spans in placed.values() for span in spans for slot in span.slots}
    if len(used) == layout.num_slots:
        return
    left = [slot for slot in range(layout.num_slots) if slot not in used]
    raise PlacementError(
        f"{WHERE} leaves {_plural('slot', len(left))} {slot_text(left)} without a role: {layout.sum()}, {len(used)} used, "
        f"{layout.num_slots} - {len(used)} = {len(left)} left over; give them a role that the run has (such as "
        f"rollout), or make the cluster smaller{''.join(f'; {note}' for note in notes)}"
    )


def _number(spans: Iterable[_Span]) -> tuple[RoleProcess, ...]:
    local: dict[int, int] = {}
    processes = []
    for rank, span in enumerate(spans):
        local_rank = local.get(span.node_rank, 0)
        local[span.node_rank] = local_rank + 1
        processes.append(RoleProcess(rank=rank, slots=span.slots, node_rank=span.node_rank, local_rank=local_rank))
    return tuple(processes)


def _share(processes: Mapping[Role, tuple[RoleProcess, ...]], layout: _Layout) -> list[SharedProcess]:
    """The operating-system processes, in slot order."""
    ranks_at: dict[tuple[int, ...], dict[Role, int]] = {}
    owner: dict[int, tuple[Role, RoleProcess]] = {}
    for role, members in processes.items():
        for process in members:
            for slot in process.slots:
                other = owner.setdefault(slot, (role, process))
                if other[1].slots != process.slots:
                    raise PlacementError(_mismatch(slot, other, (role, process)))
            ranks_at.setdefault(process.slots, {})[role] = process.rank
    return [
        SharedProcess(slots=slots, node_rank=layout.node_of[slots[0]], ranks=ranks)
        for slots, ranks in sorted(ranks_at.items())
    ]


def _mismatch(slot: int, one: tuple[Role, RoleProcess], other: tuple[Role, RoleProcess]) -> str:
    (role, process), (other_role, other_process) = one, other
    return (
        f"{WHERE}: on slot {slot}, {role} process {process.rank} has {_slots_are(process.slots)} and {other_role} process "
        f"{other_process.rank} has {_slots_are(other_process.slots)}; roles that share a slot share its process, so give "
        f"both the same slots per process ({len(process.slots)} against {len(other_process.slots)}), or slots of their own"
    )


def _slots_are(slots: tuple[int, ...]) -> str:
    return f"{_plural('slot', len(slots))} {slot_text(slots)}"


def _mesh_of(role: Role, processes: tuple[RoleProcess, ...], wanted: int | None, notes: list[str]) -> Mesh:
    widths = sorted({len(process.slots) for process in processes})
    if len(widths) > 1:
        raise PlacementError(
            f"{WHERE}: {role} has processes of {' and '.join(map(str, widths))} slots; all of them need equally many: use "
            "the same slots per process in each part"
        )
    (width,) = widths
    slots = width * len(processes)
    tensor = wanted if wanted is not None else width
    if slots % tensor:
        sizes = [size for size in range(width, slots + 1, width) if slots % size == 0]
        raise PlacementError(
            f"{role}.tensor_parallel_size={tensor} does not divide the {slots} slots of {role}: {slots} = {tensor} x "
            f"{slots // tensor} + {slots % tensor}; use {_either(sizes)}"
        )
    if tensor % width:
        raise PlacementError(
            f"{role}.tensor_parallel_size={tensor} is less than, or no multiple of, the {width} slots of each {role} process; "
            f"use {width} or a multiple of it, or one process per slot"
        )
    per_group = tensor // width
    groups = [processes[start : start + per_group] for start in range(0, len(processes), per_group)]
    split = [number for number, group in enumerate(groups) if group[0].node_rank != group[-1].node_rank]
    if split:
        notes.append(
            f"{len(split)} of {len(groups)} tensor groups of {role} (the first: {split[0]}) lie on two nodes, so every layer "
            f"waits for the network; a tensor_parallel_size that divides each node's slots avoids it"
        )
    return Mesh(data=slots // tensor, tensor=tensor)


def _groups_of(shared: list[SharedProcess]) -> tuple[RoleGroup, ...]:
    members: dict[tuple[Role, ...], list[SharedProcess]] = {}
    for process in shared:
        members.setdefault(tuple(process.ranks), []).append(process)
    return tuple(RoleGroup(roles=roles, processes=tuple(processes)) for roles, processes in members.items())


def slot_text(numbers: Iterable[int]) -> str:
    """
    >>> slot_text([0, 1, 2, 3, 8])
    '0-3,8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(_range_text(first, last) for first, last in runs)


def _range_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _either(sizes: Sequence[int]) -> str:
    shown = [str(size) for size in sizes]
    if len(shown) > 8:
        shown = [*shown[:6], f"... {shown[-1]}"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    return word + ("es" if word.endswith("s") else "s")
