"""`rollcall stacks`, `profile` and `debug`: show, profile and debug what a run's processes are doing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from rollcall.base.errors import ClusterError
from rollcall.base.wait import say
from rollcall.base.words import visible
from rollcall.cli import FAILED, Json, answer, print_table
from rollcall.cli.cluster import Cluster
from rollcall.observe.progress import format_duration

if TYPE_CHECKING:
    from rollcall.launch.processes import Answers, Result
    from rollcall.process.debug.board import Waiting

Where = Annotated[
    str | None,
    Argument(
        metavar="[RUN_DIR|CLUSTER]",
        help="A run, or all runs of a cluster. Default: all runs of this node's cluster, else of this host.",
    ),
]


def stacks(
    target: Where = None,
    native: Annotated[
        bool, Option("--native", help="Show the frames of C++ and CUDA too. Pauses each process for a moment.")
    ] = False,
    timeout: Annotated[float, Option(min=1, help="Seconds that each node has to answer.")] = 60.0,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Print what every process of a run is doing: the Python frames of all its threads. Nothing is stopped.

    This includes the controller, the workers and the processes that they started, such as those that run reward functions. py-spy reads
    the stacks from outside the process, so it also works if a process hangs. On a kernel that lets a process inspect only its own
    children (Ubuntu's default), the controller and the workers allow it, but you need root for the processes that they started.

    \b
    Examples:
      rollcall stacks runs/gsm8k
      rollcall stacks runs/gsm8k --native
      rollcall stacks mine --json
    """
    from rollcall.launch.processes import find_target, read_stacks

    found = read_stacks(find_target(target, cluster=cluster), native=native, timeout_s=timeout)
    if not found.failed and not any(found.hosts.values()):
        advice = "check that the run is active (`rollcall status RUN_DIR`), and that you started it"
        raise ValueError(f"no process of a run was found; {advice}")
    answer(found, _show, as_json=as_json, failed=found.failed)


def _show(found: Answers) -> None:
    from rollcall.process.groups.reachable import as_text

    for host, own in found.hosts.items():
        for one in own:
            doing = f", in {one.doing} for {one.busy_s:g} s" if one.doing else ""
            print(f"== {one.title} on {host}: process {one.pid}, state {one.state}{doing}")
            print(f"{as_text(one.threads) or f'its stacks cannot be read: {one.error}'}\n")
    for host, why in found.failed.items():
        say(f"{host}: {why}")


