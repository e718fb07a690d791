"""Launches on machines that ssh reaches: runs `rollcall node` on all of them at once, then submits a job through a tunnel.

    look      connect to every host, check its versions and whether it can be used; report all problems at once, start nothing
    prepare   `rollcall prepare` on every host
    nodes     `rollcall node` on every host
    check     wait until the head reports all slots; run `rollcall doctor --quick` there
    submit    submit the job through a tunnel to the head's dashboard, with an id that is already in the record

Commands that prepare and start nodes are tied to their connection, so none of them outlives the launcher. If a start fails or
Ctrl-C interrupts it, everything is taken down again.
"""

from __future__ import annotations

import json
import os
import shlex
import urllib.parse
from collections.abc import Sequence

from rollcall.base.errors import ClusterError
from rollcall.base.stop import INTERRUPTED
from rollcall.base.version import __version__
from rollcall.base.wait import say
from rollcall.base.words import counted
from rollcall.config.launch import SshSection
from rollcall.launch.jobs.package import build_package, resolve_paths
from rollcall.launch.jobs.submit import Job, new_id
from rollcall.launch.record import LaunchError, LaunchRecord, forget, get_record, launch_token
from rollcall.launch.rendered import Command, Rendered, exports, shell_path
from rollcall.launch.ssh.machines import Site
from rollcall.launch.ssh.shell import NO_FORWARDS, prefixed
from rollcall.launch.ssh.tunnel import DASHBOARD, jobs_of
from rollcall.launch.target import RUN_FILE, LaunchRequest, Target
from rollcall.nodes.declared import passed
from rollcall.nodes.machine import Here
from rollcall.nodes.state import TOKEN

LOOK_S = 180.0  # importing Python packages over a network file system is slow
CHECK_S = 120.0
LOOK, PREPARE, CHECK = "look.sh", "prepare.sh", "check.sh"  # rendered scripts
CONTAINER_FILE = "container.sh"
UP = "up"  # key in the record's facts: the hosts that have a node or its container, or were about to get one
HEAD = "head"  # key in the record's facts: the head's address


