"""`rollcall debug`: who has stopped at a breakpoint, and a terminal for one of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcall.cli import FAILED, Json, answer, print_table
from rollcall.errors import ClusterError
from rollcall.observe.progress import format_duration
from rollcall.wait import say
from rollcall.words import visible

if TYPE_CHECKING:
    from rollcall.debug.board import Waiting


def debug(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN_DIR|CLUSTER]",
            help="A run's directory, or the name of a cluster. Without it: the cluster of this node.",
        ),
    ] = None,
    number: Annotated[
        int | None, typer.Argument(metavar="[NUMBER]", help="Attach this terminal to that one of the list.")
    ] = None,
    go_on: Annotated[bool, typer.Option("--continue", help="Let it go on. With no NUMBER: all of them.")] = False,
    as_json: Json = False,
) -> None:
    """List the processes of a run that wait in the debugger, or attach this terminal to one of them.

    A process waits at a breakpoint(), or where it raised with `rollcall train --post-mortem`. The prompt is Python's pdb:
    `continue` lets the process go on, `quit` or Ctrl-C leave it waiting.

    \b
    Examples:
      rollcall debug                       who waits on this cluster
      rollcall debug 2                     attach to number 2
      rollcall debug runs/gsm8k            who waits in this run
      rollcall debug runs/gsm8k 1
      rollcall debug runs/gsm8k --continue
    """
    if where is not None and where.isdecimal() and number is None and not Path(where).is_dir():
        where, number = None, int(where)
    waiting = _waiting(where)
    if number is None and not go_on:
        found = {"waiting": [one.as_json() for one in waiting]}
        answer(found, lambda _: _show(waiting, where=where), as_json=as_json)
        return
    chosen = waiting if number is None else [_chosen(waiting, number, where=where)]
    for one in chosen:
        _attach(one, where=where, typed=["continue"] if go_on else [])
    if not chosen:
        say("nothing waits")


def _waiting(where: str | None) -> list[Waiting]:
    from rollcall.debug.attach import is_there
    from rollcall.debug.board import read_board

    if where is not None and ("/" in where or Path(where).is_dir()):
        if not Path(where).is_dir():
            raise ValueError(f"{where} is not a directory; give the run.dir of a run, or the name of a cluster")
        found = read_board(Path(where))
    else:
        found = _of_cluster(where)
    return [one for one in found if is_there(one)]


def _of_cluster(name: str | None) -> list[Waiting]:
    from rollcall.nodes.which import wished_cluster
    from rollcall.on_ray.connect import connect, disconnect
    from rollcall.on_ray.waiting import read_waiting

    cluster = wished_cluster(name)
    if cluster is None:
        raise ClusterError(
            "this machine is not a node of a cluster, so name a run by its directory: `rollcall debug RUN_DIR`"
        )
    connect(cluster, log_to_driver=False)
    try:
        return read_waiting()
    finally:
        disconnect()


def _chosen(waiting: list[Waiting], number: int, *, where: str | None) -> Waiting:
    found = [one for one in waiting if one.number == number]
    if len(found) == 1:
        return found[0]
    if found:
        runs = ", ".join(one.run for one in found)
        raise ClusterError(f"number {number} waits in several runs ({runs}); name one: rollcall debug RUN_DIR {number}")
    there = ", ".join(str(one.number) for one in waiting) or "none"
    raise ClusterError(f"number {number} does not wait; those that do: {there}. It may have gone on or ended since")


def _attach(waits: Waiting, *, where: str | None, typed: list[str]) -> None:
    from rollcall.debug.attach import End, converse, reach

    connection = reach(waits)
    if not typed:
        say(f"{waits.who}, process of {waits.run or 'a script'}; `continue` lets it go on, `quit` leaves it waiting")
    with connection:
        end = converse(connection, typed=typed)
    again = " ".join(["rollcall debug", *([where] if where else []), str(waits.number)])
    if end is End.GOES:
        say(f"{waits.who} goes on")
    elif end is End.LEFT:
        say(f"{waits.who} still waits; attach again with `{again}`, or let it go on with `{again} --continue`")
    else:
        why = "another terminal is attached to it" if end is End.BUSY else "the connection was lost"
        say(f"{waits.who}: {why}; try again with `{again}`")
        raise typer.Exit(FAILED)


def _show(waiting: list[Waiting], *, where: str | None) -> None:
    if not waiting:
        print(f"nothing waits in the debugger{f' in {where}' if where else ''}")
        return
    rows = [("NUMBER", "WHO", "AT", "WHY", "SINCE", "RUN")]
    for one in waiting:
        since = format_duration(max(time.time() - one.since, 0.0))
        rows.append((str(one.number), one.who, one.where, visible(one.why), since, one.run))
    print_table(rows)
    print(f"attach with `rollcall debug {f'{where} ' if where else ''}{waiting[0].number}`")