def profile(
    target: Where = None,
    role: Annotated[str, Option(help="Role to profile: actor, rollout, critic, controller, ...")] = "actor",
    seconds: Annotated[float, Option(min=0.1, max=600, help="Length of the profile in seconds.")] = 20.0,
    form: Annotated[
        str,
        Option("--format", metavar="FORMAT", help="torch writes a Chrome trace; speedscope and flamegraph use py-spy."),
    ] = "torch",
    out: Annotated[Path, Option(metavar="DIR", help="Folder for the files.")] = Path("profile"),
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Profile the processes of a role while they work, and save the files on this machine. The run continues.

    A torch trace shows operators and CUDA kernels; open it on ui.perfetto.dev. Torch's profiler slows the processes down.
    py-spy shows where Python spends its time. If this command ends early, the profiler is stopped.

    \b
    Examples:
      rollcall profile runs/gsm8k --role actor --seconds 20
      rollcall profile runs/gsm8k --role rollout --seconds 5 --out slow
      rollcall profile runs/gsm8k --role controller --format flamegraph
    """
    from rollcall.launch.processes import FORMATS, find_target, profile_role

    if form not in FORMATS:
        raise ValueError(f"--format {form} is not known; use {', '.join(FORMATS)}")
    found = profile_role(find_target(target, cluster=cluster), role=role, seconds=seconds, kind=form, out=out)
    answer(found, _show_files, as_json=as_json, failed=found.failed)


def _show_files(found: Result) -> None:
    for path in found.files:
        print(path)
    for whom, why in found.failed.items():
        say(f"{whom}: {why}")


def debug(
    where: Annotated[
        str | None,
        Argument(
            metavar="[RUN_DIR|CLUSTER]",
            help="A run's directory, or the name of a cluster. Without it: the cluster of this node.",
        ),
    ] = None,
    number: Annotated[
        int | None,
        Argument(metavar="[NUMBER]", help="Attach this terminal to the process with this number in the list."),
    ] = None,
    go_on: Annotated[
        bool, Option("--continue", help="Let the process continue. Without NUMBER: all waiting processes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the processes of a run that are waiting in the debugger, or attach this terminal to one of them.

    A process waits at a breakpoint() or, with `rollcall train --post-mortem`, where it raised an exception. The prompt is
    Python's pdb: `continue` resumes the process, and `quit` or Ctrl-C leaves it waiting.

    \b
    Examples:
      rollcall debug                       what is waiting on this cluster
      rollcall debug 2                     attach to process number 2
      rollcall debug runs/gsm8k            what is waiting in this run
      rollcall debug runs/gsm8k 1
      rollcall debug runs/gsm8k --continue
    """
    if where is not None and where.isdecimal() and number is None and not Path(where).is_dir():
        where, number = None, int(where)
    from rollcall.launch.processes import find_waiting

    waiting = find_waiting(where)
    if number is None and not go_on:
        found = {"waiting": [one.as_json() for one in waiting]}
        answer(found, lambda _: _show_waiting(waiting, where=where), as_json=as_json)
        return
    chosen = waiting if number is None else [_chosen(waiting, number)]
    for one in chosen:
        _attach(one, where=where, typed=["continue"] if go_on else [])
    if not chosen:
        say("no process is waiting")


def _chosen(waiting: list[Waiting], number: int) -> Waiting:
    found = [one for one in waiting if one.number == number]
    if len(found) == 1:
        return found[0]
    if found:
        what = f"processes with number {number} are waiting in several runs ({', '.join(one.run for one in found)})"
        raise ClusterError(f"{what}; name one of them: rollcall debug RUN_DIR {number}")
    there = ", ".join(str(one.number) for one in waiting) or "none"
    what = f"no process with number {number} is waiting; the waiting ones are: {there}"
    raise ClusterError(f"{what}. It may have continued or ended in the meantime")


def _attach(waits: Waiting, *, where: str | None, typed: list[str]) -> None:
    from rollcall.process.debug.attach import End, converse, reach

    connection = reach(waits)
    if not typed:
        what = f"{waits.who}, a process of {waits.run or 'a script'}"
        say(f"this is {what}; `continue` resumes it, and `quit` leaves it waiting")
    with connection:
        end = converse(connection, typed=typed)
    again = " ".join(["rollcall debug", *([where] if where else []), str(waits.number)])
    if end is End.GOES:
        say(f"{waits.who} continues")
    elif end is End.LEFT:
        say(f"{waits.who} is still waiting; attach again with `{again}`, or let it continue with `{again} --continue`")
    else:
        why = "another terminal is attached to it" if end is End.BUSY else "the connection was lost"
        say(f"{waits.who}: {why}; try again with `{again}`")
        raise typer.Exit(FAILED)


def _show_waiting(waiting: list[Waiting], *, where: str | None) -> None:
    if not waiting:
        print(f"no process is waiting in the debugger{f' in {where}' if where else ''}")
        return
    rows = [("NUMBER", "WHO", "AT", "WHY", "SINCE", "RUN")]
    for one in waiting:
        since = format_duration(max(time.time() - one.since, 0.0))
        rows.append((str(one.number), one.who, one.where, visible(one.why), since, one.run))
    print_table(rows)
    print(f"attach with `rollcall debug {f'{where} ' if where else ''}{waiting[0].number}`")