class Ssh(Target):
    name = "ssh"

    def check(self, request: LaunchRequest) -> None:
        resolve_paths(request.config, folder=request.cwd, shared=None)

    def render(self, request: LaunchRequest) -> Rendered:
        site = Site.of_request(request)
        named, interface = ("--cluster", request.name), request.section(SshSection).interface
        look = ("rollcall", "here", *named, *(("--interface", interface) if interface else ()))
        joined = ("rollcall", "check", str(request.cluster.num_slots), *named, "--timeout", f"{CHECK_S:g}", "--json")
        # The run file exists on a host only while the commands run.
        with_run_file = (
            "folder=$(mktemp -d) || exit 1",
            """trap 'rm -rf "$folder"' EXIT""",
            "run=$folder/run.yaml",
            f'printf %s {shlex.quote(request.run_file)} > "$run" || exit 1',
        )
        check = site.script(
            *with_run_file,
            f"{shlex.join(joined)} </dev/null || exit 1",
            f'[ -n "${{goes_on-}}" ] || rollcall doctor "$run" {shlex.join(named)} --quick </dev/null',
        )
        hosts, head = site.hosts, site.hosts[:1]
        steps = [
            (LOOK, hosts, "check that it can be used", site.script(f"exec {shlex.join(look)} </dev/null")),
            (PREPARE, hosts, "prepare it", site.script(*with_run_file, 'rollcall prepare --tied ${once-} "$run"')),
            *(
                (node_file(rank), (host,), f"start rank {rank}", site.script(f"exec {_node_line(request, rank)}"))
                for rank, host in enumerate(hosts)
            ),
            (CHECK, head, "check that all nodes have joined and that nothing would break the run", check),
        ]
        notes = [
            f"stdin also sets variables: for {PREPARE}, the run's variables (and, on {head[0]}, once=--once); for a node's "
            f"script, the cluster's token ({TOKEN}) and the head's address ($head)",
            f"then this machine submits the run through an ssh tunnel to the dashboard of {head[0]}",
        ]
        if lines := _container_lines(request):
            script = "\n".join(["main() {", *lines, "}", "main; exit", ""])
            steps.insert(0, (CONTAINER_FILE, hosts, "start the container", script))
            notes.insert(0, f"scripts after {CONTAINER_FILE} run in the container: `{shlex.join(site.inside)}`")
        return Rendered(
            files={RUN_FILE: request.run_file, **{name: text for name, _, _, text in steps}},
            commands=tuple(
                Command(words=site.login.words(host, *NO_FORWARDS), what=f"{what} ({host})", stdin=name)
                for name, where, what, _ in steps
                for host in where
            ),
            notes=tuple(notes),
        )

    def in_use(self, record: LaunchRecord, names: Sequence[str]) -> Sequence[str]:
        """Return the files in use. Nodes stay up after a run, so the next run may have a different run file."""
        nodes = [name for name in names if name not in (RUN_FILE, LOOK, PREPARE, CHECK)]
        run = [RUN_FILE] if RUN_FILE in names and _is_running(record) else []
        return [*(nodes if record.facts.get(UP) else []), *run]

    def start(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        # Missing variables and reward modules are refused before anything is started.
        passed(request.cluster, environ=os.environ)
        build_package(request.config, run_file="", folder=request.cwd)
        site = Site.of_request(request)
        record = site.claim(record)
        # If a launch that already has a run fails, it stays up, so that the user can retry it or end it with `down`.
        is_fresh = record.state == "starting" and not record.id
        try:
            record = _start_containers(site, rendered, record)
            head = _look(site, rendered, record)
            if not record.id:  # hosts with a run are not prepared again
                _prepare(request, site, rendered)
            record = record.knowing(**{HEAD: head, UP: list(site.hosts)}).having(id=record.id or "").save()
            _start_nodes(site, rendered, record)
            is_running = _is_running(record)
            record = _check(site, rendered, record, is_running=is_running)
            if is_running:
                say(f"{record.id} is running")
            return record if is_running else _submit(request, record)
        except BaseException as error:
            if is_fresh:
                _undo(get_record(record.name), has_failed=isinstance(error, Exception))
            raise

    def follow(self, record: LaunchRecord) -> int:
        with jobs_of(record) as (jobs, found):
            job = _submitted(record, found)
            try:
                job = jobs.follow(job.id)
            except KeyboardInterrupt:
                say(f"\n{job.id} continues; follow it with `rollcall launch logs {record.name} --follow`")
                return INTERRUPTED
        say(f"{job.id} {job.state}")
        return job.exit_status

    def status(self, record: LaunchRecord) -> str:
        site = Site.of_record(record)
        script = site.script(f"exec rollcall status --cluster {site.cluster} --json </dev/null")
        [outcome] = site.send({site.hosts[0]: script}, timeout_s=LOOK_S)
        if outcome.answer is None:
            return outcome.problem
        found = json.loads(outcome.answer)
        alive = sum(node["alive"] for node in found["nodes"])
        with jobs_of(record) as (_, job):
            run = f"{job.id} {job.state}" if job else "the run was not submitted"
        return f"{alive} of {counted(found['num_nodes'], 'node')} alive; {run}"

    def logs(self, record: LaunchRecord) -> None:
        with jobs_of(record) as (jobs, found):
            print(jobs.logs(_submitted(record, found).id), end="")

    def stop(self, record: LaunchRecord) -> None:
        record = record.having(state="stopping").save()
        if record.id and DASHBOARD in record.facts:
            try:
                with jobs_of(record) as (jobs, job):
                    if job is not None:
                        jobs.stop(job.id)  # the run saves
            except (LaunchError, ClusterError) as error:  # a head that does not answer has no run to save
                say(f"could not ask {record.id} to save: {error}")
        _take_down(record)


def _submitted(record: LaunchRecord, job: Job | None) -> Job:
    if job is None:  # the launch was interrupted before it submitted the run
        raise LaunchError(f"{record.name!r} has not submitted its run; run the same `rollcall launch` command again")
    return job


def _is_running(record: LaunchRecord) -> bool:
    """Return whether the launch's run is still running. A head that does not answer counts as having no run."""
    try:
        with jobs_of(record) as (_, job):
            return job is not None and not job.is_over
    except (LaunchError, ClusterError):
        return False


# Rendering


def node_file(rank: int) -> str:
    return f"node-{rank}.sh"


def _node_line(request: LaunchRequest, rank: int) -> str:
    """Return the shell line that runs `rollcall node`. ``$head`` and the token are set before the script."""
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


def _container_lines(request: LaunchRequest) -> list[str]:
    """Return shell lines that start the container for a host's node. There are none if nothing has to be done before the node starts."""
    container = request.container()
    if container is None:
        return []
    lines = [f"{{ {line}; }} || exit 1" for line in container.before()]
    if not container.is_daemon:
        return lines
    seen = [container.section.runtime, "container", "inspect", "--format", "{{.State.Running}}", container.name]
    return [
        f'[ -n "$rollcall_again" ] && [ "$({shlex.join(seen)} 2>/dev/null)" = true ] && exit',
        *lines,
        # If the launcher has exited during a long build, start no container. `read` returns 1 if stdin is closed, and more than 128 if
        # it is open.
        "read -r -t 0.1 _; [ $? -gt 128 ] || exit 1",
        f"{shlex.join(container.run(['sleep', 'infinity'], variables=(), detach=True))} >/dev/null",
    ]


# The steps of a start


def _start_containers(site: Site, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
    """Start a container on each host. It stays until `down`. A container from an earlier command of this launch is kept."""
    if CONTAINER_FILE not in rendered.files:
        return record
    say(f"starting {counted(len(site.hosts), 'container')}")
    before = "rollcall_again=yes\n" if record.facts.get(UP) else ""
    record = record.knowing(**{UP: list(site.hosts)}).having(id=record.id or "").save()
    site.outside().do(dict.fromkeys(site.hosts, before + rendered.files[CONTAINER_FILE]), to="start a container")
    return record


def _look(site: Site, rendered: Rendered, record: LaunchRecord) -> str:
    """Return the address at which the head will listen, or raise an error that names every unusable host."""
    say(f"connecting to {counted(len(site.hosts), 'host')}")
    outcomes = site.send(dict.fromkeys(site.hosts, rendered.files[LOOK]), timeout_s=LOOK_S)
    problems: list[str] = []
    # All nodes in a Ray cluster need the same Python and Ray, and workers need the same torch to compute together.
    versions = {"rollcall": (__version__, "this machine")}
    head: Here | None = None
    for rank, outcome in enumerate(outcomes):
        host, here = outcome.host, Here.of(outcome.answer or "")
        if here is None:
            printed = f"{host}: `rollcall here` gave no answer; it printed {' '.join(outcome.lines)[-200:]!r}"
            problems.append(printed if outcome.is_good else outcome.problem)
            continue
        head = here if rank == 0 else head
        for what, version in {"rollcall": here.version, **here.versions}.items():
            wanted, where = versions.setdefault(what, (version, host))
            if version != wanted:
                problems.append(
                    f"{host} has {what} {version}, but {where} has {what} {wanted}; install the same version"
                )
        if here.rank is not None and host not in record.facts.get(UP, ()):
            problems.append(
                f"{host} already runs a cluster named {record.name!r}, which this launch did not start; choose another --name"
            )
        if rank == 0 and here.is_alone and len(site.hosts) > 1:
            problems.append(f"{host} has no address that other machines can reach; set launch.ssh.interface")
    if problems or head is None:
        used = f"{counted(len(problems), 'problem')} with the hosts, so nothing was started:"
        raise LaunchError("\n  ".join([used, *problems]))
    # A launcher that was killed may have started nodes that wait for this head.
    return head.address if head.rank == 0 else record.facts.get(HEAD, head.address)


def _prepare(request: LaunchRequest, site: Site, rendered: Rendered) -> None:
    """Prepare all hosts at once; the first one also runs `prepare.once` for all."""
    say(f"preparing {counted(len(site.hosts), 'host')}")
    # The model cache's location and the hub's key are among the run's variables.
    variables = {**request.cluster.env, **passed(request.cluster, environ=os.environ)}
    script = "\n".join([*exports(variables), rendered.files[PREPARE]])
    site.do({**dict.fromkeys(site.hosts, script), site.hosts[0]: f"once=--once\n{script}"}, to="run `rollcall prepare`")


def _start_nodes(site: Site, rendered: Rendered, record: LaunchRecord) -> None:
    say(f"starting {counted(len(site.hosts), 'node')}")
    before = f"export {TOKEN}={launch_token(record.folder)}\nhead={shlex.quote(record.facts[HEAD])}\n"
    scripts = {host: before + rendered.files[node_file(rank)] for rank, host in enumerate(site.hosts)}
    site.do(scripts, to="start a node", timeout_s=900.0)  # `rollcall node` has its own, shorter limits


def _check(site: Site, rendered: Rendered, record: LaunchRecord, *, is_running: bool) -> LaunchRecord:
    tell, head = prefixed(site.hosts), site.hosts[0]
    [outcome] = site.send(
        {head: ("goes_on=yes\n" if is_running else "") + rendered.files[CHECK]},
        timeout_s=CHECK_S + LOOK_S + 600.0,
        tell=lambda host, line: None if line.startswith("{") else tell(host, line),  # leaves out the JSON answer
    )
    if outcome.answer is None:
        raise LaunchError(f"the cluster is not ready:\n  {outcome.problem}")
    found = json.loads(outcome.answer)
    say(f"all {counted(found['num_slots'], 'slot')} have joined, on {counted(len(site.hosts), 'host')}")
    if found["dashboard_url"] is None:
        raise LaunchError(
            f"{head}: Ray's dashboard does not listen on the loopback, so no run can be submitted; see dashboard.log in Ray's logs there"
        )
    return record.knowing(**{DASHBOARD: urllib.parse.urlsplit(found["dashboard_url"]).port}).save()


def _submit(request: LaunchRequest, record: LaunchRecord) -> LaunchRecord:
    with jobs_of(record) as (jobs, known):
        if known is not None and record.state == "starting":
            say(f"{known.id} {known.state}")
            return record
        if known is not None or not record.id:
            record = record.having(id=new_id(request.config.run.name)).save()
        run = request.config.model_copy(update={"launch": None})
        job = jobs.submit(run, folder=request.cwd, environ=os.environ, job_id=record.id)
    say(f"submitted {job.id}")
    say(f"  run dir    {record.run_dir} on the hosts")
    say(f"  log        rollcall launch logs {record.name} --follow")
    say(f"  dashboard  rollcall tunnel {record.name}")
    return record


# Stopping


def _undo(record: LaunchRecord, *, has_failed: bool) -> None:
    """Take down everything after a start that failed or was interrupted; keep the logs if it failed."""
    if not record.facts.get(UP):
        return
    say("taking down what was started")
    try:
        _take_down(record, keep_logs=has_failed)
        forget(record)
    except LaunchError as error:
        say(str(error))


def _take_down(record: LaunchRecord, *, keep_logs: bool = False) -> None:
    """Stop the node and its container on every host that has them or was about to get them. A host that was taken down is removed from
    the record. Raise an error that names the others."""
    hosts = record.facts.get(UP, [])
    if not hosts:
        return
    site = Site.of_record(record)
    if site.container is None:
        words = ("rollcall", "down", "--cluster", record.name, *(["--keep-logs"] if keep_logs else []))
        script = site.script(f"exec {shlex.join(words)} </dev/null")
    else:
        site, script = site.outside(), f"{site.container}; exit\n"
    outcomes = site.send(dict.fromkeys(hosts, script), timeout_s=300.0, tell=prefixed(hosts))
    left = [each for each in outcomes if not each.is_good]
    record.knowing(**{UP: [each.host for each in left]}).save()
    if left:
        raise LaunchError(
            "\n  ".join(["not everything that was started could be stopped:", *(each.problem for each in left)])
            + f"\nrun `rollcall launch down {record.name}` again when these hosts answer; if a host is gone for "
            f"good, remove {record.folder}"
        )
