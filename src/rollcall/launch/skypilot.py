"""`rollcall launch skypilot`: a SkyPilot task. SkyPilot finds the machines and runs one command on each of them.

Rank and addresses come from the variables that SkyPilot sets. As a managed job, the task starts again after a preemption, and
the run resumes from its run directory, which has to outlive the machines (a bucket, a volume).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from rollcall.config.launch import SkypilotSection
from rollcall.launch.errors import LaunchError
from rollcall.launch.record import LaunchRecord, Part, launch_token
from rollcall.launch.rendered import Command, Rendered, RenderedFile, yaml_text
from rollcall.launch.script import node_lines
from rollcall.launch.target import RUN_FILE, LaunchRequest
from rollcall.launch.tool import (
    ask,
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

TASK = "task.yaml"
WHERE = "sky"
NO_JOBS = "No in-progress managed jobs"  # SkyPilot says so by failing while it has no controller for them
WHOLE = ("--tail", "0")  # of a log; SkyPilot prints its last 1,000 lines unless told
FOLDER = ".rollcall-run"  # in the home folder of each node
INSTALL = "install it with `pip install skypilot` (with the extras of your clouds)"
HEAD = '$(printf "%s\\n" "$SKYPILOT_NODE_IPS" | head -n 1)'


class Skypilot:
    name = "skypilot"

    def check(self, request: LaunchRequest) -> None:
        check_for_tool(request, target=self.name, image_key="launch.skypilot.resources.image_id")
        run_dir = request.config.run.dir
        for path, source in request.section(SkypilotSection).file_mounts.items():
            if isinstance(source, str) and "://" in source and run_dir.is_relative_to(path):
                raise LaunchError(
                    f"launch.skypilot.file_mounts has {path}: {source}, which SkyPilot copies to each node and never back, so "
                    f"run.dir={run_dir} would be lost with the machines; write `{path}: {{source: {source}, mode: MOUNT_CACHED}}`"
                )

    def render(self, request: LaunchRequest) -> Rendered:
        section = request.section(SkypilotSection)
        secrets = [TOKEN, *section.secrets]
        options = [word for name in secrets for word in ("--secret", name)]
        thing = _thing(managed=section.managed, name=request.name)
        words = (*thing.start, thing.name, *options, str(request.folder / TASK))
        command = Command(words=words, what="start the task")
        text = yaml_text(_task(request, section))
        return Rendered(
            files=(request.run_file, RenderedFile(name=TASK, text=text)),
            commands=(command,),
            notes=_notes(request, section),
        )

    def validate(self, rendered: Rendered, folder: Path) -> str:
        need_tool("sky", install=INSTALL)
        return "SkyPilot checks the task when it starts it"

    def in_use(self, record: LaunchRecord, names: Sequence[str]) -> Sequence[str]:
        thing = _of(record)
        own = [id for id in thing.find() if is_own(record.parts[-1], name=thing.name, id=id)]
        return names if thing.is_busy(own) else ()

    def start(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        thing = _thing(managed=request.section(SkypilotSection).managed, name=record.name)
        found = thing.find()
        for id in found:
            refuse_others(thing.name, tool="SkyPilot", record=record, where=WHERE, id=id)
        record = record.with_part(Part(kind=thing.kind, where=WHERE)).save()
        if not thing.is_busy(found):
            run(rendered.commands[0], env={TOKEN: launch_token(request.folder)}, cwd=request.cwd)
        return record.with_part(Part(kind=thing.kind, where=WHERE, id=thing.newest() or thing.name)).save()

    def follow(self, record: LaunchRecord) -> int:
        thing = _of(record)
        return watch(Command(words=(*thing.logs, thing.name, *WHOLE, "--follow"), what="follow the log"))

    def logs(self, record: LaunchRecord) -> None:
        thing = _of(record)
        watch(Command(words=(*thing.logs, thing.name, *WHOLE, "--no-follow"), what="read the log"))

    def status(self, record: LaunchRecord) -> str:
        return _of(record).status()

    def stop(self, record: LaunchRecord) -> None:
        for part in record.parts:
            thing = _thing(managed=part.kind == ManagedJob.kind, name=record.name)
            found = thing.find()
            own = [id for id in found if is_own(part, name=thing.name, id=id)]
            if own:
                _end(thing, own)
            if len(own) < len(found):
                leave_others(thing.name, tool="SkyPilot")


def _end(thing: ManagedJob | SkyCluster, ids: list[str]) -> None:
    words = (*thing.end, *_waiting_for_uploads(thing.end), *thing.named(ids))
    run(Command(words=words, what="end the task"))
    wait_until_ended(thing.name, tool="SkyPilot", runs=lambda: not set(ids).isdisjoint(thing.find()), look=thing.look)


@dataclass(frozen=True, slots=True)
class _Job:
    """Of SkyPilot's list of managed jobs."""

    job_id: int
    job_name: str | None
    status: str
    failure_reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Cluster:
    name: str
    status: str
    cluster_hash: str = ""  # new with every cluster, where SkyPilot tells it


@dataclass(frozen=True, slots=True)
class _Task:
    """Of the jobs on a cluster."""

    job_id: int
    status: str


_JOBS, _CLUSTERS = TypeAdapter(list[_Job]), TypeAdapter(list[_Cluster])
_QUEUES = TypeAdapter(dict[str, list[_Task]])


