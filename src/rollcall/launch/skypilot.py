"""`rollcall launch skypilot`: a SkyPilot task. SkyPilot finds the machines and runs one command on each of them.

Rank and addresses come from the variables that SkyPilot sets. As a managed job, the task starts again after a preemption, and
the run resumes from its run directory, which has to outlive the machines (a bucket, a volume).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rollcall.config.launch import SkypilotSection
from rollcall.launch.record import LaunchRecord, Part
from rollcall.launch.rendered import Command, Rendered, RenderedFile, yaml_text
from rollcall.launch.script import node_lines
from rollcall.launch.target import RUN_FILE, Request
from rollcall.launch.token import launch_token
from rollcall.launch.tool import ask, need_tool, run, watch
from rollcall.worker_env.node_shell import TOKEN

TASK = "task.yaml"
FOLDER = ".rollcall-run"  # in the home folder of each node
INSTALL = "install it with `pip install skypilot` (with the extras of your clouds)"
HEAD = '$(printf "%s\\n" "$SKYPILOT_NODE_IPS" | head -n 1)'


class Skypilot:
    name = "skypilot"

    def render(self, request: Request) -> Rendered:
        section = _section(request)
        secrets = [TOKEN, *section.secrets]
        options = [word for name in secrets for word in ("--secret", name)]
        start = (
            ("sky", "jobs", "launch", "--yes", "--detach-run", "--name", request.name)
            if section.managed
            else ("sky", "launch", "--yes", "--detach-run", "--cluster", request.name)
        )
        command = Command(words=(*start, *options, str(request.folder / TASK)), what="start the task")
        text = yaml_text(_task(request, section))
        return Rendered(
            files=(request.run_file, RenderedFile(name=TASK, text=text)),
            commands=(command,),
            notes=_notes(request, section),
        )

    def validate(self, rendered: Rendered, folder: Path) -> str:
        need_tool("sky", install=INSTALL)
        return "SkyPilot checks the task when it starts it"

    def start(self, request: Request, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        managed = _section(request).managed
        kind = "managed job" if managed else "cluster"
        record = replace(record, facts={"managed": "yes" if managed else "no"})
        record = record.with_part(Part(kind=kind, where="sky")).save()
        if not (managed and _is_queued(record.name)):  # `sky launch` of a cluster that exists reuses it
            run(rendered.commands[0], env={TOKEN: launch_token(request.folder)}, cwd=request.cwd)
        return record.with_part(Part(kind=kind, where="sky", id=record.name)).save()

    def follow(self, record: LaunchRecord) -> int:
        return watch(Command(words=(*_logs(record), "--follow"), what="follow the log"))

    def logs(self, record: LaunchRecord) -> None:
        watch(Command(words=(*_logs(record), "--no-follow"), what="read the log"))

    def status(self, record: LaunchRecord) -> str:
        words = ("sky", "jobs", "queue") if _is_managed(record) else ("sky", "status", record.name)
        lines = ask(Command(words=words, what="ask SkyPilot for its state"), may_fail=True).splitlines()
        return next((line.strip() for line in lines if record.name in line.split()), "SkyPilot does not know it")

    def stop(self, record: LaunchRecord) -> None:
        words = (
            ("sky", "jobs", "cancel", "--yes", "--name", record.name)
            if _is_managed(record)
            else ("sky", "down", "--yes", record.name)
        )
        run(Command(words=words, what="end the task"))


def _section(request: Request) -> SkypilotSection:
    assert request.launch.skypilot is not None  # make_request refuses a run file without it
    return request.launch.skypilot


def _task(request: Request, section: SkypilotSection) -> dict[str, Any]:
    lines = node_lines(
        run_file=f'"$HOME"/{FOLDER}/{RUN_FILE}',
        cluster=request.name,
        head=HEAD,
        more='--rank "$SKYPILOT_NODE_RANK" --num-nodes "$SKYPILOT_NUM_NODES"',  # before any variable of another launcher
        activate=section.activate,
        env={**request.node_env, **section.env},
    )
    task: dict[str, Any] = {
        "name": request.name,
        "num_nodes": request.cluster.num_nodes,
        "resources": dict(section.resources),
        "secrets": dict.fromkeys([TOKEN, *section.secrets]),
        "file_mounts": {f"~/{FOLDER}/{RUN_FILE}": str(request.folder / RUN_FILE), **section.file_mounts},
        "setup": "\n".join(["set -e", *section.setup, ""]) if section.setup else None,
        "run": "\n".join(lines) + "\n",
    }
    if section.workdir is not None:
        task["workdir"] = str(request.cwd / section.workdir)
    return {key: value for key, value in task.items() if value not in (None, {})}


def _notes(request: Request, section: SkypilotSection) -> tuple[str, ...]:
    if not section.managed:
        return ()
    return (
        f"after a preemption the run resumes from run.dir={request.config.run.dir}: keep it on a bucket or a volume",
    )


def _is_managed(record: LaunchRecord) -> bool:
    return record.facts.get("managed") == "yes"


def _is_queued(name: str) -> bool:
    queue = ask(Command(words=("sky", "jobs", "queue", "--skip-finished"), what="list the managed jobs"), may_fail=True)
    return any(name in line.split() for line in queue.splitlines())


def _logs(record: LaunchRecord) -> tuple[str, ...]:
    return ("sky", "jobs", "logs", "--name", record.name) if _is_managed(record) else ("sky", "logs", record.name)
