"""`rollcall stacks` and `rollcall profile`: what the processes of a run do, and where their time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcall.cli import FAILED, Json, answer
from rollcall.cli.cluster import Cluster
from rollcall.wait import say

if TYPE_CHECKING:
    from rollcall.inspect.processes import Report, Result

Where = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN_DIR|CLUSTER]",
        help="A run, or all runs of a cluster. Default: of this node's cluster, else of this host.",
    ),
]


def stacks(
    target: Where = None,
    native: Annotated[
        bool,
        typer.Option("--native", help="Also the frames of C++ and CUDA. Holds each process for a moment."),
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each node has to answer.")] = 60.0,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Print what every process of a run does now: all threads, Python frames. Nothing is stopped.

    Controller, workers, and what they have started, such as the processes that run reward functions. py-spy reads them from
    outside, also those that hang. Where the kernel allows to read only one's own children (Ubuntu), controller and workers permit
    it; the stacks of what they have started need root there.

    \b
    Examples:
      rollcall stacks runs/gsm8k
      rollcall stacks runs/gsm8k --native
      rollcall stacks mine --json
    """
    from rollcall.inspect.processes import find_target, read_stacks

    found = read_stacks(find_target(target, cluster=cluster), native=native, timeout_s=timeout)
    if not found.failed and not any(found.hosts.values()):
        raise ValueError(
            "no process of a run was found there; is it running (`rollcall status RUN_DIR`), and as this user?"
        )
    answer(found, _show, as_json=as_json)
    if found.failed:
        raise typer.Exit(FAILED)


def _show(found: Report) -> None:
    from rollcall.groups.reachable import as_text

    for host, own in found.hosts.items():
        for one in own:
            doing = f", in {one.doing} for {one.busy_s:g} s" if one.doing else ""
            print(f"== {one.title} on {host}: process {one.pid}, state {one.state}{doing}")
            print(f"{as_text(one.threads) or f'its stacks cannot be read: {one.error}'}\n")
    for host, why in found.failed.items():
        say(f"{host}: {why}")


def profile(
    target: Where = None,
    role: Annotated[str, typer.Option(help="Whose processes: actor, rollout, critic, controller, ...")] = "actor",
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long.")] = 20.0,
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORMAT", help="torch (a Chrome trace), or by py-spy: speedscope, flamegraph."
        ),
    ] = "torch",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files.")] = Path("profile"),
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Profile the processes of a role while they work, and bring the files here. The run goes on.

    A trace of torch has its operators and CUDA kernels: open it on ui.perfetto.dev. It slows the processes down while it runs.
    py-spy shows where Python spends its time. If this command ends early, the profiler is stopped.

    \b
    Examples:
      rollcall profile runs/gsm8k --role actor --seconds 20
      rollcall profile runs/gsm8k --role rollout --seconds 5 --out slow
      rollcall profile runs/gsm8k --role controller --format flamegraph
    """
    from rollcall.inspect.processes import Format, find_target, profile_role

    if form not in set(Format):
        raise ValueError(f"--format {form} is not known; use {', '.join(Format)}")
    where = find_target(target, cluster=cluster)
    found = profile_role(where, role=role, seconds=seconds, kind=Format(form), out=out)
    answer(found, _show_files, as_json=as_json)
    if found.failed:
        raise typer.Exit(FAILED)


def _show_files(found: Result) -> None:
    for path in found.files:
        print(path)
    for whom, why in found.failed.items():
        say(f"{whom}: {why}")
