"""Draws a run's plan for a terminal: the slot map, the meshes and the memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from rollcall.base.screen import Screen
from rollcall.base.words import counted, ranges
from rollcall.plan.judge import RunPlan, describe_model, gib
from rollcall.plan.memory import GIB, PARTS, SlotMemory
from rollcall.plan.placement import Plan, Role

MAX_GRID_NODES, MAX_GRID_SLOTS = 8, 16  # in a larger cluster, identical nodes share a row
BAR = 24  # characters
COLOURS = {
    Role.ACTOR: "cyan", Role.CRITIC: "magenta", Role.REFERENCE: "white", Role.ROLLOUT: "yellow", Role.INFERENCE: "green",
    Role.REWARD: "red", Role.ENVIRONMENT: "blue",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """Consecutive nodes with the same roles on the same local slots."""

    first: int
    last: int
    roles: tuple[tuple[Role, tuple[int, ...], int], ...]  # role, local slots, slots per process


def node_runs(plan: Plan) -> list[NodeRun]:
    widths = {role: len(processes[0].slots) for role, processes in plan.processes.items()}
    runs: list[NodeRun] = []
    for node, held in groupby(plan.slots, key=lambda slot: slot.node_rank):
        slots = list(held)
        local = {role: tuple(slot.local for slot in slots if role in slot.roles) for role in plan.roles}
        roles = tuple((role, where, widths[role]) for role, where in local.items() if where)
        if runs and runs[-1].roles == roles and plan.slots_per_node[runs[-1].last] == len(slots):
            runs[-1] = replace(runs[-1], last=node)
        else:
            runs.append(NodeRun(first=node, last=node, roles=roles))
    return runs


def make_console() -> Screen:
    screen = Screen()
    return screen if screen.is_terminal else Screen(width=120)


def draw_text(run: RunPlan) -> RenderableType:
    small = run.plan.num_nodes <= MAX_GRID_NODES and max(run.plan.slots_per_node) <= MAX_GRID_SLOTS
    parts: list[RenderableType] = [
        Text.assemble((run.config.run.name, "bold"), f": {heading(run)}; {describe_model(run)}"),
        _grid(run.plan) if small else _abbreviated(run.plan),
        _meshes(run.plan),
    ]
    if run.memory:
        parts.append(_memory(run))
    parts += [Text(f"note: {note}", style="dim") for note in run.notes]
    wrong = [Text(f"cannot work: {problem}", style="bold red") for problem in run.problems]
    verdict = "this placement can work" + ("" if run.memory else ", if it fits into memory")
    return Group(*parts, *(wrong or [Text(verdict, style="bold green")]))


def heading(run: RunPlan) -> str:
    sizes = run.plan.slots_per_node
    unit = "GPU" if run.cluster.accelerator == "gpu" else "logical CPU slot"
    nodes, slots = counted(len(sizes), "node"), counted(len(run.plan.slots), unit)
    if min(sizes) == max(sizes):
        return f"{nodes} x {max(sizes)} = {slots}"
    return f"{nodes} with {min(sizes)} to {max(sizes)} each, {slots} in all"


def _table(*columns: Column | str, title: str | None = None) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")


def _grid(plan: Plan) -> Table:
    """Draw a row per node and role and a column per local slot; the cells show the role's ranks."""
    columns = [Column(str(local), justify="right") for local in range(max(plan.slots_per_node))]
    table = _table("node", "slots", "role \\ local slot", *columns)
    rank_at = _ranks(plan)
    for node in range(plan.num_nodes):
        slots = plan.node_slots(node)
        roles = [role for role in plan.roles if any(role in slot.roles for slot in slots)]
        for row, role in enumerate(roles):
            cells = [str(rank_at[role].get(slot.index, "·")) for slot in slots]
            table.add_row(
                str(node) if row == 0 else "",
                ranges(slot.index for slot in slots) if row == 0 else "",
                Text(role, style=COLOURS[role]),
                *(Text(cell, style=COLOURS[role] if cell != "·" else "dim") for cell in cells),
                end_section=role is roles[-1],
            )
    return table


def _ranks(plan: Plan) -> dict[Role, dict[int, int]]:
    """Return the rank of each role on each slot, by role and slot."""
    return {
        role: {slot: rank for rank, process in enumerate(processes) for slot in process.slots}
        for role, processes in plan.processes.items()
    }


def _abbreviated(plan: Plan) -> Table:
    table = _table("nodes", "slots", "role", "on local slots", "ranks", "slots per process")
    ranks = _ranks(plan)
    for run in node_runs(plan):
        first, last = plan.node_slots(run.first), plan.node_slots(run.last)
        for row, (role, local, width) in enumerate(run.roles):
            lowest, highest = ranks[role][first[local[0]].index], ranks[role][last[local[-1]].index]
            table.add_row(
                ranges(range(run.first, run.last + 1)) if row == 0 else "",
                ranges(range(first[0].index, last[-1].index + 1)) if row == 0 else "",
                Text(role, style=COLOURS[role]),
                ranges(local),
                ranges(range(lowest, highest + 1)),
                str(width),
                end_section=row == len(run.roles) - 1,
            )
    return table


def _meshes(plan: Plan) -> Table:
    has_context = any(mesh.context > 1 for mesh in plan.meshes.values())
    axes = ("data", "context", "tensor") if has_context else ("data", "tensor")
    table = _table("role", "slots", "processes", f"mesh ({' x '.join(axes)})", "shares its processes with")
    for role in plan.roles:
        mesh = plan.meshes.get(role)
        others = [other for other in plan.roles for group in plan.groups if {role, other} <= set(group.roles)]
        table.add_row(
            Text(role, style=COLOURS[role]),
            ranges(plan.role_slots(role)),
            str(plan.world_size(role)),
            " x ".join(str(getattr(mesh, axis)) for axis in axes) if mesh else "none, one process on each node",
            ", ".join(dict.fromkeys(other for other in others if other is not role)) or "none",
        )
    return table


def _memory(run: RunPlan) -> Table:
    columns = [Column("KV cache" if part == "kv" else part, justify="right") for part in PARTS]
    table = _table("slots", "role", *columns, "total", title="memory per slot, GiB")
    for entry in run.memory:
        for row, role in enumerate(entry.roles):
            values = [getattr(role, part) / GIB for part in PARTS]
            table.add_row(
                entry.slots if row == 0 else "",
                Text(role.role, style=COLOURS[role.role]),
                *(f"{value:.1f}" if value >= 0.05 else "<0.1" if value else "·" for value in values),
                _needs(entry, run.card) if row == 0 else Text(_sum(entry), style="dim") if row == 1 else "",
                end_section=row == len(entry.roles) - 1,
            )
    return table


def _needs(entry: SlotMemory, card: int | None) -> Text:
    if card is None:
        return Text(gib(entry.total))
    filled = min(BAR, round(BAR * entry.total / card))
    style = "red" if entry.total > card else "green"
    return Text.assemble(
        ("█" * filled, style), ("░" * (BAR - filled), "dim"), f" {entry.total / GIB:.1f} of {card / GIB:.0f}"
    )


def _sum(entry: SlotMemory) -> str:
    held = sum(role.held for role in entry.roles)
    working = max(role.working for role in entry.roles)
    text = f"{held / GIB:.1f} permanent + {working / GIB:.1f} temporary"
    return text + (f" + {entry.runtime / GIB:.1f} runtime" if entry.runtime else "")
