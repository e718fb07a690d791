"""Parses ``cluster.component_placement`` into a ``Plan``: which role's processes run on which slots. Needs neither Ray nor torch.

``slots.py`` defines the syntax for a role's slots. A role's ranks are numbered from 0 in slot order.

Roles that share a slot share its process. So processes of two roles either have the same slots, and are then a single
operating-system process with both roles, or have no slot in common. With ``rollout: all, actor: 0-3`` on eight slots, slots
0-3 each have a process with both roles (rollout ranks 0-3 are actor ranks 0-3), and slots 4-7 each have a rollout process.

The environment needs CPUs, which all slots on a node share, so its slots only determine its nodes: it has one process on each of them,
in addition to the processes of other roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from rollcall.base.errors import PlacementError
from rollcall.base.words import plural, ranges
from rollcall.config import ClusterSection, Config, NodeSection
from rollcall.config.errors import nearest
from rollcall.plan.mesh import is_split, product_of
from rollcall.plan.slots import WHERE, Nodes, either, read_slots


class Role(StrEnum):
    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    ROLLOUT = "rollout"
    INFERENCE = "inference"
    REWARD = "reward"
    ENVIRONMENT = "environment"


TRAINED = (Role.ACTOR, Role.CRITIC)
HOLDERS = (Role.ROLLOUT, Role.INFERENCE)  # roles that read the policy but do not train it
SCORERS = (Role.REFERENCE, Role.INFERENCE)  # roles that compute log-probs as the actor does

_USERS = {
    Role.CRITIC: "algorithm.name=ppo",
    Role.REFERENCE: "algorithm.kl_coef above 0",
    Role.REWARD: "a reward of type model",
    Role.ENVIRONMENT: "an environment section",
}

_Spans = dict[Role, list[tuple[int, ...]]]  # the slots of each role's processes, by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    index: int  # in the cluster
    node_rank: int
    local: int  # on its node
    roles: tuple[Role, ...]  # at least one


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One operating-system process and its rank in each of its roles."""

    slots: tuple[int, ...]  # global, consecutive, all on one node
    node_rank: int
    ranks: Mapping[Role, int]

    def __str__(self) -> str:
        return " + ".join(f"{role} rank {rank}" for role, rank in self.ranks.items())

    @property
    def kind(self) -> str:
        """The process's roles, such as actor+rollout."""
        return "+".join(map(str, self.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleGroup:
    """All processes with exactly these roles, in slot order."""

    roles: tuple[Role, ...]
    processes: tuple[PlannedProcess, ...]

    @property
    def slots(self) -> str:
        """The slots as a string, such as 0-19."""
        return ranges(slot for process in self.processes for slot in process.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A role's slots as data x context x tensor. The last axis varies fastest in slot order."""

    data: int
    tensor: int
    context: int = 1

    @property
    def lanes(self) -> int:
        """The number of tensor groups. Tensor groups in the same context group work on the same rows, but their weights are like those of
        any other tensor group."""
        return self.data * self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    slots_per_node: tuple[int, ...]
    slots: tuple[Slot, ...]  # by global slot
    processes: Mapping[Role, tuple[PlannedProcess, ...]]  # by rank
    groups: tuple[RoleGroup, ...]  # each process in the cluster is in one of them, except environment processes
    meshes: Mapping[Role, Mesh]  # for the roles with a model
    notes: tuple[str, ...]  # messages about decisions that the run file leaves to the planner

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(self.processes)

    @property
    def all_processes(self) -> list[PlannedProcess]:
        """The processes with models, in slot order."""
        found = (process for group in self.groups for process in group.processes)
        return sorted(found, key=lambda process: process.slots)

    @property
    def environments(self) -> tuple[PlannedProcess, ...]:
        """Environment processes by rank, one on each of their nodes. If empty, environments run on the controller's node."""
        return self.processes.get(Role.ENVIRONMENT, ())

    @property
    def num_nodes(self) -> int:
        return len(self.slots_per_node)

    def world_size(self, role: Role | str) -> int:
        """Return the number of processes of the role."""
        return len(self.processes.get(Role(role), ()))

    def node_slots(self, node_rank: int) -> tuple[Slot, ...]:
        start = sum(self.slots_per_node[:node_rank])
        return self.slots[start : start + self.slots_per_node[node_rank]]

    def role_slots(self, role: Role) -> tuple[int, ...]:
        return tuple(slot for process in self.processes.get(role, ()) for slot in process.slots)


def plan_for(config: Config, cluster: ClusterSection) -> Plan:
    """Return the plan for a run on this cluster. Raises PlacementError if there is none."""
    sizes = {Role.ACTOR: config.actor.tensor_parallel_size, Role.CRITIC: config.critic.tensor_parallel_size}
    tensor = {role: size for role, size in sizes.items() if size > 1}
    context = dict.fromkeys((Role.ACTOR, *SCORERS), config.actor.context_parallel_size)
    context |= {Role.CRITIC: config.critic.context_parallel_size}
    return plan_placement(cluster, needed=needed_roles(config), tensor_parallel=tensor, context_parallel=context)


def needed_roles(config: Config) -> frozenset[Role]:
    """Return the roles that a run needs."""
    roles = {Role.ACTOR, Role.ROLLOUT}
    if config.algorithm.name == "ppo":
        roles.add(Role.CRITIC)
    if config.algorithm.kl_coef > 0:
        roles.add(Role.REFERENCE)
    if any(reward.type == "model" for reward in config.reward):
        roles.add(Role.REWARD)
    if config.environment is not None:
        roles.add(Role.ENVIRONMENT)
    return frozenset(roles)


def roles_in_parts(config: Config, plan: Plan) -> frozenset[Role]:
    """Return the roles whose processes each have a part of one model. A reference in the actor's processes is split like the actor."""
    found = {
        role
        for role in TRAINED
        if role in plan.processes and is_split(getattr(config, role.value), num_ranks=plan.world_size(role))
    }
    if Role.ACTOR in found and plan.processes.get(Role.REFERENCE) == plan.processes[Role.ACTOR]:
        found.add(Role.REFERENCE)
    return frozenset(found)


def roles_together(config: Config, plan: Plan) -> frozenset[Role]:
    """Return the roles whose processes run every forward pass together, because they split a model or the tokens of their rows."""
    found = roles_in_parts(config, plan) | {role for role, mesh in plan.meshes.items() if mesh.context > 1}
    if Role.ACTOR in found and plan.processes.get(Role.INFERENCE) == plan.processes[Role.ACTOR]:
        found |= {Role.INFERENCE}
    return found


def plan_placement(
    cluster: ClusterSection,
    *,
    needed: frozenset[Role] | None = None,
    tensor_parallel: Mapping[Role, int] | None = None,
    context_parallel: Mapping[Role, int] | None = None,
) -> Plan:
    """Return the plan, or raise a PlacementError.

    ``needed`` are the run's roles, by default all placed roles. ``tensor_parallel`` maps a role to the number of slots in its tensor
    group, by default the slots of one process. ``context_parallel`` maps a role to the number of tensor groups in its context
    group, by default one.
    """
    nodes = Nodes(cluster)
    placed = _read(cluster, nodes)
    notes: list[str] = []
    if needed is not None:
        placed = _meet_needs(placed, needed, notes)
    _check_all_used(placed, nodes, notes)
    environments = _environments(placed, nodes)
    spans = {role: placed[role] for role in Role if role in placed and role is not Role.ENVIRONMENT}
    context = context_parallel or {}
    _check_gangs(spans, in_gangs=[role for role in Role if role in TRAINED or context.get(role, 1) > 1])
    at = _share(spans, nodes)
    processes = {role: tuple(at[slots] for slots in own) for role, own in spans.items()}
    sizes = tensor_parallel or {}
    meshes: dict[Role, Mesh] = {}
    for role, own in processes.items():
        if role in SCORERS and own == processes.get(Role.ACTOR):  # it is split like the actor
            meshes[role] = meshes[Role.ACTOR]
        else:
            meshes[role] = _mesh_of(role, own, wanted=sizes.get(role), context=context.get(role, 1), notes=notes)
    members: dict[tuple[Role, ...], list[PlannedProcess]] = {}
    for process in at.values():
        members.setdefault(tuple(process.ranks), []).append(process)
    return Plan(
        slots_per_node=nodes.sizes,
        slots=_slots(nodes, [*at.values(), *environments]),
        processes=processes | ({Role.ENVIRONMENT: environments} if environments else {}),
        groups=tuple(RoleGroup(roles=roles, processes=tuple(group)) for roles, group in members.items()),
        meshes=meshes,
        notes=tuple(notes),
    )


def _slots(nodes: Nodes, processes: Sequence[PlannedProcess]) -> tuple[Slot, ...]:
    roles: dict[int, list[Role]] = {}
    for process in processes:
        for slot in process.slots:
            roles.setdefault(slot, []).extend(process.ranks)
    return tuple(
        Slot(index=slot, node_rank=node, local=slot - nodes.starts[node], roles=tuple(roles[slot]))
        for slot, node in enumerate(nodes.node_of)
    )


def _environments(placed: _Spans, nodes: Nodes) -> tuple[PlannedProcess, ...]:
    """Plan one environment process for each node that has environment slots. It gets all of these slots."""
    on_node: dict[int, list[int]] = {}
    for span in placed.get(Role.ENVIRONMENT, ()):
        on_node.setdefault(nodes.node_of[span[0]], []).append(span[0])
    return tuple(
        PlannedProcess(slots=tuple(slots), node_rank=node, ranks={Role.ENVIRONMENT: rank})
        for rank, (node, slots) in enumerate(sorted(on_node.items()))
    )


def _read(cluster: ClusterSection, nodes: Nodes) -> _Spans:
    placed: _Spans = {}
    for key, value in cluster.component_placement.items():
        roles = _roles_of(key)
        spans = read_slots(str(value), nodes=nodes, key=key)
        if Role.ENVIRONMENT in roles and ":" in str(value):
            raise PlacementError(
                f"{WHERE}: {key}: {value} names process ranks, but environment has one process on each of its nodes; give it a "
                "separate key with only slots, such as environment: all"
            )
        for role in roles:
            if role in placed:
                raise PlacementError(
                    f"{WHERE} places {role} twice (the second time in {key!r}); write its slots once, as a list such as "
                    f"{role}: 0-3,8"
                )
            placed[role] = spans
    return placed


def _check_gangs(spans: _Spans, *, in_gangs: Sequence[Role]) -> None:
    """Check that roles with gangs share either all processes or none, because a process can be in only one gang."""
    for one, other in combinations([role for role in in_gangs if role in spans], 2):
        first, second = set(spans[one]), set(spans[other])
        shared = first & second
        if shared and first != second:
            raise PlacementError(
                f"{WHERE} gives {len(first)} processes to {one} and {len(second)} to {other}, but they share only {len(shared)}; give both the "
                "same slots, or separate ones"
            )


def _roles_of(key: str) -> list[Role]:
    names = [name.strip() for name in key.split(",")]
    for name in names:
        if name not in list(Role):
            near = nearest(name, [role.value for role in Role]) if name else None
            hint = f"did you mean {near}? " if near else ""
            raise PlacementError(f"{WHERE}: {name!r} in {key!r} is not a role; {hint}the roles are {', '.join(Role)}")
    return [Role(name) for name in names]


def _meet_needs(placed: _Spans, needed: frozenset[Role], notes: list[str]) -> _Spans:
    for role in (Role.ACTOR, Role.ROLLOUT):
        if role in needed and role not in placed:
            others = " and ".join(dict.fromkeys(placed)) or "nothing"
            raise PlacementError(
                f"{WHERE} places {others}, but every run needs {role}; write for example 'actor,rollout: all'"
            )
    if Role.CRITIC in needed and Role.CRITIC not in placed:
        raise PlacementError(
            f"{WHERE} places {' and '.join(dict.fromkeys(placed))}, but algorithm.name=ppo also needs a critic, which is "
            "trained like the actor and is as large; give it its own slots (critic: 4-7), or the actor's ('actor,critic': ...)"
        )
    kept: _Spans = {}
    for role, spans in placed.items():
        if role is Role.INFERENCE or role in needed:
            kept[role] = spans
        else:
            notes.append(
                f"{role} is placed, but this run does not use it ({_USERS[role]} would); its processes are left out"
            )
    for role in (Role.REFERENCE, Role.REWARD):
        if role in needed and role not in kept:
            kept[role] = kept[Role.ACTOR]
            notes.append(
                f"{role} is not placed, so it runs in the actor's processes; {WHERE}.{role} gives it its own slots"
            )
    return kept


def _check_all_used(placed: _Spans, nodes: Nodes, notes: Sequence[str]) -> None:
    used = {slot for spans in placed.values() for span in spans for slot in span}
    if len(used) == nodes.num_slots:
        return
    left = [slot for slot in range(nodes.num_slots) if slot not in used]
    raise PlacementError(
        f"{WHERE} leaves {plural('slot', len(left))} {ranges(left)} without a role: {nodes.sum()}, {len(used)} used, "
        f"{nodes.num_slots} - {len(used)} = {len(left)} left over; give them a role that the run has (such as "
        f"rollout), or make the cluster smaller{''.join(f'; {note}' for note in notes)}"
    )


def _share(spans: _Spans, nodes: Nodes) -> dict[tuple[int, ...], PlannedProcess]:
    """Return the operating-system processes keyed by their slots, in slot order."""
    ranks_at: dict[tuple[int, ...], dict[Role, int]] = {}
    owner: dict[int, tuple[Role, int]] = {}
    for role, own in spans.items():
        for rank, slots in enumerate(own):
            for slot in slots:
                first, its_rank = owner.setdefault(slot, (role, rank))
                theirs = spans[first][its_rank]
                if theirs != slots:
                    raise PlacementError(
                        f"{WHERE}: on slot {slot}, {first} process {its_rank} has {_slots_are(theirs)} and {role} process {rank} "
                        f"has {_slots_are(slots)}; roles that share a slot share its process, so give both the same number of "
                        f"slots per process (now {len(theirs)} and {len(slots)}), or separate slots"
                    )
            ranks_at.setdefault(slots, {})[role] = rank
    return {
        slots: PlannedProcess(slots=slots, node_rank=nodes.node_of[slots[0]], ranks=ranks)
        for slots, ranks in sorted(ranks_at.items())
    }


def _slots_are(slots: tuple[int, ...]) -> str:
    return f"{plural('slot', len(slots))} {ranges(slots)}"


def _mesh_of(
    role: Role, processes: tuple[PlannedProcess, ...], *, wanted: int | None, context: int, notes: list[str]
) -> Mesh:
    widths = sorted({len(process.slots) for process in processes})
    if len(widths) > 1:
        raise PlacementError(
            f"{WHERE}: {role} has processes of {' and '.join(map(str, widths))} slots, but all need the same number; use "
            "the same number of slots per process in each part"
        )
    (width,) = widths
    slots = width * len(processes)
    tensor = wanted if wanted is not None else width
    together = tensor * context
    if slots % together:
        sizes = [size for size in range(width, slots + 1, width) if slots % size == 0]
        keys = product_of("actor" if role in SCORERS else role, tensor=tensor, context=context)
        raise PlacementError(
            f"{keys} does not divide the {slots} slots of {role}: {slots} = {together} x {slots // together} + "
            f"{slots % together}; use {either(sizes)}"
        )
    if tensor % width:
        raise PlacementError(
            f"{role}.tensor_parallel_size={tensor} is not a multiple of the {width} slots of each {role} process; "
            f"use {width} or a multiple of it, or one process per slot"
        )
    for kind, size in (("tensor", tensor), ("context", together if context > 1 else width)):
        per_group = size // width
        groups = [processes[start : start + per_group] for start in range(0, len(processes), per_group)]
        split = [number for number, group in enumerate(groups) if group[0].node_rank != group[-1].node_rank]
        if split:
            notes.append(
                f"{len(split)} of {len(groups)} {kind} groups of {role} (the first is number {split[0]}) span two nodes, so every layer "
                f"waits for the network; a {kind}_parallel_size that divides each node's slots avoids this"
            )
    return Mesh(data=slots // together, tensor=tensor, context=context)


def shrink(section: ClusterSection, plan: Plan, *, kept: Sequence[int]) -> ClusterSection:
    """Return the section for only the ``kept`` nodes (ranks, in order), renumbered from 0. ``plan`` is the plan for all nodes."""
    lost = [rank for rank in range(plan.num_nodes) if rank not in kept]
    old = [slot for rank in kept for slot in plan.node_slots(rank)]
    number = {slot.index: new for new, slot in enumerate(old)}
    placement: dict[str, str | int] = {}
    for role, processes in plan.processes.items():
        left = [process for process in processes if process.node_rank in kept]
        if not left:
            names = ", ".join(map(str, lost))
            raise PlacementError(
                f"all {role} processes were on nodes that are missing ({names}), but the run needs at least one; bring a "
                f"node back with `rollcall node`, or place {role} on several nodes"
            )
        if role is Role.ENVIRONMENT:
            placement[role.value] = ",".join(str(number[slot]) for process in left for slot in process.slots)
        else:
            spans = [(number[process.slots[0]], number[process.slots[-1]]) for process in left]
            placement[role.value] = ",".join(f"{first}-{last}:{rank}" for rank, (first, last) in enumerate(spans))
    weights = None if section.node_weights is None else [section.node_weights[rank] for rank in kept]
    return section.model_copy(
        update={
            "num_nodes": len(kept),
            "nodes": [NodeSection(gpus=plan.slots_per_node[rank]) for rank in kept],
            "num_gpus_per_node": max(plan.slots_per_node[rank] for rank in kept),
            "component_placement": placement,
            "node_weights": weights,
            "node_env": {new: section.node_env[rank] for new, rank in enumerate(kept) if rank in section.node_env},
        }
    )
