"""A run's plan as text for a terminal: the slot map, the meshes, the memory. ``draw_svg`` draws the same as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollcall.plan.judge import RunPlan, describe_model, gib
from rollcall.plan.memory import GIB, RoleMemory, SlotMemory
from rollcall.plan.placement import Plan, Role
from rollcall.plan.slots import slot_text

MAX_GRID_NODES, MAX_GRID_SLOTS = 8, 16  # a larger cluster is drawn as runs of like nodes
PLAIN_WIDTH = 120
BAR = 24  # characters
COLOURS = {
    Role.ACTOR: "cyan", Role.CRITIC: "magenta", Role.REFERENCE: "white", Role.ROLLOUT: "yellow", Role.INFERENCE: "green",
    Role.REWARD: "red",
}  # fmt: skip
PARTS = (
    ("weights", "weights"), ("gradients", "gradients"), ("optimizer", "optimizer"), ("activations", "activations"),
    ("kv", "KV cache"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """Consecutive nodes with the same roles on the same local slots."""

    first: int
    last: int
    roles: tuple[tuple[Role, tuple[int, ...], int], ...]  # role, local slots, slots per process

    @property
    def name(self) -> str:
        return f"node {self.first}" if self.first == self.last else f"nodes {self.first}-{self.last}"

    @property
    def num_nodes(self) -> int:
        return self.last - self.first + 1


def node_runs(plan: Plan) -> list[NodeRun]:
    runs: list[NodeRun] = []
    sizes: list[int] = []
    for node, roles in enumerate(_patterns(plan)):
        if runs and runs[-1].roles == roles and sizes[-1] == plan.slots_per_node[node]:
            runs[-1] = NodeRun(first=runs[-1].first, last=node, roles=roles)
        else:
            runs.append(NodeRun(first=node, last=node, roles=roles))
            sizes.append(plan.slots_per_node[node])
    return runs


def _patterns(plan: Plan) -> Iterator[tuple[tuple[Role, tuple[int, ...], int], ...]]:
    start = 0
    widths = {role: len(processes[0].slots) for role, processes in plan.processes.items()}
    for size in plan.slots_per_node:
        slots = plan.slots[start : start + size]
        start += size
        local = {role: tuple(slot.local for slot in slots if role in slot.roles) for role in plan.roles}
        yield tuple((role, where, widths[role]) for role, where in local.items() if where)


def make_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def draw_text(run: RunPlan) -> RenderableType:
    small = run.plan.num_nodes <= MAX_GRID_NODES and max(run.plan.slots_per_node) <= MAX_GRID_SLOTS
    parts: list[RenderableType] = [
        _heading(run),
        _grid(run.plan) if small else _abbreviated(run.plan),
        _meshes(run.plan),
    ]
    if run.memory:
        parts.append(_memory(run))
    parts += [Text(f"note: {note}", style="dim") for note in run.notes]
    if run.problems:
        parts += [Text(f"cannot work: {problem}", style="bold red") for problem in run.problems]
    else:
        parts.append(Text(verdict(run), style="bold green"))
    return Group(*parts)


def verdict(run: RunPlan) -> str:
    if run.memory:
        return "this placement can work"
    return "this placement can work, if it fits into memory"


def heading(run: RunPlan) -> str:
    sizes = run.plan.slots_per_node
    unit = "GPU" if run.cluster.accelerator == "gpu" else "logical CPU slot"
    nodes = f"{len(sizes)} node{'s' if len(sizes) > 1 else ''}"
    if min(sizes) == max(sizes):
        return f"{nodes} x {max(sizes)} = {len(run.plan.slots)} {unit}{'s' if len(run.plan.slots) > 1 else ''}"
    return f"{nodes} of {min(sizes)} to {max(sizes)}, {len(run.plan.slots)} {unit}s"


def _heading(run: RunPlan) -> Text:
    return Text.assemble((run.config.run.name, "bold"), f": {heading(run)}; {describe_model(run)}")


def _grid(plan: Plan) -> Table:
    """A row per node and role, a column per local slot; the cells are the role's ranks."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("node")
    table.add_column("slots")
    table.add_column("role \\ local slot")
    for local in range(max(plan.slots_per_node)):
        table.add_column(str(local), justify="right")
    rank_at = _ranks(plan)
    for node in range(plan.num_nodes):
        slots = plan.node_slots(node)
        roles = [role for role in plan.roles if any(role in slot.roles for slot in slots)]
        for row, role in enumerate(roles):
            cells = [str(rank_at[role].get(slot.index, "·")) for slot in slots]
            table.add_row(
                str(node) if row == 0 else "",
                slot_text(slot.index for slot in slots) if row == 0 else "",
                Text(role, style=COLOURS[role]),
                *(Text(cell, style=COLOURS[role] if cell != "·" else "dim") for cell in cells),
                end_section=role is roles[-1],
            )
    return table


def _ranks(plan: Plan) -> dict[Role, dict[int, int]]:
    """Role to slot to rank."""
    return {
        role: {slot: rank for rank, process in enumerate(processes) for slot in process.slots}
        for role, processes in plan.processes.items()
    }


def _abbreviated(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("nodes", "slots", "role", "on local slots", "ranks", "slots per process"):
        table.add_column(name)
    starts = [0]
    for size in plan.slots_per_node:
        starts.append(starts[-1] + size)
    ranks = _ranks(plan)
    for run in node_runs(plan):
        first, last = starts[run.first], starts[run.last + 1] - 1
        for row, (role, local, width) in enumerate(run.roles):
            top = starts[run.last] + local[-1]
            span = (ranks[role][first + local[0]], ranks[role][top])
            table.add_row(
                run.name.partition(" ")[2] if row == 0 else "",
                slot_text(range(first, last + 1)) if row == 0 else "",
                Text(role, style=COLOURS[role]),
                slot_text(local),
                slot_text(range(span[0], span[1] + 1)),
                str(width),
                end_section=row == len(run.roles) - 1,
            )
    return table


def _meshes(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("role", "slots", "processes", "mesh (data x tensor)", "shares its processes with"):
        table.add_column(name)
    for role in plan.roles:
        mesh = plan.meshes[role]
        others = [other for other in plan.roles for group in plan.groups if {role, other} <= set(group.roles)]
        table.add_row(
            Text(role, style=COLOURS[role]),
            slot_text(plan.role_slots(role)),
            str(plan.world_size(role)),
            f"{mesh.data} x {mesh.tensor}",
            ", ".join(dict.fromkeys(other for other in others if other is not role)) or "none",
        )
    return table


def _memory(run: RunPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="memory per slot, GiB", title_justify="left")
    table.add_column("slots")
    table.add_column("role")
    for _, title in PARTS:
        table.add_column(title, justify="right")
    table.add_column("together")
    for entry in run.memory:
        for row, role in enumerate(entry.roles):
            table.add_row(
                entry.slots if row == 0 else "",
                Text(role.role, style=COLOURS[role.role]),
                *_cells(role),
                _needs(entry, run.card) if row == 0 else Text(_sum(entry), style="dim") if row == 1 else "",
                end_section=row == len(entry.roles) - 1,
            )
    return table


def _cells(role: RoleMemory) -> list[str]:
    values = [getattr(role, part) / GIB for part, _ in PARTS]
    return [f"{value:.1f}" if value >= 0.05 else "<0.1" if value else "·" for value in values]


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
    text = f"{held / GIB:.1f} held + {working / GIB:.1f} at work"
    return text + (f" + {entry.runtime / GIB:.1f} runtime" if entry.runtime else "")
