"""`rollcall launch dstack`: a dstack task over several nodes. dstack finds the machines and runs the commands on each of them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from rollcall.config.launch import DstackSection
from rollcall.launch.record import LaunchRecord, Part
from rollcall.launch.rendered import Command, Rendered, RenderedFile, yaml_text
from rollcall.launch.script import JOIN_S, node_lines
from rollcall.launch.target import RUN_FILE, Request
from rollcall.launch.token import launch_token
from rollcall.launch.tool import ask_json, need_tool, refuse_others, run, watch
from rollcall.worker_env.node_shell import TOKEN

TASK = "task.dstack.yml"
THERE = "/tmp/rollcall-run/run.yaml"  # in the container
ENDED = ("terminated", "failed", "done")
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
        active = _is_active(_run(record.name))
        if active:
            refuse_others(_name(record.name), tool="dstack", record=record, where="dstack")
        record = record.with_part(Part(kind="run", where="dstack")).save()
        if not active:
            run(rendered.commands[0], env={TOKEN: launch_token(request.folder)}, cwd=request.cwd)
        return record.with_part(Part(kind="run", where="dstack", id=_name(record.name))).save()

    def follow(self, record: LaunchRecord) -> int:
        return watch(Command(words=("dstack", "attach", "--logs", _name(record.name)), what="follow the log"))

    def logs(self, record: LaunchRecord) -> None:
        watch(Command(words=("dstack", "logs", _name(record.name)), what="read the log"))

    def status(self, record: LaunchRecord) -> str:
        found = _run(record.name)
        if found is None:
            return "dstack does not list it among the runs that are active"
        return f"{found['status']} {found.get('status_message') or ''}".strip()

    def stop(self, record: LaunchRecord) -> None:
        if record.parts and _is_active(_run(record.name)):
            run(Command(words=("dstack", "stop", "--yes", _name(record.name)), what="end the task"))


def _section(request: Request) -> DstackSection:
    assert request.launch.dstack is not None  # make_request refuses a run file without it
    return request.launch.dstack


def _name(name: str) -> str:
    """dstack's names are in lower case, begin with a letter and have two characters or more.

    >>> _name("My_run"), _name("7"), _name("a")
    ('my-run', 'run-7', 'run-a')
    """
    text = name.lower().replace("_", "-")
    return text if text[0].isalpha() and len(text) > 1 else f"run-{text}"


def _task(request: Request, section: DstackSection) -> dict[str, Any]:
    lines = node_lines(
        run_file=shlex.quote(THERE),
        cluster=request.name,
        head='"$DSTACK_MASTER_NODE_IP"' if request.cluster.num_nodes > 1 else "127.0.0.1",
        more='--rank "$DSTACK_NODE_RANK" --num-nodes "$DSTACK_NODES_NUM"',  # before any variable of another launcher
        activate=section.activate,
        options=("--timeout", str(JOIN_S)),
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


def _run(name: str) -> dict[str, Any] | None:
    """What dstack knows of the run, if it is active or the last one that has ended."""
    listed = ask_json(Command(words=("dstack", "ps", "--json"), what="list dstack's runs"))
    return next((each for each in (listed or {}).get("runs", []) if each["run_spec"]["run_name"] == _name(name)), None)


def _is_active(found: dict[str, Any] | None) -> bool:
    return found is not None and found["status"] not in ENDED
