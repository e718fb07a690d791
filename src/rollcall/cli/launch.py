"""`rollcall launch`: get nodes from ssh, Slurm, SkyPilot, dstack or KubeRay, and run a run file on them."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcall.cli import Json, Overrides, RunFile, reported, split_arguments
from rollcall.stop import heed
from rollcall.wait import say
from rollcall.words import visible

if TYPE_CHECKING:
    from rollcall.launch.rendered import Rendered

TARGETS = {
    "ssh": "machines that ssh reaches",
    "slurm": "a Slurm cluster",
    "skypilot": "clouds and clusters through SkyPilot",
    "dstack": "dstack",
    "kuberay": "Kubernetes with the KubeRay operator",
}
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the launch.")]

launch = typer.Typer(
    help="Get nodes and run a run file on them: rollcall launch TARGET run.yaml.",
    no_args_is_help=True,
    add_completion=False,
)


def _launch(
    target: str,
    file: str | None,
    overrides: list[str] | None,
    *,
    dry_run: bool,
    wait: bool,
    name: str | None,
    as_json: bool,
) -> None:
    from rollcall.config import load_config
    from rollcall.launch.launch import make_request, start
    from rollcall.launch.record import check_name
    from rollcall.launch.targets import get_target

    config = load_config(*split_arguments(file, overrides))
    chosen = get_target(target)
    request = make_request(
        config, target=target, name=check_name(name or default_name(config.run.name)), cwd=Path.cwd()
    )
    rendered = chosen.render(request)
    if dry_run:
        print(json.dumps(rendered.as_json()) if as_json else shown(rendered, request.folder))
        return
    for note in rendered.notes:
        say(f"note: {note}")
    with heed():  # a closed terminal or SIGTERM ends a start as Ctrl-C does
        record = start(chosen, request, rendered)
    say(
        f"started {record.name!r}; look with `rollcall launch status {record.name}`, end it with `rollcall launch down {record.name}`"
    )
    if wait:
        raise typer.Exit(chosen.follow(record))


def _verb(target: str) -> None:
    def run(
        file: RunFile = None,
        overrides: Overrides = None,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Print the rendered files and the commands; start nothing.")
        ] = False,
        wait: Annotated[bool, typer.Option("--wait", help="Follow the run's log and end with its status.")] = False,
        name: Annotated[
            str | None, typer.Option(metavar="NAME", help="Name of this launch. Default: the run's name.")
        ] = None,
        as_json: Json = False,
    ) -> None:
        _launch(target, file, overrides, dry_run=dry_run, wait=wait, name=name, as_json=as_json)

    run.__doc__ = f"""Start a run on {TARGETS[target]}.

    \b
    Examples:
      rollcall launch init {target} >> run.yaml
      rollcall launch {target} run.yaml --dry-run
      rollcall launch {target} run.yaml --wait
    """
    launch.command(target)(reported(run))


def default_name(run: str) -> str:
    """The run's name, as far as a name of a cluster can have it.

    >>> default_name("my first run!")
    'my-first-run'
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "-", run)[:32].strip("-_") or "run"


def shown(rendered: Rendered, folder: Path) -> str:
    """For a person: each file with its path, then the commands in their order."""
    parts = [f"# file {folder / file.name}\n{file.text.rstrip()}\n" for file in rendered.files]
    commands = [f"# {each.what}{f' (on {each.host})' if each.host else ''}\n{each}" for each in rendered.commands]
    notes = [f"# note: {note}" for note in rendered.notes]
    return "\n".join([*parts, *commands, *notes])


def init(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=f"One of {', '.join(TARGETS)}.")],
) -> None:
    """Print a commented `launch:` section to fill in.

    \b
    Example:
      rollcall launch init slurm >> run.yaml
    """
    from rollcall.launch.targets import get_target

    get_target(target)
    print((files("rollcall.launch") / "sections" / f"{target}.yaml").read_text(), end="")


def down(name: Name) -> None:
    """End everything that a launch started, and nothing else. The run saves first.

    \b
    Example:
      rollcall launch down gsm8k
    """
    from rollcall.launch.launch import stop

    stop(name)
    print(f"{name!r} is down")


def list_launches(as_json: Json = False) -> None:
    """List what was launched from this machine, the newest first.

    \b
    Example:
      rollcall launch list
    """
    from rollcall.launch.record import all_records

    records = all_records()
    if as_json:
        rows = [
            {
                "name": each.name,
                "target": each.target,
                "state": each.state,
                "run_dir": each.run_dir,
                "started": each.started,
            }
            for each in records
        ]
        print(json.dumps({"launches": rows}))
        return
    for each in records:
        print(f"{each.name:<24} {each.target:<9} {each.state:<9} {each.started}  {each.run_dir}")


def status(name: Name) -> None:
    """Say what a launch is doing, as the target's own tool tells it.

    \b
    Example:
      rollcall launch status gsm8k
    """
    from rollcall.launch.record import get_record
    from rollcall.launch.targets import get_target

    record = get_record(name)
    print(
        f"{record.name} ({record.target}, {record.state} {record.started}): {visible(get_target(record.target).status(record))}"
    )


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
) -> None:
    """Print the log of a launch's run.

    \b
    Example:
      rollcall launch logs gsm8k --follow
    """
    from rollcall.launch.record import get_record
    from rollcall.launch.targets import get_target

    record = get_record(name)
    target = get_target(record.target)
    if follow:
        raise typer.Exit(target.follow(record))
    target.logs(record)


for _target in TARGETS:
    _verb(_target)
for _name, _command in {"init": init, "down": down, "list": list_launches, "status": status, "logs": logs}.items():
    launch.command(_name)(reported(_command))
