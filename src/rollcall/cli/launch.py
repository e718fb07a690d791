"""`rollcall launch`: get nodes from ssh, Slurm, SkyPilot, dstack or KubeRay, and run a run file on them. `rollcall ssh` and
`rollcall tunnel`: run commands on a launch's hosts, and forward its dashboard to this machine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from rollcall.base.stop import heed
from rollcall.base.wait import say
from rollcall.base.words import visible
from rollcall.cli import FAILED, Json, Overrides, RunFile, answer, local_time, print_table, read_run, reported
from rollcall.config.launch import describe_targets

if TYPE_CHECKING:
    from rollcall.launch.record import LaunchRecord
    from rollcall.launch.rendered import Rendered

TARGETS = describe_targets()
Name = Annotated[
    str | None, Argument(metavar="[NAME]", help="Name of the launch. Default: the only launch from this machine.")
]


class _Targets(TyperGroup):
    """Lists the existing targets if the user names an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            ctx.fail(f"{args[0]!r} is not a target; use one of {', '.join(TARGETS)}.")
        return super().resolve_command(ctx, args)


launch = typer.Typer(
    cls=_Targets,
    help="Get nodes and run a run file on them: rollcall launch TARGET run.yaml.",
    no_args_is_help=True,
    add_completion=False,
)


def _launch(
    target: str,
    file: RunFile = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Print the rendered files, the commands, and any problems that prevent a start; start nothing.",
        ),
    ] = False,
    wait: Annotated[bool, Option("--wait", help="Follow the run's log and exit with its status.")] = False,
    name: Annotated[str | None, Option(metavar="NAME", help="Name of this launch. Default: the run's name.")] = None,
    as_json: Json = False,
) -> None:
    from rollcall.launch.launch import get_target, make_request, start
    from rollcall.launch.record import check_name, default_name

    if wait and as_json and not dry_run:
        raise typer.BadParameter("--wait prints the run's log on stdout, and --json one object; use only one of them")
    config = read_run(file, overrides)
    chosen = get_target(target)
    problems: list[str] | None = [] if dry_run else None
    name = check_name(name or default_name(config.run.name))
    request = make_request(config, target=target, name=name, cwd=Path.cwd(), problems=problems)
    rendered = replace(chosen.render(request), problems=tuple(problems or ()))
    if dry_run:
        answer(rendered, lambda _: print(shown(rendered, request.folder)), as_json=as_json)
        raise typer.Exit(FAILED if rendered.problems else 0)
    for note in rendered.notes:
        say(f"note: {note}")
    with heed():  # a closed terminal or SIGTERM stops a launch as Ctrl-C does
        record = start(chosen, request, rendered)
    how = f"check on it with `rollcall launch status {name}`, or end it with `rollcall launch down {name}`"
    say(f"started {name!r}; {how}")
    if as_json:
        print(json.dumps(_facts(record)))
    if wait:
        raise typer.Exit(chosen.follow(record))


def _facts(record: LaunchRecord) -> dict[str, str]:
    known = record.model_dump(mode="json", include={"name", "target", "state", "run_dir", "started"})
    return {**known, "folder": str(record.folder)}


def shown(rendered: Rendered, folder: Path) -> str:
    """Format for a person: each file with its path, then the commands in order."""
    parts = [f"# file {folder / name}\n{text.rstrip()}\n" for name, text in rendered.files.items()]
    commands = [f"# {each.what}\n{each}" for each in rendered.commands]
    notes = [f"# note: {note}" for note in rendered.notes]
    problems = [f"# problem: {problem}" for problem in rendered.problems]
    return "\n".join([*parts, *commands, *notes, *problems])


def init(target: Annotated[str, Argument(metavar="TARGET", help=f"One of {', '.join(TARGETS)}.")]) -> None:
    """Print a commented `launch:` section to fill in.

    \b
    Example:
      rollcall launch init slurm >> run.yaml
    """
    from rollcall.launch.launch import get_target

    get_target(target)
    print((files("rollcall.launch") / "sections" / f"{target}.yaml").read_text(), end="")


def down(name: Annotated[str, Argument(metavar="NAME", help="Name of the launch.")]) -> None:
    """End everything that a launch started, and nothing else. The run saves first if the target allows it.

    \b
    Example:
      rollcall launch down gsm8k
    """
    from rollcall.launch.launch import stop

    stop(name)
    print(f"{name!r} is down")


