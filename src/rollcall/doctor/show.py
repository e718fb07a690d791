"""The doctor's diagnosis on a terminal: a line per node, then the findings, then the verdict."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from rollcall.doctor.checks import Finding, NodeFacts
from rollcall.doctor.examine import Diagnosis
from rollcall.plan.draw import make_console
from rollcall.plan.memory import GIB
from rollcall.words import counted

MAX_NODES = 16  # a longer table shows only nodes that have findings


def show(diagnosis: Diagnosis) -> None:
    console = make_console()
    console.print(
        Text(_machine(diagnosis.nodes[0])) if diagnosis.cluster is None else _nodes(diagnosis), soft_wrap=True
    )
    for text in _measured(diagnosis):
        console.print(Text(text), soft_wrap=True)  # a command is copied from it whole
    for finding in diagnosis.findings:
        console.print(_finding(finding, where="this machine" if diagnosis.cluster is None else None), soft_wrap=True)
    console.print(_verdict(diagnosis))


def _nodes(diagnosis: Diagnosis) -> Table:
    table = Table(
        "rank", "host", "Python", "torch", "GPUs", "memory", "disk", "clock", "link", box=None, padding=(0, 2, 0, 0)
    )
    named = {finding.node for finding in diagnosis.findings}
    shown = [node for node in diagnosis.nodes if len(diagnosis.nodes) <= MAX_NODES or node.rank in named]
    for node in shown:
        ahead, doubt = diagnosis.skews.get(node.rank, (0.0, 0.0))
        table.add_row(
            str(node.rank),
            node.host,
            node.python,
            _torch(node),
            f"{len(node.gpus)} x {node.gpus[0].name}" if node.gpus else f"none, {node.slots} slots",
            f"{node.memory_available / GIB:.1f} of {node.memory_total / GIB:.1f} GiB",
            f"{min(disk.free for disk in node.disks) / GIB:.1f} GiB free",
            f"{1000 * ahead:+.0f} ± {1000 * doubt:.0f} ms" if node.rank in diagnosis.skews else "?",
            f"{node.interface or '?'}" + (f" {node.link_mbit} Mbit/s" if node.link_mbit else ""),
        )
    if len(shown) < len(diagnosis.nodes):
        table.add_row("...", f"{len(diagnosis.nodes) - len(shown)} more without a finding")
    return table


def _machine(node: NodeFacts) -> str:
    cards = f"{len(node.gpus)} x {node.gpus[0].name}" if node.gpus else "no GPU"
    memory = f"{node.memory_available / GIB:.1f} of {node.memory_total / GIB:.1f} GiB of memory available"
    free = f"{node.disks[0].free / GIB:.1f} GiB free in {node.disks[0].path}"
    return f"this machine: Python {node.python}, torch {_torch(node)}, {cards}, {memory}, {free}"


def _torch(node: NodeFacts) -> str:
    build = f"CUDA {node.torch_cuda}" if node.torch_cuda else f"ROCm {node.torch_hip}" if node.torch_hip else "CPU"
    return f"{node.packages.get('torch')} {build}" + (f", driver {node.driver}" if node.driver else "")


def _measured(diagnosis: Diagnosis) -> list[str]:
    lines = []
    if diagnosis.shared is not None and not diagnosis.shared.unseen:  # else a finding tells
        seen = f"seen everywhere after {diagnosis.shared.seen_after_s:.2f} s, {diagnosis.shared.num_renames} renames watched"
        lines.append(f"shared folder {diagnosis.shared.path}: {seen}")
    if diagnosis.bytes_per_s is not None:
        lines.append(f"all-reduce between nodes ({diagnosis.backend}): {diagnosis.bytes_per_s / 1e9:.2f} GB/s")
    if diagnosis.firewall is not None:
        lines.append(f"firewall, on each node as root (or start the nodes with --tls): {diagnosis.firewall}")
    confined = ", ".join(f"{thing}: {state}" for thing, state in diagnosis.rewards.items())
    lines.append(f"built-in rewards on this machine run with {confined}")
    return lines


def _finding(finding: Finding, *, where: str | None = None) -> Text:
    style = "bold red" if finding.severity == "breaks" else "yellow"
    where = (
        where or "cluster"
        if finding.node is None or where
        else f"rank {finding.node}" + (f" {finding.host}" if finding.host else "")
    )
    return Text.assemble(
        (finding.severity, style),
        f"  {where}: {finding.what}\n",
        (f"        why: {finding.why}\n        fix: {finding.fix}", "dim"),
    )


def _verdict(diagnosis: Diagnosis) -> Text:
    broken = sum(finding.severity == "breaks" for finding in diagnosis.findings)
    warned = len(diagnosis.findings) - broken
    if broken:
        return Text(f"{broken} of these would break a run; {counted(warned, 'warning')}", style="bold red")
    if warned:
        return Text(f"a run can start; {counted(warned, 'warning')}", style="yellow")
    return Text("all is well", style="bold green")
