"""Machines that ssh reaches: `rollcall node` on all of them at once, then a job, submitted from here through a tunnel.

    look      connect to every host; which versions it has, whether it can be used. All problems at once, nothing is started
    prepare   `rollcall prepare` on every host
    nodes     `rollcall node` on every host
    check     all slots have joined, as the head says; `rollcall doctor --quick` there
    submit    through a tunnel to the head's dashboard, with an id that the record has already

What prepares and starts nodes is tied to its connection, so none of it outlives a launcher that is gone. What fails while a
launch starts, and Ctrl-C, takes all of it down again.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rollcall.config.launch import SshSection
from rollcall.jobs.package import build_package
from rollcall.jobs.paths import resolve_paths
from rollcall.jobs.submit import new_id, to_stdout
from rollcall.launch.container import container_of
from rollcall.launch.errors import LaunchError
from rollcall.launch.record import LaunchRecord, Part, forget, get_record, launch_token
from rollcall.launch.rendered import Command, Rendered, RenderedFile, exports, shell_path
from rollcall.launch.ssh.answers import OF_CHECK, OF_STATUS, last_answer
from rollcall.launch.ssh.hosts import claim
from rollcall.launch.ssh.jobs import DASHBOARD, JOB, find_job, is_running, job_id_of, jobs_of, stop_job, submitted
from rollcall.launch.ssh.shell import NO_FORWARDS, Outcome, Tell, prefixed, run_on_all
from rollcall.launch.ssh.site import Site
from rollcall.launch.target import RUN_FILE, LaunchRequest
from rollcall.launch.tool import need_tool
from rollcall.nodes.here import Here
from rollcall.stop import INTERRUPTED
from rollcall.version import __version__
from rollcall.wait import say
from rollcall.words import counted
from rollcall.worker_env.declared import passed
from rollcall.worker_env.node_shell import TOKEN

LOOK_S = 180.0  # importing Python packages over a network file system takes its time
NODE_S = 900.0  # `rollcall node` has limits of its own, which are shorter and say more
CHECK_S = 120.0
DOCTOR_S = 600.0
DOWN_S = 300.0
LOOK, PREPARE, PREPARE_ONCE = "look.sh", "prepare.sh", "prepare-once.sh"  # rendered scripts
JOINED, DOCTOR = "joined.sh", "doctor.sh"
CONTAINER_FILE, NODE_FILE = "container.sh", re.compile(r"node-\d+\.sh")
CONTAINER, NODE = "container", "node"  # kinds of parts
HEAD = "head"  # the fact that says where the head listens


class Ssh:
    name = "ssh"

    def check(self, request: LaunchRequest) -> None:
        resolve_paths(request.config, folder=request.cwd, shared=None)

    def render(self, request: LaunchRequest) -> Rendered:
        site = Site.of_request(request)
        section = request.section(SshSection)
        named = ("--cluster", request.name)
        interface = ("--interface", section.interface) if section.interface else ()
        look = shlex.join(("rollcall", "here", *named, *interface))
        joined = shlex.join(
            ("rollcall", "check", str(request.cluster.num_slots), *named, "--timeout", f"{CHECK_S:g}", "--json")
        )
        doctor = f'rollcall doctor "$run" {shlex.join(named)} --quick </dev/null'
        files = [
            request.run_file,
            RenderedFile(name=LOOK, text=site.script(f"{look} </dev/null && exit", "rollcall version", "exit 1")),
            RenderedFile(name=PREPARE, text=_with_run_file(request, 'rollcall prepare --tied "$run"')),
            RenderedFile(name=PREPARE_ONCE, text=_with_run_file(request, 'rollcall prepare --tied --once "$run"')),
            *(
                RenderedFile(name=node_file(rank), text=site.script(f"exec {_node_line(request, rank)}"))
                for rank in range(len(site.hosts))
            ),
            RenderedFile(name=JOINED, text=site.script(f"exec {joined} </dev/null")),
            RenderedFile(name=DOCTOR, text=_with_run_file(request, doctor)),
        ]
        steps = []
        if (lines := _container_lines(request)) is not None:
            files.append(RenderedFile(name=CONTAINER_FILE, text="\n".join(["main() {", *lines, "}", "main; exit", ""])))
            steps += [(host, f"start the container on {host}", CONTAINER_FILE) for host in site.hosts]
        steps += [(host, f"ask {host} whether it can be used", LOOK) for host in site.hosts]
        steps += [(host, f"prepare {host}", _prepare_file(rank)) for rank, host in enumerate(site.hosts)]
        steps += [(host, f"start rank {rank} on {host}", node_file(rank)) for rank, host in enumerate(site.hosts)]
        steps += [(site.head, f"ask {site.head} whether all nodes have joined", JOINED)]
        steps += [(site.head, f"look on {site.head} for what would break the run", DOCTOR)]
        commands = [
            Command(words=site.login.words(host, *NO_FORWARDS), what=what, stdin=file) for host, what, file in steps
        ]
        notes = [
            *(
                [f"scripts after {CONTAINER_FILE} run in the container: `{shlex.join(site.inside)}`"]
                if site.inside
                else []
            ),
            f"the token of the cluster ({TOKEN}) and the head's address ($head) are sent in front of a node's script, over stdin",
            f"then the run is submitted from here, through an ssh tunnel to the dashboard of {site.head}",
        ]
        return Rendered(files=tuple(files), commands=tuple(commands), notes=tuple(notes))

    def validate(self, rendered: Rendered, folder: Path) -> str:
        need_tool("ssh", install="install OpenSSH's client (Debian: openssh-client)")
        return "the hosts are asked next; nothing is started before all of them can be used"

    def in_use(self, record: LaunchRecord, names: Sequence[str]) -> Sequence[str]:
        """Nodes stay after a run, and the next run may be another."""
        nodes = [name for name in names if name == CONTAINER_FILE or NODE_FILE.fullmatch(name)]
        has_nodes = any(part.kind in (NODE, CONTAINER) for part in record.parts)
        run = [RUN_FILE] if RUN_FILE in names and is_running(record) else []
        return [*(nodes if has_nodes else []), *run]

    def start(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        # Variables and modules of rewards that are not here are refused before anything is started.
        passed(request.cluster, environ=os.environ)
        build_package(request.config, run_file="", folder=request.cwd)
        site = Site.of_request(request)
        record = claim(site.kept_in(record), site.hosts)
        is_fresh = record.state == "starting" and not job_id_of(
            record
        )  # what has a run stays, for the next try or for `down`
        try:
            record = _start_containers(site, rendered, record)
            head = _look(site, rendered, record)
            _prepare(request, site, rendered, record)
            record = _about_to_start(NODE, site, replace(record, facts={**record.facts, HEAD: head}))
            record = _start_nodes(site, rendered, record)
            record = _see_all_joined(site, rendered, record)
            return _submit(request, rendered, record)
        except BaseException as error:
            if is_fresh:
                _undo(get_record(record.name), has_failed=isinstance(error, Exception))
            raise

    def follow(self, record: LaunchRecord) -> int:
        with jobs_of(record) as jobs:
            job_id = submitted(record, jobs)
            try:
                jobs.wait_started(job_id)
                job = jobs.follow(job_id)
            except KeyboardInterrupt:
                say(f"\n{job_id} goes on; follow it with `rollcall launch logs {record.name} --follow`")
                return INTERRUPTED
        say(f"{job.id} {job.stands}")
        return job.exit_status

    def status(self, record: LaunchRecord) -> str:
        site = Site.of_record(record)
        [asked] = site.run(
            "rollcall", "status", "--cluster", record.name, "--json", hosts=[site.head], timeout_s=LOOK_S
        )
        found = last_answer(asked, OF_STATUS)
        if found is None:
            return asked.problem
        alive = sum(node.alive for node in found.nodes)
        nodes = f"{alive} of {counted(found.num_nodes, 'node')} alive"
        with jobs_of(record) as jobs:
            job = find_job(jobs, job_id_of(record))
        return f"{nodes}; {f'{job.id} {job.stands}' if job else 'the run is not submitted'}"

    def logs(self, record: LaunchRecord) -> None:
        with jobs_of(record) as jobs:
            to_stdout(jobs.logs(submitted(record, jobs)))

    def stop(self, record: LaunchRecord) -> None:
        if not record.parts:
            return
        stop_job(record)
        problems = _take_down(record)
        if problems:
            raise LaunchError(
                "\n  ".join(["what was started is not ended everywhere:", *problems])
                + f"\nrun `rollcall launch down {record.name}` again when these hosts answer; for one that is gone for good, "
                f"remove {record.folder}"
            )


def node_file(rank: int) -> str:
    return f"node-{rank}.sh"


def _node_line(request: LaunchRequest, rank: int) -> str:
    """`rollcall node` as a line of shell. ``$head`` and the token come before the script."""
    section, cluster = request.section(SshSection), request.cluster
    words = ["rollcall", "node", "--tied", "--cluster", request.name]
    words += ["--rank", str(rank), "--num-nodes", str(cluster.num_nodes)]
    if cluster.accelerator == "cpu" or cluster.nodes is not None:
        words += ["--slots", str(cluster.slots_per_node[rank])]
    if section.interface is not None:
        words += ["--interface", section.interface]
    line = shlex.join(words)
    if section.temp_dir is not None:
        line += f" --temp-dir {shell_path(section.temp_dir)}"
    if request.launch.rendezvous is not None:
        return f"{line} --rendezvous {shell_path(request.launch.rendezvous)}"
    return f'{line} --head-address "$head"'


def _container_lines(request: LaunchRequest) -> list[str] | None:
    """Lines of shell that leave a container on the host for the node; None: there is none to start."""
    container = container_of(request.launch, request.cluster, name=request.container_name)
    if container is None:
        return None
    lines = [f"{{ {line}; }} || exit 1" for line in container.before()]
    if not container.is_daemon:
        return lines or None
    seen = [container.section.runtime, "container", "inspect", "--format", "{{.State.Running}}", container.name]
    holder = container.run(["sleep", "infinity"], variables=(), detach=True)
    return [
        f'[ -n "$rollcall_again" ] && [ "$({shlex.join(seen)} 2>/dev/null)" = true ] && exit',
        *lines,
        # Building takes long: a launcher that is gone by now gets no container. 1: stdin has ended; more than 128: it is open.
        "read -r -t 0.1 _; [ $? -gt 128 ] || exit 1",
        f"{shlex.join(holder)} >/dev/null",
    ]


def _start_containers(site: Site, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
    """One on each host, which stays until it is taken down. One that an earlier command of this launch left is kept."""
    if not any(file.name == CONTAINER_FILE for file in rendered.files):
        return record
    say(f"starting {counted(len(site.hosts), 'container')}")
    before = "rollcall_again=yes\n" if _part(record, CONTAINER, site.head) else ""
    record = _about_to_start(CONTAINER, site, record)
    script = before + rendered.file(CONTAINER_FILE).text
    outcomes = run_on_all(site.login, dict.fromkeys(site.hosts, script), tell=prefixed(site.hosts), together=True)
    _raise_if_any("without a container", outcomes)
    return record


def _about_to_start(kind: str, site: Site, record: LaunchRecord) -> LaunchRecord:
    for host in site.hosts:
        record = record if _part(record, kind, host) else record.with_part(Part(kind=kind, where=host))
    return record.save()


def _look(site: Site, rendered: Rendered, record: LaunchRecord) -> str:
    """Where the head will listen; raises with every host that cannot be used."""
    say(f"connecting to {counted(len(site.hosts), 'host')}")
    script = rendered.file(LOOK).text
    outcomes = site.send(dict.fromkeys(site.hosts, script), timeout_s=LOOK_S)
    seen = {each.host: Here.of(each.out) if each.is_good else None for each in outcomes}
    problems = [
        problem
        for rank, each in enumerate(outcomes)
        if (problem := _problem(each, seen[each.host], rank=rank, record=record, alone=len(site.hosts) == 1))
    ]
    problems += _other_versions({host: here for host, here in seen.items() if here is not None})
    machines: dict[tuple[str, str], str] = {}
    for host, here in seen.items():
        if here is not None:
            machine = (here.host, here.address.rpartition(":")[0])
            if machine in machines:
                problems.append(f"{host}: the same machine as {machines[machine]}")
            machines.setdefault(machine, host)
    if problems:
        used = f"{counted(len(problems), 'problem')} with the hosts, so nothing was started:"
        raise LaunchError("\n  ".join([used, *problems]))
    head = seen[site.head]
    assert head is not None
    # A launcher that was killed may have told nodes of a head that does not run yet.
    return head.address if head.rank == 0 else record.facts.get(HEAD, head.address)


def _other_versions(seen: Mapping[str, Here]) -> list[str]:
    """Ray joins only nodes of one Python and one Ray, and workers of another torch cannot compute with the others."""
    first = next(iter(seen), "")
    return [
        f"{host}: {what} {seen[host].versions.get(what)}, and {first} has {what} {version}; install the same there"
        for what, version in (seen[first].versions if first else {}).items()
        for host in seen
        if seen[host].version == seen[first].version and seen[host].versions.get(what) != version
    ]


def _problem(outcome: Outcome, here: Here | None, *, rank: int, record: LaunchRecord, alone: bool) -> str | None:
    """Why a host cannot be used."""
    host = outcome.host
    said = re.search(r"^rollcall (\S+) \(", outcome.out, re.MULTILINE)  # by `rollcall version`, after `here` has failed
    version = here.version if here else said[1] if said else __version__
    if version != __version__:
        return f"{host}: has rollcall {version}, and this machine {__version__}; install the same there"
    if not outcome.is_good:
        return outcome.problem
    if here is None:
        return f"{host}: `rollcall here` gave no answer; it printed {outcome.out[-200:]!r}"
    if here.rank is not None and _part(record, NODE, host) is None:
        return f"{host}: a cluster named {record.name!r} runs there already, and this launch did not start it; give another --name"
    if here.rank not in (None, rank):
        return (
            f"{host}: is rank {here.rank} of this cluster, not {rank}; run `rollcall launch down {record.name}` first"
        )
    if rank == 0 and here.is_alone and not alone:
        return f"{host}: has no address that other machines reach; set launch.ssh.interface"
    return None


def _with_run_file(request: LaunchRequest, command: str) -> str:
    """A script that runs the command with the run file at ``$run``, which is there only meanwhile."""
    return Site.of_request(request).script(
        "folder=$(mktemp -d) || exit 1",
        """trap 'rm -rf "$folder"' EXIT""",
        "run=$folder/run.yaml",
        f'printf %s {shlex.quote(request.run_file.text)} > "$run" || exit 1',
        command,
    )


def _prepare_file(rank: int) -> str:
    return PREPARE if rank else PREPARE_ONCE


def _prepare(request: LaunchRequest, site: Site, rendered: Rendered, record: LaunchRecord) -> None:
    """On all hosts at once, the first one also what one node does for all. Hosts that have a run are not prepared again."""
    if record.state == "started" or job_id_of(record):
        return
    say(f"preparing {counted(len(site.hosts), 'host')}")
    # Where models are cached, and the key of the hub, are variables of the run.
    variables = {**request.cluster.env, **passed(request.cluster, environ=os.environ)}
    before = "".join(f"{line}\n" for line in exports(variables))
    scripts = {host: rendered.file(_prepare_file(rank)).text for rank, host in enumerate(site.hosts)}
    _raise_if_any("not prepared", site.send(scripts, before=before, tell=prefixed(site.hosts), together=True))


def _raise_if_any(what: str, outcomes: Sequence[Outcome]) -> None:
    problems = [each.problem for each in outcomes if not each.is_good and not each.was_let_go]
    if problems:
        raise LaunchError("\n  ".join([f"{counted(len(problems), 'host')} {what}:", *problems]))


def _start_nodes(site: Site, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
    say(f"starting {counted(len(site.hosts), 'node')}")
    before = f"export {TOKEN}={launch_token(record.folder)}\nhead={shlex.quote(record.facts[HEAD])}\n"
    scripts = {host: rendered.file(node_file(rank)).text for rank, host in enumerate(site.hosts)}
    outcomes = site.send(scripts, before=before, timeout_s=NODE_S, tell=prefixed(site.hosts), together=True)
    for outcome in outcomes:
        if outcome.is_good:
            record = record.with_part(Part(kind=NODE, where=outcome.host, id=site.cluster))
    record = record.save()
    _raise_if_any("without a node", outcomes)
    return record


def _see_all_joined(site: Site, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
    scripts = {site.head: rendered.file(JOINED).text}
    [outcome] = site.send(scripts, timeout_s=CHECK_S + LOOK_S, tell=_errors_only(site))
    found = last_answer(outcome, OF_CHECK)
    if found is None:
        raise LaunchError(f"not all nodes have joined:\n  {outcome.problem}")
    port = re.fullmatch(r"https?://[^/\s]+:([0-9]{1,5})/?", found.dashboard_url or "")
    if port is None or not 0 < int(port[1]) < 65536:
        raise LaunchError(f"{site.head}: the head has no dashboard on its loopback ({found.dashboard_url!r})")
    say(f"all {counted(found.num_slots, 'slot')} have joined, on {counted(len(site.hosts), 'host')}")
    return replace(record, facts={**record.facts, DASHBOARD: port[1]}).save()


def _errors_only(site: Site) -> Tell:
    """Without the answer in JSON."""
    tell = prefixed(site.hosts)
    return lambda host, line: None if line.startswith("{") else tell(host, line)


def _submit(request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
    with jobs_of(record) as jobs:
        known = find_job(jobs, job_id_of(record)) if job_id_of(record) else None
        if known is not None and (record.state == "starting" or not known.is_over):
            say(f"{known.id} is {known.status}")
            return record
        _examine(Site.of_record(record), rendered)
        if known is not None or not job_id_of(record):
            job = Part(kind=JOB, where=Site.of_record(record).head, id=new_id(request.config.run.name))
            record = record.with_part(job).save()
        run = request.config.model_copy(update={"launch": None})
        job = jobs.submit(run, folder=request.cwd, environ=os.environ, job_id=job_id_of(record))
    say(f"submitted {job.id}")
    _say_where(record)
    return record


def _examine(site: Site, rendered: Rendered) -> None:
    scripts = {site.head: rendered.file(DOCTOR).text}
    [outcome] = site.send(scripts, timeout_s=DOCTOR_S, tell=prefixed([site.head]))
    if not outcome.is_good:
        raise LaunchError(f"`rollcall doctor` has found what would break the run:\n  {outcome.problem}")


def _say_where(record: LaunchRecord) -> None:
    say(f"  run dir    {record.run_dir} on the hosts")
    say(f"  log        rollcall launch logs {record.name} --follow")
    say(f"  dashboard  rollcall tunnel {record.name}")


def _part(record: LaunchRecord, kind: str, where: str) -> Part | None:
    return next((part for part in record.parts if (part.kind, part.where) == (kind, where)), None)


def _undo(record: LaunchRecord, *, has_failed: bool) -> None:
    """Of a start that failed, nothing stays but logs; of one that Ctrl-C ended, nothing."""
    if not record.parts:
        return
    say("taking down what was started")
    problems = _take_down(record, keep_logs=has_failed)
    if not problems:
        forget(record)
        return
    say("\n  ".join(["what was started is not ended everywhere:", *problems]))
    say(f"run `rollcall launch down {record.name}` when these hosts answer")


def _take_down(record: LaunchRecord, *, keep_logs: bool = False) -> list[str]:
    """End the node, and the container it runs in, on every host that has one or was about to; returns the problems. What is down
    leaves the record."""
    site = Site.of_record(record)
    hosts = list(dict.fromkeys(part.where for part in record.parts if part.kind in (NODE, CONTAINER)))
    tell = prefixed(hosts)
    if site.container is None:
        words = ("rollcall", "down", "--cluster", record.name, *(["--keep-logs"] if keep_logs else []))
        outcomes = site.run(*words, hosts=hosts, timeout_s=DOWN_S, tell=tell)
    else:
        scripts = dict.fromkeys(hosts, f"{site.container}; exit\n")
        outcomes = run_on_all(site.login, scripts, timeout_s=DOWN_S, tell=tell)
    down = {each.host for each in outcomes if each.is_good}
    replace(record, parts=tuple(part for part in record.parts if part.where not in down or part.kind == JOB)).save()
    return [each.problem for each in outcomes if not each.is_good]
