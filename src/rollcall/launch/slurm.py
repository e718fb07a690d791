"""`rollcall launch slurm`: submits a batch job that runs `rollcall node --run` on each node, or runs it inside an existing job.

Two scripts are rendered. `job.sh` is what Slurm runs on the first node: it starts one task per node and waits for them. Some time
before the time limit, Slurm sends SIGUSR1 to this script, which passes it on to the tasks. The run then saves and exits with status
75, and the job requeues itself. `node.sh` is the script that each task runs. All nodes read the launch's folder and find each other
there. The folder also contains the job's log and, once the job is over, its exit status, because without accounting Slurm forgets a
job after a few minutes.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from rollcall.base.stop import INTERRUPTED, status_words
from rollcall.base.wait import Wait, say
from rollcall.base.words import visible
from rollcall.config.launch import SlurmSection
from rollcall.launch.container import mounts_of
from rollcall.launch.record import LaunchError, LaunchRecord
from rollcall.launch.rendered import VARIABLE, Command, Rendered, shell_path
from rollcall.launch.target import RUN_FILE, LaunchRequest, Seen, ToolTarget, ask
from rollcall.nodes.rendezvous import Rendezvous

REST_OF_JOB = (files("rollcall.launch") / "slurm_job.sh").read_text()
# Files in the launch's folder. REQUEUED contains the run's progress when the job last requeued itself.
JOB, NODE, LOG, STATUS, REQUEUED = "job.sh", "node.sh", "log", "status", "requeued"
LOOK_EVERY_S = 1.0
START_S = 60.0  # for a step inside a running job to start
AWAY_S = 1800.0  # how long Slurm's controller may be unreachable
OF_SLURM = (  # variables that a container needs
    "SLURM_PROCID", "SLURM_GPUS_ON_NODE", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip
# Slurm numbers only the GPUs that the job's processes see, which may be some of the node's GPUs. A docker container is not one of
# the job's processes, so it sees all GPUs.
CARDS_FOR_DOCKER = '[ -z "${SLURM_STEP_GPUS:-}" ] || export CUDA_VISIBLE_DEVICES="$SLURM_STEP_GPUS"'
GPU_OPTION = re.compile(r"--gpus|-G|--gres=(.*,)?gpu\b")
# If the submitting shell has no `module` function, one of these files defines it.
MODULE_FILES = (
    "/etc/profile.d/modules.sh /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /usr/share/modules/init/bash"
)


class Slurm(ToolTarget):
    name = "slurm"
    title = "Slurm"
    look = "squeue"
    place_words = "the Slurm cluster"
    place_advice = "run this on a machine in cluster {}"

    def check(self, request: LaunchRequest) -> None:
        """Accept everything: a Slurm job runs in this command's folder, so relative paths work too."""

    def render(self, request: LaunchRequest) -> Rendered:
        section = request.section(SlurmSection)
        files = {RUN_FILE: request.run_file, NODE: _node(request, section), JOB: _job(request, section)}
        script = str(request.folder / JOB)
        if section.attach is None:
            words, what = ("sbatch", "--parsable", *_options(request, section), script), "submit the batch job"
        else:
            log = request.folder / LOG
            words = ("bash", script)
            what = f"start the nodes inside job {section.attach} in the background, and write their output to {log}"
        return Rendered(files=files, commands=(Command(words=words, what=what),), notes=tuple(_notes(request, section)))

    def validate(self, rendered: Rendered) -> None:
        words = rendered.commands[0].words
        if words[0] == "sbatch":
            _ask("sbatch", "--test-only", *words[2:], what="have sbatch check the job")

    def tool_name(self, name: str) -> str:
        return f"rollcall-{name}"

    def kind(self, request: LaunchRequest) -> str:
        return str(request.section(SlurmSection).attach or "")

    def place(self) -> str:
        """Return the name of the Slurm cluster, or "" if its controller does not answer."""
        config = _ask("scontrol", "show", "config", what="ask for Slurm's name", fine="")
        found = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
        return found[1] if found else ""

    def find(self, record: LaunchRecord) -> list[Seen]:
        """Find the job or step in Slurm's queue by name. This works even if the launcher was killed right after submitting it."""
        name, attach = self.tool_name(record.name), record.facts["kind"]
        if attach:
            rows = _rows("--steps", "--format=%i|%j", what="list the steps")
            ids = [id for id, step in rows if step == name and id.startswith(f"{attach}.")]
            return [Seen(id=id, state=f"step {id} is RUNNING", is_busy=True) for id in ids]
        rows = _rows(f"--name={name}", "--format=%i|%o|%T %R %M", what="look for the job in the queue")
        # A job with the same name but a different folder belongs to a different launch.
        return [
            Seen(id=id, state=f"job {id} is {state}", is_busy=True)
            for id, script, state in rows
            if script == str(record.folder / JOB)
        ]

    def begin(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> str:
        for name in (STATUS, REQUEUED):
            (record.folder / name).unlink(missing_ok=True)
        command = rendered.commands[0]
        if record.facts["kind"]:
            return self._attach(record, command)
        job = _ask(*command.words, what=command.what).strip().partition(";")[0]
        if not job.isdecimal():
            raise LaunchError(f"cannot {command.what}: sbatch answered {job[:200]!r}, which is not a job id")
        say(f"submitted job {job}; its log is {record.folder / LOG}")
        return job

    def _attach(self, record: LaunchRecord, command: Command) -> str:
        """Start the nodes as a step in a running job. The step lasts as long as its command, which keeps running on this machine."""
        job, log = record.facts["kind"], record.folder / LOG
        with log.open("ab") as out:
            holder = subprocess.Popen(
                command.words, env=_env(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        wait = Wait(START_S)
        try:
            while not (found := self.seen(record)):
                what = f"waiting for the nodes to start inside job {job}"
                if holder.poll() is not None or not wait.again(what, after_s=LOOK_EVERY_S):
                    last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                    raise LaunchError(f"the nodes did not start inside job {job}; the last lines of {log}:\n{last}")
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(holder.pid, signal.SIGTERM)  # srun then ends its step
            raise
        return found[0].id

    def status(self, record: LaunchRecord) -> str:
        self.require_started(record)
        if found := self.own(record):
            return visible(found[0].state)
        if (ended := _ended(record)) is not None:
            return f"it {status_words(ended)}"
        options = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", f"--jobs={record.id}")
        account = _ask("sacct", *options, what="read the job's accounting", fine="").strip() if record.id else ""
        state = visible(account).replace("|", ", exit code ")
        return f"job {record.id} is {state}" if state else "it is not in Slurm's queue"

    def log_command(self, record: LaunchRecord, *, follow: bool) -> tuple[str, ...]:
        return ("cat", str(record.folder / LOG))

    def logs(self, record: LaunchRecord) -> None:
        if not (record.folder / LOG).exists():
            say(f"there is no log yet: {self.status(record)}")
        else:
            super().logs(record)

    def follow(self, record: LaunchRecord) -> int:
        """Print the log as it grows until the job has left the queue. A requeued job stays in the queue."""
        self.require_started(record)
        at, before, away = 0, "", Wait(AWAY_S)
        try:
            while True:
                try:
                    found, away = self.own(record), Wait(AWAY_S)
                except LaunchError as error:  # Slurm's controller may be busy or restarting
                    text = f"Slurm does not answer: {str(error).splitlines()[-1].strip()}"
                    if not away.again(text, after_s=10 * LOOK_EVERY_S):
                        raise
                    continue
                at = _print_from(record, at)
                if not found:
                    break
                if "RUNNING" not in found[0].state and found[0].state != before:
                    before = found[0].state
                    say(visible(before))
                time.sleep(LOOK_EVERY_S)
        except KeyboardInterrupt:
            say(f"the run continues; `rollcall launch logs --follow {record.name}` shows its log again")
            return INTERRUPTED
        ended = _ended(record)
        gone = "has left Slurm's queue without a status, so it was cancelled or killed"
        say(f"{record.name!r} {gone if ended is None else status_words(ended)}")
        return 1 if ended is None else ended

    def end(self, record: LaunchRecord, ids: Sequence[str]) -> None:
        """Let the run save, then end it. A cancelled job gets SIGTERM from Slurm first; a step does not, so this method sends it."""
        if record.facts["kind"]:
            _ask("scancel", "--signal=TERM", *ids, what="let the run save", fine="")
            wait = Wait(40.0)  # on SIGTERM a node gives the run 25 s to save, then stops Ray
            while self.own(record) and wait.again("waiting for the run to save", after_s=LOOK_EVERY_S):
                continue
        if self.own(record):
            _ask("scancel", *ids, what="cancel the job or step", fine="")


def _env() -> dict[str, str]:
    """Return the environment for Slurm's tools. Variables that change what the tools list and cancel are left out. So are an
    allocation's variables, which would reach the job. The variables that locate the controller and identify the user are kept."""
    others = ("SQUEUE_", "SCANCEL_", "SACCT_", "SLURM_")
    own = ("SLURM_CONF", "SLURM_JWT")
    return {name: value for name, value in os.environ.items() if name.startswith(own) or not name.startswith(others)}


def _ask(*words: str, what: str, fine: str | None = None) -> str:
    return ask(*words, what=what, fine=fine, env=_env())


def _rows(*options: str, what: str) -> list[list[str]]:
    """Return squeue's rows for this user, split into the fields of ``--format``, which must be the last option."""
    lines = _ask("squeue", "--noheader", "--me", *options, what=what).splitlines()
    return [line.strip().split("|", options[-1].count("|")) for line in lines if line.strip()]


def _ended(record: LaunchRecord) -> int | None:
    try:
        return int((record.folder / STATUS).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _print_from(record: LaunchRecord, at: int) -> int:
    """Print the log from offset ``at`` on and return the offset of its end."""
    try:
        with (record.folder / LOG).open("rb") as file:
            file.seek(at)
            sys.stdout.write(file.read().decode(errors="replace"))
            sys.stdout.flush()
            return file.tell()
    except FileNotFoundError:
        return at


# job.sh


def _job(request: LaunchRequest, section: SlurmSection) -> str:
    find = f'for file in {MODULE_FILES}; do type module >/dev/null 2>&1 || [ ! -r "$file" ] || . "$file"; done'
    modules = [find, *(f"module load {shlex.quote(module)} || exit 1" for module in section.modules)]
    lines = [
        "#!/bin/bash",
        *(modules if section.modules else []),
        *section.lines,
        f"folder={shlex.quote(str(request.folder))}",
        f"reached={shell_path(Rendezvous(_rendezvous(request), request.name).reached_file)}",
        f"requeues={'yes' if section.attach is None else ''}",
        f'nodes() {{ exec {_srun(request, section)} bash "$folder/{NODE}"; }}',
    ]
    return "\n".join([*lines, REST_OF_JOB])


def _options(request: LaunchRequest, section: SlurmSection) -> list[str]:
    """Return the options for sbatch. On the command line they take precedence over the shell's `SBATCH_` variables."""
    given = {
        "job-name": f"rollcall-{request.name}",
        "partition": section.partition,
        "account": section.account,
        "time": section.time,
        "nodes": request.cluster.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": _gpus(request, section),
        "cpus-per-task": section.cpus_per_task,
        "mem": section.mem,
        "constraint": section.constraint,
        "nodelist": section.nodelist,
        "signal": f"B:USR1@{section.signal_s}",
        "output": str(request.folder / LOG).replace("%", "%%"),
        "open-mode": "append",
        "chdir": request.cwd,
    }
    # If an option appears twice, sbatch uses the last one. The launch needs its own options to find its job and to start the nodes, so
    # they come last.
    return [*section.options, *(f"--{name}={value}" for name, value in given.items() if value is not None), "--requeue"]


def _gpus(request: LaunchRequest, section: SlurmSection) -> str | None:
    if section.gpus_per_node is not None:
        return section.gpus_per_node
    if request.cluster.accelerator == "cpu" or any(map(GPU_OPTION.match, section.options)):
        return None
    return str(request.even_slots("a Slurm job requests the same number of GPUs on each node"))


def _srun(request: LaunchRequest, section: SlurmSection) -> str:
    count, container = request.cluster.num_nodes, request.launch.container
    words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    if section.cpus_per_task is not None:
        words.append(f"--cpus-per-task={section.cpus_per_task}")
    if section.attach is not None:
        words += [f"--jobid={section.attach}", "--overlap", f"--job-name=rollcall-{request.name}"]
        words += [f"--gpus-per-node={gpus}"] if (gpus := _gpus(request, section)) else []
    # The run decides what to do about a lost node, and Ray's processes may use all of the job's CPUs. None of them uses MPI.
    words += ["--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--mpi=none", "--label"]
    if container is not None and container.runtime == "enroot":  # pyxis runs the task in it, with the job's variables
        if container.build is not None or container.devices:
            raise LaunchError(
                "launch.container.build and launch.container.devices do not work with enroot; remove these keys, and import "
                "the image yourself"
            )
        words += [f"--container-image={container.image}", f"--container-workdir={request.cwd}"]
        words.append(f"--container-mounts={','.join(mounts_of(container, _folders(request)))}")
    return shlex.join(words)


def _folders(request: LaunchRequest) -> list[Path]:
    """Return the launch's folders that a node needs."""
    return [request.folder, _rendezvous(request), request.cwd]


def _rendezvous(request: LaunchRequest) -> Path:
    return request.launch.rendezvous or request.folder / "rendezvous"


# node.sh


def _node(request: LaunchRequest, section: SlurmSection) -> str:
    wished, container = request.launch.container, None
    if wished is not None and wished.runtime != "enroot":
        container = request.container(_folders(request))
    interface = "" if section.interface is None else f"--interface {shlex.quote(section.interface)} "
    # Slurm knows how many of the node's GPUs this job has. The number of logical slots comes from the run file.
    slots = ' ${SLURM_GPUS_ON_NODE:+--slots "$SLURM_GPUS_ON_NODE"}' if request.cluster.accelerator == "gpu" else ""
    lines = request.node_lines(
        section,
        run_file=shell_path(request.folder / RUN_FILE),
        before=[CARDS_FOR_DOCKER] if container and container.section.runtime == "docker" else [],
        more=f'{interface}--rendezvous {shell_path(_rendezvous(request))} --rank "$SLURM_PROCID"{slots}',
        container=container,
        variables=[*OF_SLURM, *(name for name in request.cluster.env_pass if VARIABLE.fullmatch(name))],
    )
    return "\n".join(["#!/bin/bash", *lines, ""])


def _notes(request: LaunchRequest, section: SlurmSection) -> Iterator[str]:
    yield f"all nodes read {request.folder}, so it must be in a folder that they share (set ROLLCALL_LAUNCHES)"
    if section.attach is not None:
        yield f"job {section.attach} is not requeued; run the same command again to resume the run"
    elif section.cpus_per_task is None and "--exclusive" not in section.options:
        yield "launch.slurm.cpus_per_task is not set: Slurm gives each node one CPU, unless the partition says otherwise"
