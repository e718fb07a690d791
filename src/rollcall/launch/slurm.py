"""`rollcall launch slurm`: a batch job whose one task on each node is `rollcall node --run`; or the same inside an allocation.

Two scripts are rendered. `job.sh` is what Slurm runs on the first node: it starts one task per node and waits for them. Some time
before the limit Slurm tells it (SIGUSR1). It passes that on, the run saves and ends with status 75, and the job requeues itself.
`node.sh` is the task. The launch's folder is read by all nodes, and there they find each other.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollcall.config.launch import SlurmSection
from rollcall.launch import slurm_queue
from rollcall.launch.container import check_mounts, container_of
from rollcall.launch.errors import LaunchError
from rollcall.launch.record import LaunchRecord, Part
from rollcall.launch.rendered import VARIABLE, Command, Rendered, RenderedFile, shell_path
from rollcall.launch.script import node_lines
from rollcall.launch.slurm_queue import JOB, LOG, NODE, REQUEUED, STATUS, job_name
from rollcall.launch.target import RUN_FILE, LaunchRequest
from rollcall.launch.tool import need_tool
from rollcall.nodes.rendezvous import Rendezvous
from rollcall.stop import STOPPED
from rollcall.wait import say

INSTALL = "it comes with Slurm's client tools"
PLAIN = re.compile(r"[!-~]+")  # printable, without spaces
UNSAFE = re.compile(r"[\"'\\#`]")  # sbatch has its own rules for these in a script
OF_SLURM = (  # for a container
    "SLURM_PROCID", "SLURM_GPUS_ON_NODE", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip
# Slurm numbers the cards as a process of the job sees them, which need not be all of the node's. A container of docker is not
# a process of the job: it sees all of them.
CARDS_FOR_DOCKER = '[ -z "${SLURM_STEP_GPUS:-}" ] || export CUDA_VISIBLE_DEVICES="$SLURM_STEP_GPUS"'
GPU_OPTION = re.compile(r"--gpus|-G|--gres=(.*,)?gpu\b")
# Options of sbatch by which a launch finds its job again, or knows how many tasks there are and when they end.
OWN_OPTIONS = (
    "array", "chdir", "clusters", "job-name", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable",
    "signal", "test-only", "wait", "wrap",
)  # fmt: skip
OWN_LETTERS = "JaDMNnoW"
# Where `module` is not a function of the shell that submits, a file of these defines it.
MODULE_FILES = (
    "/etc/profile.d/modules.sh /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /usr/share/modules/init/bash"
)


class Slurm:
    name = "slurm"

    def check(self, request: LaunchRequest) -> None:
        """A job of Slurm runs in the folder of this command, so it finds relative paths too."""

    def render(self, request: LaunchRequest) -> Rendered:
        section = request.section(SlurmSection)
        node = RenderedFile(name=NODE, text=_text(_node(request, section)), executable=True)
        job = RenderedFile(name=JOB, text=_text(_job(request, section)), executable=True)
        if section.attach is None:
            words = ("sbatch", "--parsable", *_places(request), str(request.folder / JOB))
            command = Command(words=words, what="submit the batch job")
        else:
            what = f"start the nodes inside job {section.attach}, in the background, with {request.folder / LOG} as its output"
            command = Command(words=("bash", str(request.folder / JOB)), what=what)
        return Rendered(files=(request.run_file, node, job), commands=(command,), notes=_notes(request, section))

    def validate(self, rendered: Rendered, folder: Path) -> str:
        need_tool("sbatch", install=INSTALL)
        command = rendered.commands[0]
        if command.words[0] != "sbatch":
            need_tool("srun", install=INSTALL)
            return "srun checks the options when it starts the nodes"
        words = ("sbatch", "--test-only", *command.words[2:])
        slurm_queue.ask(Command(words=words, what="have sbatch check the job"), script=rendered.file(JOB).text)
        return "sbatch takes the job"

    def in_use(self, record: LaunchRecord, names: Sequence[str]) -> Sequence[str]:
        slurm_queue.refuse_other_cluster(record)
        return names if slurm_queue.find(record) else ()

    def start(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        attach = request.section(SlurmSection).attach
        slurm_queue.refuse_other_cluster(record)
        record = replace(record, facts={**record.facts, slurm_queue.CLUSTER: slurm_queue.cluster_here()})
        if attach is not None:
            return slurm_queue.attach(
                record, rendered.commands[0], job=str(attach), num_nodes=request.cluster.num_nodes
            )
        found = slurm_queue.find(record)
        if found is not None:
            say(f"job {found.id} is in the queue already; its log is {record.folder / LOG}")
        record = record.with_part(Part(kind="job", where="slurm")).save()
        job = slurm_queue.submit(record, rendered.commands[0]) if found is None else found.id
        return record.with_part(Part(kind="job", where="slurm", id=job)).save()

    def follow(self, record: LaunchRecord) -> int:
        slurm_queue.refuse_other_cluster(record)
        return slurm_queue.follow(record)

    def status(self, record: LaunchRecord) -> str:
        slurm_queue.refuse_other_cluster(record)
        return slurm_queue.status(record)

    def logs(self, record: LaunchRecord) -> None:
        slurm_queue.print_log(record)

    def stop(self, record: LaunchRecord) -> None:
        slurm_queue.refuse_other_cluster(record)
        slurm_queue.stop(record)


# job.sh


def _job(request: LaunchRequest, section: SlurmSection) -> list[str]:
    lines = ["#!/bin/bash"]
    if section.attach is None:
        lines += [f"#SBATCH {option}" for option in _options(request, section)]
    lines += ["", *_modules(section.modules), *section.lines]
    lines += [
        f"folder={shlex.quote(str(request.folder))}",
        f'if [ ! -r "$folder/{NODE}" ]; then',
        '  echo "$folder cannot be read on $(hostname): set ROLLCALL_LAUNCHES to a folder that all nodes share" >&2',
        "  exit 1",
        "fi",
        f"reached={shell_path(Rendezvous(_rendezvous(request), request.name).reached_file)}",
        f'rm -f "$folder/{STATUS}" "$reached"',
        "export SLURM_EXPORT_ENV=ALL  # what the lines above have set is for the tasks too",
        "told=",
        "trap 'told=yes; kill -USR1 \"$tasks\" 2>/dev/null' USR1  # Slurm, before the time limit",
        "trap : TERM  # scancel tells the tasks too; wait for them",
        f'{_srun(request, section)} bash "$folder/{NODE}" &',
        "tasks=$!",
        'wait "$tasks"',
        'while kill -0 "$tasks" 2>/dev/null; do wait "$tasks"; done  # a signal ends a wait',
        'wait "$tasks"',
        "status=$?",
    ]
    if section.attach is None:
        lines += [
            f'if [ "$status" = {STOPPED} ] && [ -n "$told" ]; then',
            '  at=$(cat "$reached" 2>/dev/null) || at="its preparation"',
            f'  if [ "$at" = "$(cat "$folder/{REQUEUED}" 2>/dev/null)" ]; then',
            '    echo "the run was stopped at $at twice, and has come no further in between: job $SLURM_JOB_ID does not requeue itself;'
            ' give it more time (launch.slurm.time), or look above for what takes so long, and launch it again" >&2',
            "  else",
            f'    printf "%s\\n" "$at" > "$folder/{REQUEUED}"',
            '    echo "the run was stopped before the time limit, at $at; job $SLURM_JOB_ID requeues itself"',
            f'    scontrol requeue "$SLURM_JOB_ID" && exit {STOPPED}',
            "  fi",
            "fi",
        ]
    return [*lines, f'echo "$status" > "$folder/{STATUS}"', 'exit "$status"']


def _options(request: LaunchRequest, section: SlurmSection) -> list[str]:
    """Of sbatch, as its lines in the script. What could hold a space is an option of the command instead (``_places``)."""
    given = {
        "job-name": job_name(request.name),
        "partition": section.partition,
        "account": section.account,
        "time": section.time,
        "nodes": str(request.cluster.num_nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": _gpus(request, section),
        "cpus-per-task": None if section.cpus_per_task is None else str(section.cpus_per_task),
        "mem": section.mem,
        "constraint": section.constraint,
        "nodelist": section.nodelist,
        "signal": f"B:USR1@{section.signal_s}",
        "open-mode": "append",
    }
    options = [f"--{name}={_plain(value, key=name)}" for name, value in given.items() if value is not None]
    for option in section.options:
        if not option.startswith("-"):
            raise LaunchError(f"launch.slurm.options has {option!r}; write an option of sbatch, such as `--exclusive`")
        if own := _own_option(option):
            raise LaunchError(
                f"launch.slurm.options has {option!r}, and a launch needs its own {own} to start its nodes and to find its job again; leave it out"
            )
        options.append(_plain(option, key="options"))
    return [*options, "--requeue"]


def _own_option(option: str) -> str | None:
    """The option that this one would change and that a launch needs as it is. sbatch takes the beginning of a name for it."""
    name = option.partition("=")[0]
    if name.startswith("--"):
        return next((f"--{own}" for own in OWN_OPTIONS if own.startswith(name[2:])), None)
    return next((f"-{own}" for own in OWN_LETTERS if name[1:].startswith(own)), None)


def _plain(value: str, *, key: str) -> str:
    if not PLAIN.fullmatch(value) or UNSAFE.search(value):
        raise LaunchError(
            f"launch.slurm.{key.replace('-', '_')} has {value!r}, which cannot stand in a line of a batch script; use printable "
            "characters without spaces, quotes, `\\` and `#`"
        )
    return value


def _places(request: LaunchRequest) -> tuple[str, str]:
    log = str(request.folder / LOG)
    if "\\" in log or not log.isprintable():
        raise LaunchError(
            f"Slurm cannot write to {log!r}: set ROLLCALL_LAUNCHES to a folder without `\\` and line breaks in its path"
        )
    return f"--output={log.replace('%', '%%')}", f"--chdir={request.cwd}"


def _gpus(request: LaunchRequest, section: SlurmSection) -> str | None:
    if section.gpus_per_node is not None:
        return section.gpus_per_node
    if request.cluster.accelerator == "cpu" or any(map(GPU_OPTION.match, section.options)):
        return None
    sizes = set(request.cluster.slots_per_node)
    if len(sizes) > 1:
        raise LaunchError(
            "cluster.nodes has nodes of different sizes, and a Slurm job asks for the same number of GPUs on each; give "
            "num_nodes and num_gpus_per_node instead"
        )
    return str(sizes.pop())


def _modules(modules: list[str]) -> list[str]:
    if not modules:
        return []
    find = f'for file in {MODULE_FILES}; do type module >/dev/null 2>&1 || [ ! -r "$file" ] || . "$file"; done'
    return [find, *(f"module load {shlex.quote(module)} || exit 1" for module in modules)]


def _srun(request: LaunchRequest, section: SlurmSection) -> str:
    count = request.cluster.num_nodes
    words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    if section.cpus_per_task is not None:
        words.append(f"--cpus-per-task={section.cpus_per_task}")
    if section.attach is not None:
        words += [f"--jobid={section.attach}", "--overlap", f"--job-name={job_name(request.name)}"]
        words += [f"--gpus-per-node={_plain(gpus, key='gpus_per_node')}" if (gpus := _gpus(request, section)) else ""]
    # The run decides what the loss of a node means, and Ray's processes may use all CPUs of the job. None of them speaks MPI.
    words += ["--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--mpi=none", "--label"]
    return shlex.join([*(word for word in words if word), *_pyxis(request)])


def _has_pyxis(request: LaunchRequest) -> bool:
    return request.launch.container is not None and request.launch.container.runtime == "enroot"


def _pyxis(request: LaunchRequest) -> list[str]:
    """Options of srun where pyxis is installed: the task runs in the container, with the job's variables."""
    section = request.launch.container
    if section is None or not _has_pyxis(request):
        return []
    check_mounts(section, folders=_folders(request))
    if section.build is not None or section.devices:
        raise LaunchError("launch.container.build and devices are not for enroot: import the image, and leave them out")
    folders = [str(folder) for folder in _folders(request)]
    mounts = [each if ":" in each else f"{each}:{each}" for each in (*section.mounts, *folders)]
    return [
        f"--container-image={section.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={request.cwd}",
    ]


