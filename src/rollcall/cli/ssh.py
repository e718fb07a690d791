"""`rollcall ssh` and `rollcall tunnel`: the hosts of a launch, and its dashboard on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from rollcall.cli import FAILED
from rollcall.wait import say


def ssh(
    where: Annotated[str, typer.Argument(metavar="all|HOST", help="All hosts of the launch, or one of them.")],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="After `--`: a command with its arguments, or one argument with a line of shell."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the launch. Default: the only one with ssh.")
    ] = None,
) -> None:
    """Run a command on the hosts of a launch, on all of them at once.

    It runs in the environment of the nodes, and `rollcall` there means the cluster of the launch. Each line of its output has
    the host's name in front. The exit status is 1 if the command failed on a host.

    \b
    Examples:
      rollcall ssh all -- nvidia-smi
      rollcall ssh node1 -- rollcall status
      rollcall ssh all --name gsm8k -- 'df -h /local | tail -1'
    """
    from rollcall.launch.record import named_record
    from rollcall.launch.ssh.run_there import run_there

    problems = run_there(named_record(name, target="ssh"), where=where, command=command)
    for problem in problems:
        say(problem)
    if problems:
        raise typer.Exit(FAILED)


def tunnel(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the launch. Default: the only one with ssh.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port on this machine. Default: one that is free.")
    ] = None,
) -> None:
    """Forward the dashboard of a launch to a port of this machine, until Ctrl-C, and the page of its run to another.

    The first address works with `rollcall job ... --address` and in a browser. Both need the token of the launch. The second is there
    if the run has trainer.page=true, as soon as it runs; it works once.

    \b
    Examples:
      rollcall tunnel
      rollcall tunnel gsm8k --port 8265
    """
    from rollcall.launch.record import named_record
    from rollcall.launch.ssh.jobs import hold_tunnel

    hold_tunnel(named_record(name, target="ssh"), local_port=port)