def list_launches(as_json: Json = False) -> None:
    """List what was launched from this machine, the newest first, with the state that the target's own tool reports.

    \b
    Example:
      rollcall launch list
    """
    from rollcall.launch.launch import state_of
    from rollcall.launch.record import all_records

    records = all_records(strict=False)
    with ThreadPoolExecutor(len(records) or 1) as pool:
        now = list(zip(records, pool.map(state_of, records), strict=True))
    answer({"launches": [{**_facts(each), "told": told} for each, told in now]}, lambda _: _show(now), as_json=as_json)


def _show(now: list[tuple[LaunchRecord, str]]) -> None:
    if not now:
        say("nothing was launched from this machine; `rollcall launch TARGET run.yaml` launches a run")
        return
    rows = [(each.name, each.target, local_time(each.started), visible(each.run_dir), told) for each, told in now]
    print_table([("NAME", "TARGET", "SINCE", "RUN DIR", "NOW"), *rows])


def status(name: Name = None, as_json: Json = False) -> None:
    """Show the state of a launch, as the target's own tool reports it.

    \b
    Examples:
      rollcall launch status
      rollcall launch status gsm8k --json
    """
    from rollcall.launch.launch import get_target
    from rollcall.launch.record import named_record

    record = named_record(name)
    told = visible(get_target(record.target).status(record))
    line = f"{record.name} ({record.target}, {record.state} {local_time(record.started)}): {told}"
    answer({**_facts(record), "told": told}, lambda _: print(line), as_json=as_json)


def logs(
    name: Name = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
) -> None:
    """Print the log of a launch's run.

    \b
    Example:
      rollcall launch logs gsm8k --follow
    """
    from rollcall.launch.launch import get_target
    from rollcall.launch.record import named_record

    record = named_record(name)
    target = get_target(record.target)
    if follow:
        raise typer.Exit(target.follow(record))
    target.logs(record)


def ssh(
    where: Annotated[str, Argument(metavar="all|HOST", help="All hosts of the launch, or one of them.")],
    command: Annotated[
        list[str],
        Argument(
            metavar="COMMAND", help="After `--`: a command with its arguments, or one argument with a line of shell."
        ),
    ],
    name: Annotated[
        str | None, Option(metavar="NAME", help="Name of the launch. Default: the only launch with ssh.")
    ] = None,
) -> None:
    """Run a command on one host of a launch, or on all of its hosts at once.

    The command runs in the environment of the nodes, where `rollcall` acts on the launch's cluster. Each line of output
    begins with the host's name. The exit status is 1 if the command failed on a host.

    \b
    Examples:
      rollcall ssh all -- nvidia-smi
      rollcall ssh node1 -- rollcall status
      rollcall ssh all --name gsm8k -- 'df -h /local | tail -1'
    """
    from rollcall.launch.record import named_record
    from rollcall.launch.ssh.machines import run_there

    problems = run_there(named_record(name, target="ssh"), where=where, command=command)
    for problem in problems:
        say(problem)
    if problems:
        raise typer.Exit(FAILED)


def tunnel(
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="Name of the launch. Default: the only launch with ssh.")
    ] = None,
    port: Annotated[int | None, Option(min=1, max=65535, help="Port on this machine. Default: a free port.")] = None,
) -> None:
    """Forward the dashboard of a launch, and the page of its run, to ports on this machine until Ctrl-C.

    The dashboard's address works in a browser and with `rollcall job ... --address`; both need the launch's token. If the
    run has trainer.page=true, the address of its page is printed once the run has started. That address works only once.

    \b
    Examples:
      rollcall tunnel
      rollcall tunnel gsm8k --port 8265
    """
    from rollcall.launch.record import named_record
    from rollcall.launch.ssh.tunnel import hold_tunnel

    hold_tunnel(named_record(name, target="ssh"), local_port=port)


for _target, _where in TARGETS.items():
    _start = partial(_launch, _target)
    _start.__doc__ = f"""Start a run on {_where}.

    \b
    Examples:
      rollcall launch init {_target} >> run.yaml
      rollcall launch {_target} run.yaml --dry-run
      rollcall launch {_target} run.yaml --wait
    """
    launch.command(_target)(reported(_start))
for _name, _command in {"init": init, "down": down, "list": list_launches, "status": status, "logs": logs}.items():
    launch.command(_name)(reported(_command))