def _folders(request: LaunchRequest) -> list[Path]:
    """What a node needs of the launch itself."""
    return [request.folder, _rendezvous(request), request.cwd]


def _rendezvous(request: LaunchRequest) -> Path:
    return request.launch.rendezvous or request.folder / "rendezvous"


# node.sh


def _node(request: LaunchRequest, section: SlurmSection) -> list[str]:
    container = None
    if not _has_pyxis(request):
        container = container_of(
            request.launch, request.cluster, name=request.container_name, folders=_folders(request)
        )
    options = [] if section.interface is None else ["--interface", section.interface]
    # Slurm knows how many GPUs of the node are this job's. Logical slots are as many as the run file says.
    slots = ' ${SLURM_GPUS_ON_NODE:+--slots "$SLURM_GPUS_ON_NODE"}' if request.cluster.accelerator == "gpu" else ""
    lines = node_lines(
        run_file=shell_path(request.folder / RUN_FILE),
        cluster=request.name,
        activate=section.activate,
        env={**request.node_env, **section.env},
        before=[CARDS_FOR_DOCKER] if container and container.has_daemon_of_node else [],
        options=options,
        more=f'--rendezvous {shell_path(_rendezvous(request))} --rank "$SLURM_PROCID"{slots}',
        container=container,
        variables=[*OF_SLURM, *(name for name in request.cluster.env_pass if VARIABLE.fullmatch(name))],
    )
    return ["#!/bin/bash", *lines]


def _notes(request: LaunchRequest, section: SlurmSection) -> tuple[str, ...]:
    notes = [f"all nodes read {request.folder}: it has to be in a folder that they share (set ROLLCALL_LAUNCHES)"]
    if section.cpus_per_task is None and section.attach is None and "--exclusive" not in section.options:
        notes.append(
            "launch.slurm.cpus_per_task is not set: Slurm gives each node one CPU, unless the partition says otherwise"
        )
    if section.attach is not None:
        notes.append(f"job {section.attach} is not requeued: the same command starts the run again, and it resumes")
    return tuple(notes)


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
