"""`rollcall launch dstack`: a dstack task over several nodes. dstack finds the machines and runs the commands on each of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollcall.config.launch import DstackSection
from rollcall.launch.errors import ElsewhereError
from rollcall.launch.record import LaunchRecord, Part, launch_token
from rollcall.launch.rendered import Command, Rendered, RenderedFile, yaml_text
from rollcall.launch.script import node_lines
from rollcall.launch.target import RUN_FILE, LaunchRequest
from rollcall.launch.tool import (
    ask_json,
    check_for_tool,
    is_own,
    leave_others,
    need_tool,
    refuse_others,
    run,
    unlike_slots,
    wait_until_ended,
    watch,
)
from rollcall.worker_env.node_shell import TOKEN

TASK = "task.dstack.yml"
THERE = "/tmp/rollcall-run/run.yaml"  # in the container
ENDED = ("terminated", "failed", "done")
PROJECT = "project"  # the fact that names dstack's
INSTALL = "install it with `pip install dstack`"


class Dstack:
    name = "dstack"

    def check(self, request: LaunchRequest) -> None:
        check_for_tool(request, target=self.name, image_key="launch.dstack.image")

    def render(self, request: LaunchRequest) -> Rendered:
        section = request.section(DstackSection)
        words = ("dstack", "apply", "--yes", "--detach", "--force", "-f", str(request.folder / TASK))
        return Rendered(
            files=(request.run_file, RenderedFile(name=TASK, text=yaml_text(_task(request, section)))),
            commands=(Command(words=words, what="start the task"),),
            notes=_notes(request, section),
        )

    def validate(self, rendered: Rendered, folder: Path) -> str:
        need_tool("dstack", install=INSTALL)
        return "dstack checks the task when it starts it"

    def in_use(self, record: LaunchRecord, names: Sequence[str]) -> Sequence[str]:
        found = _run(record)
        own = found is not None and is_own(record.parts[0], name=_name(record.name), id=found.id)
        return names if found is not None and own and found.is_active else ()

    def start(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        found = _run(record)
        active = found is not None and found.is_active
        if found is not None and active:
            refuse_others(_name(record.name), tool="dstack", record=record, where="dstack", id=found.id)
        record = replace(record, facts={**record.facts, PROJECT: _list().project})
        record = record.with_part(Part(kind="run", where="dstack")).save()
        if not active:
            run(rendered.commands[0], env={TOKEN: launch_token(request.folder)}, cwd=request.cwd)
        found = _run(record)
        id = found.id if found else ""
        return record.with_part(Part(kind="run", where="dstack", id=id or _name(record.name))).save()

    def follow(self, record: LaunchRecord) -> int:
        return watch(Command(words=("dstack", "attach", "--logs", _name(record.name)), what="follow the log"))

    def logs(self, record: LaunchRecord) -> None:
        watch(Command(words=("dstack", "logs", _name(record.name)), what="read the log"))

    def status(self, record: LaunchRecord) -> str:
        found = _run(record)
        if found is None:
            return "dstack does not list it among the runs that are active"
        return f"{found.status} {found.status_message or ''}".strip()

    def stop(self, record: LaunchRecord) -> None:
        name, found = _name(record.name), _run(record)
        if not record.parts or found is None or not found.is_active:
            return
        if not is_own(record.parts[0], name=name, id=found.id):
            leave_others(name, tool="dstack")
            return
        run(Command(words=("dstack", "stop", "--yes", name), what="end the task"))
        wait_until_ended(name, tool="dstack", runs=lambda: _runs_on(record, id=found.id), look="dstack ps")


def _runs_on(record: LaunchRecord, *, id: str) -> bool:
    """Whether this run of the name has machines still; another one may have taken its place."""
    found = _run(record)
    return found is not None and found.is_active and found.id == id


def _name(name: str) -> str:
    """dstack's names are in lower case, begin with a letter and have two characters or more.

    >>> _name("My_run"), _name("7"), _name("a")
    ('my-run', 'run-7', 'run-a')
    """
    text = name.lower().replace("_", "-")
    return text if text[0].isalpha() and len(text) > 1 else f"run-{text}"


def _task(request: LaunchRequest, section: DstackSection) -> dict[str, Any]:
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
        # The other nodes have nothing to do after the first one, whose status is the run's.
        "stop_criteria": "master-done" if request.cluster.num_nodes > 1 else None,
    }
    return {key: value for key, value in task.items() if value not in (None, {}, [])}


def _notes(request: LaunchRequest, section: DstackSection) -> tuple[str, ...]:
    wrong = unlike_slots(section.resources.get("gpu"), request.cluster, key="launch.dstack.resources.gpu")
    if section.volumes:
        return wrong
    lost = f"run.dir={request.config.run.dir} is lost with the machines"
    return (
        *wrong,
        f"{lost}: name a volume in launch.dstack.volumes, and put run.dir on it",
    )


def _guard(line: str) -> str:
    """dstack reads ``$$`` and ``${{ ... }}`` in commands itself. In quotes, a ``$`` that stands apart is the shell's alone.

    >>> _guard("export A='$$ ${{x}}'")
    "export A='$''$ $''{{x}}'"
    """
    return re.sub(r"\$(?=\$|\{\{)", "$''", line)


@dataclass(frozen=True, slots=True)
class _Spec:
    run_name: str | None


@dataclass(frozen=True, slots=True)
class _Run:
    """Of dstack's list of runs."""

    status: str
    run_spec: _Spec
    id: str = ""
    status_message: str | None = None

    @property
    def is_active(self) -> bool:
        return self.status not in ENDED


@dataclass(frozen=True, slots=True)
class _Runs:
    runs: list[_Run] = field(default_factory=list)
    project: str = ""


_RUNS = TypeAdapter(_Runs)


def _list() -> _Runs:
    return ask_json(Command(words=("dstack", "ps", "--json"), what="list dstack's runs"), _RUNS) or _Runs()


def _run(record: LaunchRecord) -> _Run | None:
    """What dstack knows of the run, if it is active or the last one that has ended."""
    listed, then = _list(), record.facts.get(PROJECT)
    if then and listed.project != then:  # which has no such run, and that would be taken for its end
        raise ElsewhereError(
            f"{record.name!r} was launched in dstack's project {then!r}, and now it has {listed.project!r}; run "
            f"`dstack project set-default {then}` first, or set DSTACK_PROJECT"
        )
    return next((each for each in listed.runs if each.run_spec.run_name == _name(record.name)), None)
