"""A run's plan as an SVG picture: a card per node (or per run of like nodes), a bar of memory per kind of slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from textwrap import wrap

from rollcall.plan.draw import MAX_GRID_NODES, NodeRun, heading, mesh_text, node_runs, verdict
from rollcall.plan.judge import RunPlan, describe_model
from rollcall.plan.memory import GIB, SlotMemory
from rollcall.plan.placement import Plan, Role
from rollcall.words import counted, ranges

FILL = {
    Role.ACTOR: "#2f6fb0", Role.CRITIC: "#8a5aa8", Role.REFERENCE: "#6b7280", Role.ROLLOUT: "#d9772b",
    Role.INFERENCE: "#3f8f4f", Role.REWARD: "#b8475a", Role.ENVIRONMENT: "#2a8c8c",
}  # fmt: skip
PART_FILL = {
    "weights": "#1f3a5f", "optimizer": "#4f7cac", "KV cache": "#c9a227", "gradients": "#5e8c6a", "activations": "#a3c4a8",
    "runtime": "#b3b8c0",
}  # fmt: skip
MARGIN, LABEL, CELL, BAND, GAP = 36, 132, 62, 26, 16
PAD = 14  # inside a card
MAX_CELLS = 16  # a node with more slots is drawn with narrower cells
INK, SOFT, LINE, CARD_FILL = "#1f2733", "#667085", "#d5dae1", "#f7f8fa"
RED = "#c0392b"


@dataclass(slots=True, kw_only=True)
class _Canvas:
    width: int
    y: float = MARGIN
    parts: list[str] = field(default_factory=list)

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        fill: str,
        radius: float = 4,
        stroke: str = "none",
        title: str = "",
    ) -> None:
        tip = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" fill="{fill}" stroke="{stroke}">{tip}</rect>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def render(self) -> str:
        height = self.y + MARGIN - GAP
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height:g}" '
            f'viewBox="0 0 {self.width} {height:g}" font-family="Inter, Helvetica, Arial, sans-serif">\n'
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def draw_svg(run: RunPlan) -> str:
    most = max(run.plan.slots_per_node)
    cell = CELL if most <= MAX_CELLS else max(14, CELL * MAX_CELLS // most)
    width = max(2 * MARGIN + 2 * PAD + LABEL + most * cell, 760)
    canvas = _Canvas(width=width)
    _title(canvas, run)
    _legend(canvas, [(_role_text(run.plan, role), FILL[role]) for role in run.plan.roles])
    runs = node_runs(run.plan)
    if run.plan.num_nodes <= MAX_GRID_NODES:
        runs = [
            NodeRun(first=rank, last=rank, roles=one.roles) for one in runs for rank in range(one.first, one.last + 1)
        ]
    for one in runs:
        _card(canvas, run.plan, one, cell=cell)
    if run.memory:
        _memory(canvas, run)
    _remarks(canvas, run)
    return canvas.render()


def _title(canvas: _Canvas, run: RunPlan) -> None:
    canvas.text(MARGIN, canvas.y + 14, run.config.run.name, size=22, bold=True)
    canvas.text(MARGIN, canvas.y + 38, f"{heading(run)}; {describe_model(run)}", fill=SOFT)
    canvas.y += 60


def _role_text(plan: Plan, role: Role) -> str:
    mesh = plan.meshes.get(role)
    shape = mesh_text(plan, mesh) if mesh else "one on each node"
    return f"{role}: {counted(plan.world_size(role), 'process')}, {shape}"


def _legend(canvas: _Canvas, items: list[tuple[str, str]]) -> None:
    x: float = MARGIN
    for name, fill in items:
        if x + 20 + 7.2 * len(name) > canvas.width - MARGIN:
            x = MARGIN
            canvas.y += 22
        canvas.rect(x, canvas.y, 14, 14, fill=fill, radius=3)
        canvas.text(x + 20, canvas.y + 12, name)
        x += 40 + 7.2 * len(name)
    canvas.y += 30


def _card(canvas: _Canvas, plan: Plan, run: NodeRun, *, cell: float) -> None:
    """One node: a row of slots with a band per role, joined over the slots of a process."""
    slots = plan.node_slots(run.first)
    bands = [role for role, _, _ in run.roles]
    height = 2 * PAD + 16 + len(bands) * BAND
    canvas.rect(MARGIN, canvas.y, canvas.width - 2 * MARGIN, height, fill=CARD_FILL, radius=10, stroke=LINE)
    middle = canvas.y + height / 2 - (7 if run.num_nodes > 1 else 0)
    last = plan.node_slots(run.last)[-1].index
    canvas.text(MARGIN + PAD, middle - 3, run.name, size=15, bold=True)
    canvas.text(MARGIN + PAD, middle + 15, f"slots {ranges(range(slots[0].index, last + 1))}", size=12, fill=SOFT)
    if run.num_nodes > 1:
        canvas.text(MARGIN + PAD, middle + 30, f"alike; ranks of {run.first}", size=11, fill=SOFT)
    left, top = MARGIN + PAD + LABEL, canvas.y + PAD
    for slot in slots:
        x = left + slot.local * cell
        if cell >= 24:
            canvas.text(x + cell / 2, top + 9, str(slot.index), size=11, fill=SOFT, anchor="middle")
        canvas.rect(x + 1.5, top + 15, cell - 3, len(bands) * BAND, fill="#eceff3")
    for row, role in enumerate(bands):
        y = top + 16 + row * BAND
        for rank, process in enumerate(plan.processes[role]):
            if process.node_rank != run.first:
                continue
            x = left + (process.slots[0] - slots[0].index) * cell
            across = (process.slots[-1] - process.slots[0] + 1) * cell
            many = f" (and on {run.num_nodes - 1} more nodes like this)" if run.num_nodes > 1 else ""
            title = f"{role} rank {rank}, slots {ranges(process.slots)}{many}"
            canvas.rect(x + 1.5, y, across - 3, BAND - 2, fill=FILL[role], title=title)
            if across >= 24:
                middle_x = x + across / 2
                canvas.text(middle_x, y + BAND / 2 + 3, str(rank), size=12, fill="#ffffff", anchor="middle")
    canvas.y += height + GAP


def _memory(canvas: _Canvas, run: RunPlan) -> None:
    canvas.y += 12
    canvas.text(MARGIN, canvas.y + 12, "memory per slot", size=16, bold=True)
    canvas.y += 28
    _legend(canvas, list(PART_FILL.items()))
    most = max([entry.total for entry in run.memory] + ([run.card] if run.card else []))
    left, right = MARGIN + 210, canvas.width - MARGIN - 150
    scale = (right - left) / most
    for entry in run.memory:
        over = run.card is not None and entry.total > run.card
        canvas.text(MARGIN, canvas.y + 12, ", ".join(role.role for role in entry.roles), bold=True)
        canvas.text(MARGIN, canvas.y + 28, f"slots {entry.slots}"[:30], size=11, fill=SOFT)
        room = (run.card or entry.total) * scale
        canvas.rect(left, canvas.y, room, 30, fill="#ffffff", stroke=LINE)
        x = left
        for name, size in _stack(entry):
            if size * scale >= 0.5:
                canvas.rect(
                    x,
                    canvas.y + 1,
                    size * scale,
                    28,
                    fill=PART_FILL[name],
                    radius=0,
                    title=f"{name} {size / GIB:.2f} GiB",
                )
                x += size * scale
        if run.card is not None:
            canvas.rect(left + room - 1, canvas.y - 4, 2, 38, fill=RED if over else INK, radius=0)
        of = f" of {run.card / GIB:.0f}" if run.card is not None else ""
        canvas.text(right + 12, canvas.y + 20, f"{entry.total / GIB:.1f}{of} GiB", fill=RED if over else INK, bold=over)
        canvas.y += 48
    canvas.y += GAP


def _stack(entry: SlotMemory) -> list[tuple[str, int]]:
    """What is held, then what the role with the largest need uses while it works; adds up to the total."""
    busy = max(entry.roles, key=lambda role: role.working)
    return [
        ("weights", sum(role.weights for role in entry.roles)),
        ("optimizer", sum(role.optimizer for role in entry.roles)),
        ("KV cache", sum(role.kv for role in entry.roles)),
        ("gradients", busy.gradients),
        ("activations", busy.activations),
        ("runtime", entry.runtime),
    ]


def _remarks(canvas: _Canvas, run: RunPlan) -> None:
    lines = [(f"cannot work: {problem}", RED) for problem in run.problems] or [(verdict(run), FILL[Role.INFERENCE])]
    lines += [(f"note: {note}", SOFT) for note in run.notes]
    for text, fill in lines:
        for line in wrap(text, int((canvas.width - 2 * MARGIN) / 6.6)):
            canvas.text(MARGIN, canvas.y + 12, line, fill=fill)
            canvas.y += 19
    canvas.y += GAP