@dataclass(frozen=True, slots=True)
class ManagedJob:
    """SkyPilot restarts it after a preemption; its machines go when it ends."""

    name: str
    kind: ClassVar[str] = "managed job"
    look: ClassVar[str] = "sky jobs queue"
    # The name comes last.
    start: ClassVar[Sequence[str]] = ("sky", "jobs", "launch", "--yes", "--detach-run", "--name")
    logs: ClassVar[Sequence[str]] = ("sky", "jobs", "logs", "--name")
    end: ClassVar[Sequence[str]] = ("sky", "jobs", "cancel", "--yes")

    def named(self, ids: Sequence[str]) -> tuple[str, ...]:
        return tuple(ids)

    def find(self) -> list[str]:
        """The jobs of this name that have not ended."""
        return [str(job.job_id) for job in self._list("--all", "--skip-finished")]

    def newest(self) -> str | None:
        return max((str(job.job_id) for job in self._list("--all")), key=int, default=None)

    def is_busy(self, found: list[str]) -> bool:
        return bool(found)

    def status(self) -> str:
        newest = max(self._list("--all"), key=lambda job: job.job_id, default=None)
        return (
            "SkyPilot does not know it" if newest is None else f"{newest.status} {newest.failure_reason or ''}".strip()
        )

    def _list(self, *options: str) -> list[_Job]:
        words = ("sky", "jobs", "queue", *options, "--output", "json")
        jobs = ask_json(Command(words=words, what="list the managed jobs"), _JOBS, means_nothing=NO_JOBS)
        return [job for job in jobs or [] if job.job_name == self.name]


@dataclass(frozen=True, slots=True)
class SkyCluster:
    """It stays until it is taken down."""

    name: str
    kind: ClassVar[str] = "cluster"
    look: ClassVar[str] = "sky status"
    start: ClassVar[Sequence[str]] = ("sky", "launch", "--yes", "--detach-run", "--cluster")
    logs: ClassVar[Sequence[str]] = ("sky", "logs")
    end: ClassVar[Sequence[str]] = ("sky", "down", "--yes")

    def named(self, ids: Sequence[str]) -> tuple[str, ...]:
        return (self.name,)

    def find(self) -> list[str]:
        return [each.cluster_hash for each in self._list()]

    def newest(self) -> str | None:
        return next(iter(self.find()), None)

    def is_busy(self, found: list[str]) -> bool:
        """Whether the task runs there or waits to: `sky launch` would put a second one behind it."""
        return bool(found and self._tasks("--skip-finished"))

    def status(self) -> str:
        """That of the cluster and, where one can be asked, of its task: a cluster stays after its task has ended."""
        found = self._list()
        if not found:
            return "SkyPilot does not know it"
        newest = max(self._tasks() if found[0].status == "UP" else [], key=lambda task: task.job_id, default=None)
        return f"the cluster is {found[0].status}" + (f", its task {newest.status}" if newest else "")

    def _tasks(self, *options: str) -> list[_Task]:
        words = ("sky", "queue", self.name, *options, "--output", "json")
        return (ask_json(Command(words=words, what="list the cluster's jobs"), _QUEUES) or {}).get(self.name, [])

    def _list(self) -> list[_Cluster]:
        words = ("sky", "status", self.name, "--output", "json")
        clusters = ask_json(Command(words=words, what="ask SkyPilot for the cluster"), _CLUSTERS)
        return [each for each in clusters or [] if each.name == self.name]


def _thing(*, managed: bool, name: str) -> ManagedJob | SkyCluster:
    """SkyPilot's names begin with a letter."""
    return (ManagedJob if managed else SkyCluster)(name if name[0].isalpha() else f"run-{name}")


def _waiting_for_uploads(verb: Sequence[str]) -> tuple[str, ...]:
    """The option with which SkyPilot keeps machines until what the run wrote is in its bucket; older ones do not have it."""
    told = ask(Command(words=(*verb, "--help"), what="ask SkyPilot for its options"), may_fail=True)
    return ("--graceful",) if "--graceful " in told else ()


def _of(record: LaunchRecord) -> ManagedJob | SkyCluster:
    """What was started last."""
    if not record.parts:
        raise LaunchError(f"{record.name!r} has started nothing yet; run the same `rollcall launch` again")
    return _thing(managed=record.parts[-1].kind == ManagedJob.kind, name=record.name)


def _task(request: LaunchRequest, section: SkypilotSection) -> dict[str, Any]:
    lines = node_lines(
        run_file=f'"$HOME"/{FOLDER}/{RUN_FILE}',
        cluster=request.name,
        head=HEAD,
        more='--rank "$SKYPILOT_NODE_RANK" --num-nodes "$SKYPILOT_NUM_NODES"',  # before any variable of another launcher
        activate=section.activate,
        env={**request.node_env, **section.env},
    )
    task: dict[str, Any] = {
        "name": _thing(managed=section.managed, name=request.name).name,
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


def _notes(request: LaunchRequest, section: SkypilotSection) -> tuple[str, ...]:
    asked = section.resources.get("accelerators")
    wrong = unlike_slots(asked, request.cluster, key="launch.skypilot.resources.accelerators")
    if not section.managed:
        return wrong
    return (
        *wrong,
        f"after a preemption the run resumes from run.dir={request.config.run.dir}: keep it on a bucket or a volume",
    )
