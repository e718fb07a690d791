"""`rollcall launch dstack`: a dstack task over several nodes. dstack finds the machines and runs the commands on each of them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from rollcall.config.launch import DstackSection
from rollcall.launch.record import LaunchRecord, Part
from rollcall.launch.rendered import Command, Rendered, RenderedFile, yaml_text
from rollcall.launch.script import node_lines
from rollcall.launch.target import RUN_FILE, Request
from rollcall.launch.token import launch_token
from rollcall.launch.tool import ask, need_tool, run, watch
from rollcall.worker_env.node_shell import TOKEN

TASK = "task.dstack.yml"
THERE = "/tmp/rollcall-run/run.yaml"  # in the container
INSTALL = "install it with `pip install dstack`"


class Dstack:
    name = "dstack"

    def render(self, request: Request) -> Rendered:
        words = ("dstack", "apply", "--yes", "--detach", "--force", "-f", str(request.folder / TASK))
        return Rendered(
            files=(request.run_file, RenderedFile(name=TASK, text=yaml_text(_task(request, _section(request))))),
            commands=(Command(words=words, what="start the task"),),
        )

    def validate(self, rendered: Rendered, folder: Path) -> str:
        need_tool("dstack", install=INSTALL)
        return "dstack checks the task when it starts it"

    def start(self, request: Request, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        record = record.with_part(Part(kind="run", where="dstack")).save()
        if not _line(record.name):
            run(rendered.commands[0], env={TOKEN: launch_token(request.folder)}, cwd=request.cwd)
        return record.with_part(Part(kind="run", where="dstack", id=record.name)).save()

    def follow(self, record: LaunchRecord) -> int:
        return watch(Command(words=("dstack", "attach", "--logs", _name(record.name)), what="follow the log"))

    def logs(self, record: LaunchRecord) -> None:
        watch(Command(words=("dstack", "logs", _name(record.name)), what="read the log"))

    def status(self, record: LaunchRecord) -> str:
        return _line(record.name) or "dstack does not list it among the runs that are active"

    def stop(self, record: LaunchRecord) -> None:
        if _line(record.name):
            run(Command(words=("dstack", "stop", "--yes", _name(record.name)), what="end the task"))


def _section(request: Request) -> DstackSection:
    assert request.launch.dstack is not None  # make_request refuses a run file without it
    return request.launch.dstack


def _name(name: str) -> str:
    """dstack's names are in lower case and begin with a letter.

    >>> _name("My_run")
    'my-run'
    """
    text = name.lower().replace("_", "-")
    return text if text[0].isalpha() else f"run-{text}"


def _task(request: Request, section: DstackSection) -> dict[str, Any]:
    lines = node_lines(
        run_file=shlex.quote(THERE),
        cluster=request.name,
        head='"$DSTACK_MASTER_NODE_IP"' if request.cluster.num_nodes > 1 else "127.0.0.1",
        more='--rank "$DSTACK_NODE_RANK" --num-nodes "$DSTACK_NODES_NUM"',  # before any variable of another launcher
        activate=section.activate,
        env={**request.node_env, **section.env},
        before=section.setup,
        guard=_guard,
    )
    task: dict[str, Any] = {
        "type": "task",
        "name": _name(request.name),
        "nodes": request.cluster.num_nodes,
        "image": section.image,
        "env": [TOKEN, *section.secrets],
        "files": [{"local_path": str(request.folder / RUN_FILE), "path": THERE}],
        "commands": ["\n".join(lines) + "\n"],
        "ports": [str(port) for port in section.ports],
        "resources": dict(section.resources),
        "volumes": list(section.volumes),
    }
    return {key: value for key, value in task.items() if value not in (None, {}, [])}


def _guard(line: str) -> str:
    """dstack reads ``$$`` and ``${{ ... }}`` in commands itself. In quotes, a ``$`` that stands apart is the shell's alone.

    >>> _guard("export A='$$ ${{x}}'")
    "export A='$''$ $''{{x}}'"
    """
    return re.sub(r"\$(?=\$|\{\{)", "$''", line)


def _line(name: str) -> str:
    """dstack's own line about the run, if it is active."""
    lines = ask(Command(words=("dstack", "ps"), what="list dstack's runs"), may_fail=True).splitlines()
    return next((line.strip() for line in lines if _name(name) in line.split()), "")
