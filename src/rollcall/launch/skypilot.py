"""`rollcall launch skypilot`: starts a SkyPilot task. SkyPilot finds the machines and runs one command on each of them.

Rank and addresses come from the variables that SkyPilot sets. A managed job is restarted after a preemption, and the run
resumes from its run directory, which must outlive the machines (in a bucket or on a volume). Without ``managed``, the task runs on a
cluster of the same name, which stays up until it is taken down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollcall.config.launch import SkypilotSection
from rollcall.launch.record import LaunchError, LaunchRecord
from rollcall.launch.rendered import Command, Rendered, yaml_text
from rollcall.launch.target import RUN_FILE, LaunchRequest, Seen, ToolTarget, ask, ask_json, run
from rollcall.nodes.state import TOKEN

TASK = "task.yaml"
JOB, CLUSTER = "managed job", "cluster"
ENDED = ("SUCCEEDED", "CANCELLED", "FAILED")  # matched as prefixes, for states such as FAILED_SETUP
FOLDER = ".rollcall-run"  # in each node's home folder


class Skypilot(ToolTarget):
    name = "skypilot"
    title = "SkyPilot"
    look = "sky status` and `sky jobs queue"
    image_key = "launch.skypilot.resources.image_id"

    def check(self, request: LaunchRequest) -> None:
        super().check(request)
        run_dir = request.config.run.dir
        for path, source in request.section(SkypilotSection).file_mounts.items():
            if isinstance(source, str) and "://" in source and run_dir.is_relative_to(path):
                raise LaunchError(
                    f"launch.skypilot.file_mounts has {path}: {source}, which SkyPilot copies to each node and never back, so "
                    f"run.dir={run_dir} would be deleted with the machines; write `{path}: {{source: {source}, mode: MOUNT_CACHED}}`"
                )

    def render(self, request: LaunchRequest) -> Rendered:
        section, name = request.section(SkypilotSection), self.tool_name(request.name)
        start = ("jobs", "launch", "--name") if section.managed else ("launch", "--cluster")
        accelerators = section.resources.get("accelerators")
        secrets = [word for name in (TOKEN, *section.secrets) for word in ("--secret", name)]
        words = ("sky", *start, name, "--yes", "--detach-run", *secrets, str(request.folder / TASK))
        kept = f"after a preemption, the run resumes from run.dir={request.config.run.dir}; put it in a bucket or on a volume"
        return Rendered(
            files={RUN_FILE: request.run_file, TASK: yaml_text(_task(request, section, name=name))},
            commands=(Command(words=words, what="start the task"),),
            notes=(
                *request.unlike_slots(accelerators, key="launch.skypilot.resources.accelerators"),
                *([kept] if section.managed else []),
                *([] if section.workdir else request.left_here(advice="set launch.skypilot.workdir to their folder")),
            ),
        )

    def tool_name(self, name: str) -> str:
        return name if name[0].isalpha() else f"run-{name}"  # SkyPilot's names start with a letter

    def kind(self, request: LaunchRequest) -> str:
        return JOB if request.section(SkypilotSection).managed else CLUSTER

    def find(self, record: LaunchRecord) -> list[Seen]:
        name = self.tool_name(record.name)
        if record.facts["kind"] == JOB:
            words = ("sky", "jobs", "queue", "--all", "--output", "json")
            # SkyPilot fails with this message while it has no controller for managed jobs.
            jobs = ask_json(*words, what="list the managed jobs", fine="No in-progress managed jobs") or []
            jobs = sorted((job for job in jobs if job["job_name"] == name), key=lambda job: job["job_id"], reverse=True)
            return [
                Seen(
                    id=str(job["job_id"]),
                    state=f"{job['status']} {job.get('failure_reason') or ''}".strip(),
                    is_busy=not job["status"].startswith(ENDED),
                )
                for job in jobs
            ]
        clusters = ask_json("sky", "status", name, "--output", "json", what="ask SkyPilot for the cluster") or []
        return [_cluster(each) for each in clusters if each["name"] == name]

    def log_command(self, record: LaunchRecord, *, follow: bool) -> tuple[str, ...]:
        of = ("jobs", "logs", "--name") if record.facts["kind"] == JOB else ("logs",)
        whole = ("--tail", "0")  # by default SkyPilot prints only the last 1,000 lines
        return ("sky", *of, self.tool_name(record.name), *whole, "--follow" if follow else "--no-follow")

    def end(self, record: LaunchRecord, ids: Sequence[str]) -> None:
        is_job = record.facts["kind"] == JOB
        verb = ("sky", "jobs", "cancel", "--yes") if is_job else ("sky", "down", "--yes")
        # With --graceful, SkyPilot keeps the machines until the run's files are in its bucket; older versions lack it.
        options = ask(*verb, "--help", what="ask SkyPilot for its options", fine="")
        graceful = ("--graceful",) if "--graceful " in options else ()
        run(*verb, *graceful, *(ids if is_job else [self.tool_name(record.name)]), what="end the task")


def _cluster(found: dict[str, Any]) -> Seen:
    """Describe a cluster and, if it is up, its newest task. `sky launch` would queue a second task behind a running one."""
    tasks = []
    if found["status"] == "UP":
        queue = ask_json("sky", "queue", found["name"], "--output", "json", what="list the cluster's jobs") or {}
        tasks = queue.get(found["name"], [])
    newest = max(tasks, key=lambda task: task["job_id"], default=None)
    return Seen(
        id=found.get("cluster_hash", ""),  # differs for every new cluster
        state=f"the cluster is {found['status']}" + (f", and its task is {newest['status']}" if newest else ""),
        is_busy=any(not task["status"].startswith(ENDED) for task in tasks),
        stays=True,
    )


def _task(request: LaunchRequest, section: SkypilotSection, *, name: str) -> dict[str, Any]:
    lines = request.node_lines(
        section,
        run_file=f'"$HOME"/{FOLDER}/{RUN_FILE}',
        head='$(printf "%s\\n" "$SKYPILOT_NODE_IPS" | head -n 1)',
        more='--rank "$SKYPILOT_NODE_RANK" --num-nodes "$SKYPILOT_NUM_NODES"',  # overrides another launcher's variables
    )
    task: dict[str, Any] = {
        "name": name,
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
