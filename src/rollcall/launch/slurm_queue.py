"""A launch's job in Slurm's queue: submitted once, found again, followed, ended. By `squeue`, `sacct` and `scancel`.

The launch's folder has the job's log, and the exit status once the job is over: Slurm itself forgets a job after some minutes
where it keeps no accounts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass

from rollcall.launch.errors import ElsewhereError, LaunchError
from rollcall.launch.record import LaunchRecord, Part
from rollcall.launch.rendered import Command
from rollcall.launch.tool import ask as ask_tool
from rollcall.stop import INTERRUPTED, status_words
from rollcall.wait import Wait, say
from rollcall.words import visible

# In the launch's folder. REQUEUED: where the run stood when the job requeued itself last.
JOB, NODE, LOG, STATUS, REQUEUED = "job.sh", "node.sh", "log", "status", "requeued"
CLUSTER = "slurm_cluster"  # the fact that names it
LOOK_EVERY_S = 1.0
STEP_S = 60.0  # until a step that srun starts is listed
SAVE_S = 40.0  # a node that gets SIGTERM lets the run save for 25 s, and stops Ray
GONE_S = 180.0  # Slurm waits KillWait, 30 s unless configured, before it kills
AWAY_S = 1800.0  # that Slurm's controller may not answer
FAILED = 1
ID = re.compile(r"[0-9]+(_[0-9\[\],%-]+|\+[0-9]+)?(\.[A-Za-z0-9+]+)?")  # of a job, a step, one of an array
# Variables that change what Slurm's tools list and end, or by which a launch would not find its job again. Those of an allocation
# (SLURM_) in which this command runs would be handed on to the job, where srun reads them.
OTHERS_WISHES = (
    "SQUEUE_", "SCANCEL_", "SACCT_", "SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_ERROR", "SBATCH_OUTPUT", "SBATCH_WAIT",
    "SBATCH_NO_REQUEUE", "SBATCH_NTASKS_PER_NODE", "SLURM_",
)  # fmt: skip
OF_SITE = ("SLURM_CONF", "SLURM_JWT")  # where the controller is, and who asks
# sbatch takes a variable before a line of the script: where the run file has said something, it goes. Most have the option's name.
OF_OPTION = {
    "time": ("SBATCH_TIMELIMIT",), "mem": ("SBATCH_MEM_PER_",), "gpus-per-node": ("SBATCH_GPUS", "SBATCH_GRES"),
    "gres": ("SBATCH_GPUS", "SBATCH_GRES"), "gpus": ("SBATCH_GPUS", "SBATCH_GRES"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    id: str  # of a job, or JOB.STEP
    state: str
    why: str = ""
    used: str = ""
    nodes: str = ""


def variables(script: str = "") -> dict[str, str]:
    """This process's, for Slurm's tools; ``script``: the one that is submitted."""
    options = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    others = [each for name in options for each in OF_OPTION.get(name, (f"SBATCH_{name.upper().replace('-', '_')}",))]
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(OF_SITE) or not name.startswith((*OTHERS_WISHES, *others))
    }


def ask(command: Command, *, script: str = "", may_fail: bool = False) -> str:
    return ask_tool(command, env=variables(script), may_fail=may_fail)


def cluster_here() -> str:
    """The name of the Slurm cluster that this machine asks; empty: it has none."""
    told = ask(Command(words=("scontrol", "show", "config"), what="ask for Slurm's name"), may_fail=True)
    found = re.search(r"^ClusterName\s*=\s*(\S+)", told, re.MULTILINE)
    return visible(found[1]) if found else ""


def refuse_other_cluster(record: LaunchRecord) -> None:
    """A home folder may be that of several clusters. Another one has no such job, which would be taken for its end."""
    then = record.facts.get(CLUSTER)
    if then and (now := cluster_here()) not in ("", then):
        raise ElsewhereError(
            f"{record.name!r} was launched on the Slurm cluster {then!r}, and this machine's is {now!r}; run this on a machine of {then!r}"
        )


def job_name(launch: str) -> str:
    return f"rollcall-{launch}"


def submit(record: LaunchRecord, command: Command) -> str:
    for name in (STATUS, REQUEUED):
        (record.folder / name).unlink(missing_ok=True)
    job = ask(command, script=(record.folder / JOB).read_text()).strip().partition(";")[0]
    if not re.fullmatch("[0-9]{1,20}", job):
        raise LaunchError(f"cannot {command.what}: sbatch answered {job[:200]!r} where the id of a job was expected")
    say(f"submitted job {job}; its log is {record.folder / LOG}")
    return job


def attach(record: LaunchRecord, command: Command, *, job: str, num_nodes: int) -> LaunchRecord:
    """Start the nodes as a step of a job that runs. The command that holds the step stays on this machine."""
    words = ("squeue", "--noheader", f"--jobs={job}", "--format=%T %D")
    state, _, nodes = ask(Command(words=words, what=f"ask for job {job}"), may_fail=True).strip().partition(" ")
    if state != "RUNNING" or not nodes.isdecimal() or int(nodes) < num_nodes:
        have = f"is {state} on {nodes} nodes" if state else "is not in the queue"
        raise LaunchError(
            f"launch.slurm.attach={job}, and job {job} {have}; needed is one that is RUNNING on at least {num_nodes} nodes"
        )
    record = record.with_part(Part(kind="step", where="slurm", id=job)).save()
    if find(record) is not None:
        say(f"job {job} has the step of this launch already; its log is {record.folder / LOG}")
        return record
    (record.folder / STATUS).unlink(missing_ok=True)
    with (record.folder / LOG).open("ab") as log:
        holder = subprocess.Popen(
            command.words, env=variables(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    wait = Wait(STEP_S)
    while find(record) is None:
        what = f"waiting for the nodes to start inside job {job}"
        if holder.poll() is not None or not wait.again(what, after_s=LOOK_EVERY_S):
            last = "\n".join((record.folder / LOG).read_text(errors="replace").splitlines()[-15:])
            raise LaunchError(f"the nodes did not start inside job {job}; the end of {record.folder / LOG}:\n{last}")
    return record


def find(record: LaunchRecord) -> Queued | None:
    """The job or step of this launch that is in Slurm's queue, by its name: also one that was submitted just before a kill. Once its
    id is known, no other is taken for it."""
    name = job_name(record.name)
    part = record.parts[0] if record.parts else None
    if part is not None and part.kind == "step":
        rows = _listed("--steps", "--format=%i|%j", what="list the steps", fields=2)
        ids = [id for id, step in rows if step == name and id.startswith(f"{part.id}.")]
        return Queued(id=ids[0], state="RUNNING") if ids else None
    what = "look for the job in the queue"
    found = [
        Queued(id=id, state=state, why=why, used=used, nodes=nodes)
        for id, state, why, used, nodes, script in _listed(
            f"--name={name}", "--format=%i|%T|%r|%M|%N|%o", what=what, fields=6
        )
        if script == str(record.folder / JOB)  # a launch of the same name, in another folder, is another one
        and (part is None or part.id in ("", id))
    ]
    return max(found, key=lambda job: job.state != "COMPLETING", default=None)


def _listed(*options: str, what: str, fields: int) -> list[list[str]]:
    """The rows of squeue about this user, each with an id first."""
    command = Command(words=("squeue", "--noheader", "--me", *options), what=what)
    rows = [visible(line).strip().split("|", fields - 1) for line in ask(command).split("\n") if line.strip()]
    for row in rows:
        if len(row) != fields or not ID.fullmatch(row[0]):
            raise LaunchError(f"cannot {what}: squeue printed {'|'.join(row)[:200]!r} where a job was expected")
    return rows


def status(record: LaunchRecord) -> str:
    found = find(record)
    if found is not None:
        why = f" ({found.why})" if found.why not in ("", "None") else ""
        where = f" on {found.nodes}, {found.used}" if found.nodes else ""
        kind = "step" if "." in found.id else "job"
        return f"{kind} {found.id} is {found.state}{why}{where}"
    ended = _ended(record)
    if ended is not None:
        return f"it {status_words(ended)}"
    job = record.parts[0].id if record.parts and record.parts[0].kind == "job" else ""
    words = ("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State,ExitCode")
    accounted = ask(Command(words=words, what="ask for its account"), may_fail=True).strip() if job else ""
    return (
        f"job {job} is {visible(accounted).replace('|', ', exit code ')}" if accounted else "it is not in Slurm's queue"
    )


def follow(record: LaunchRecord) -> int:
    """Print the log as it grows until the job has left the queue. A requeued job is still in it."""
    at, said = 0, ""
    try:
        while True:
            found = _find_again(record)
            at = _print_from(record, at)
            if found is None:
                break
            if found.state not in ("RUNNING", "COMPLETING") and (now := f"{found.state} ({found.why})") != said:
                say(f"job {found.id} is {now}")
                said = now
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        say(f"the run goes on; `rollcall launch logs --follow {record.name}` shows it again")
        return INTERRUPTED
    ended = _ended(record)
    how = (
        "has left Slurm's queue without a status: it was cancelled or killed" if ended is None else status_words(ended)
    )
    say(f"{record.name!r} {how}")
    return FAILED if ended is None else ended


def print_log(record: LaunchRecord) -> None:
    if not (record.folder / LOG).exists():
        say(f"there is no log yet: {status(record)}")
    _print_from(record, 0)


def stop(record: LaunchRecord) -> None:
    """End it, and return when Slurm has. The run saves: Slurm sends SIGTERM first, and a step gets it from here."""
    if not record.parts or (found := find(record)) is None:
        return
    if record.parts[0].kind == "step":
        _cancel(found.id, "--signal=TERM")
        _wait_until_gone(record, timeout_s=SAVE_S)
    if find(record) is not None:
        _cancel(found.id)
        if not _wait_until_gone(record, timeout_s=GONE_S):
            raise LaunchError(
                f"{found.id} is still in Slurm's queue {GONE_S:g} s after scancel; see `squeue`, then run this command again"
            )


def _cancel(id: str, *options: str) -> None:
    ask(Command(words=("scancel", *options, id), what=f"end {id}"), may_fail=True)


def _wait_until_gone(record: LaunchRecord, *, timeout_s: float) -> bool:
    wait = Wait(timeout_s)
    while (found := find(record)) is not None:
        if not wait.again(f"waiting for Slurm to end {found.id}", after_s=LOOK_EVERY_S):
            return False
    return True


def _find_again(record: LaunchRecord) -> Queued | None:
    """For a command that watches: Slurm's controller may be busy, or start again."""
    wait = Wait(AWAY_S)
    while True:
        try:
            return find(record)
        except LaunchError as error:
            text = f"Slurm does not answer: {str(error).splitlines()[-1].strip()}"
            if not wait.again(text, after_s=10 * LOOK_EVERY_S):
                raise


def _ended(record: LaunchRecord) -> int | None:
    try:
        return int((record.folder / STATUS).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _print_from(record: LaunchRecord, at: int) -> int:
    """Print the log from there on; returns where it ends."""
    try:
        with (record.folder / LOG).open("rb") as file:
            file.seek(at)
            sys.stdout.write(file.read().decode(errors="replace"))
            sys.stdout.flush()
            return file.tell()
    except FileNotFoundError:
        return at
