"""Prints the doctor's diagnosis: a line per node, the measurements, the findings, the verdict."""

from __future__ import annotations

from rich.text import Text

from rollcall.base.words import counted
from rollcall.launch.doctor.checks import NodeFacts
from rollcall.launch.doctor.examine import Diagnosis
from rollcall.plan.draw import make_console
from rollcall.plan.memory import GIB


def show(diagnosis: Diagnosis) -> None:
    console = make_console()
    for node in diagnosis.nodes:
        console.print(Text(f"{_where(diagnosis, node.rank, node.host)}: {_facts(node)}"), soft_wrap=True)
    for text in _measured(diagnosis):
        console.print(Text(text), soft_wrap=True)  # so that a command can be copied in one piece
    for finding in diagnosis.findings:
        style = "bold red" if finding.severity == "breaks" else "yellow"
        text = f"  {_where(diagnosis, finding.node, finding.host)}: {finding.what}"
        console.print(Text.assemble((finding.severity, style), text), soft_wrap=True)
    console.print(_verdict(diagnosis))


def _where(diagnosis: Diagnosis, rank: int | None, host: str | None) -> str:
    if diagnosis.cluster is None:
        return "this machine"
    return "cluster" if rank is None else f"rank {rank} {host or ''}".rstrip()


def _facts(node: NodeFacts) -> str:
    disk = min(node.disks, key=lambda disk: disk.free)
    return ", ".join(
        [
            f"Python {node.python}",
            f"torch {node.packages['torch']} for {node.torch_build}",
            f"{len(node.gpus)} x {node.gpus[0].name}" if node.gpus else "no GPU",
            f"{node.memory_available / GIB:.1f} of {node.memory_total / GIB:.1f} GiB of memory available",
            f"{disk.free / GIB:.1f} GiB free in {disk.path}",
        ]
    )


def _measured(diagnosis: Diagnosis) -> list[str]:
    lines = []
    if diagnosis.shared is not None:
        lines.append(f"shared folder {diagnosis.shared}: what each node writes is seen everywhere")
    if diagnosis.bytes_per_s is not None:
        lines.append(f"all-reduce between nodes ({diagnosis.backend}): {diagnosis.bytes_per_s / 1e9:.2f} GB/s")
    if diagnosis.firewall is not None:
        lines.append(f"firewall, on each node as root (or start the nodes with --tls): {diagnosis.firewall}")
    confined = ", ".join(f"{thing}: {state}" for thing, state in diagnosis.rewards.items())
    lines.append(f"built-in rewards on this machine run with {confined}")
    return lines


def _verdict(diagnosis: Diagnosis) -> Text:
    broken = sum(finding.severity == "breaks" for finding in diagnosis.findings)
    warned = len(diagnosis.findings) - broken
    if broken:
        return Text(f"{broken} of these would break a run; {counted(warned, 'warning')}", style="bold red")
    if warned:
        return Text(f"a run can start; {counted(warned, 'warning')}", style="yellow")
    return Text("all is well", style="bold green")
