"""Inspects a run's processes on this host or on a cluster's nodes: what each is doing now, how it spends its time, and which variables
a worker sees. To do so, it calls a function on all of these hosts at once. The run does not wait for the call.

``find_target`` works out what the user means: a run directory, a cluster name, or nothing. If it is nothing, the target
is the cluster that this node belongs to or, if there is none, the runs on this host.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.base.atomic import write_atomic
from rollcall.base.errors import ClusterError
from rollcall.base.lease import read_holder
from rollcall.base.redact import REDACTED, hides
from rollcall.base.wait import Wait, say
from rollcall.checkpoint.run_dir import RUN_FILE, is_run
from rollcall.config import ClusterSection, load_config
from rollcall.nodes.cluster import Cluster, find_cluster, wished_cluster
from rollcall.nodes.declared import NODE_OWN, UNDECLARED, Variable, declared, for_ray, seen_here
from rollcall.observe.live import read_live
from rollcall.process.debug.attach import is_there
from rollcall.process.debug.board import Waiting, read_board
from rollcall.process.groups import reachable

ORDER = (UNDECLARED, "the node's own", "rollcall", "Ray")  # sources of variables
ANSWER_S = 90.0  # a node has to start a new process to answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTarget:
    run: str | None  # the run directory; None means every run on the cluster or host
    cluster: Cluster | None  # None means this host


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The hosts' answers by display name and, for hosts that did not answer, the reason."""

    hosts: dict[str, Any]
    failed: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        rows = [{"host": host, **asdict(one)} for host, own in self.hosts.items() for one in own]
        return {"processes": rows, "failed": self.failed}


def find_target(text: str | None, *, cluster: str | None = None) -> ProcessTarget:
    """Find what ``text`` names: a run directory or a cluster. ``cluster`` is the value of ``--cluster``."""
    run_dir = run_dir_of(text)
    if run_dir is not None:
        return _of_run(run_dir, cluster=cluster)
    wanted = text or cluster
    return ProcessTarget(run=None, cluster=find_cluster(wanted) if wanted else wished_cluster())


def run_dir_of(text: str | None) -> Path | None:
    """Return the run directory that ``text`` names, or None if it is a cluster's name or missing."""
    if text is None or ("/" not in text and not Path(text).is_dir()):
        return None
    if not Path(text).is_dir():
        raise ValueError(f"{text} is not a directory; use the run.dir of a run, or the name of a cluster")
    return Path(text)


def _of_run(run_dir: Path, *, cluster: str | None) -> ProcessTarget:
    holder, live = read_holder(run_dir), read_live(run_dir)
    if not is_run(run_dir):
        raise ValueError(f"{run_dir} is not a run directory; use the run.dir of a run, or the name of a cluster")
    if holder is None or holder.is_gone:
        raise ValueError(f"no run is active in {run_dir}; `rollcall status {run_dir}` shows how it ended")
    run = str(run_dir.resolve())
    if live is not None and live.on_ray:
        section = load_config(run_dir / RUN_FILE, []).cluster
        address = section.ray_address if section is not None else None
        return ProcessTarget(run=run, cluster=find_cluster(cluster, ray_address=address))
    if not holder.is_here:
        raise ValueError(f"{run_dir} is in use by {holder}; run this command on that host")
    if others := sorted({one.node for one in live.processes if one.node}) if live is not None else []:
        nodes = f"the workers of node {', '.join(map(str, others))}"
        say(
            f"note: {nodes} run on hosts that share only a folder with this one; run this command on those hosts to see their processes"
        )
    return ProcessTarget(run=run, cluster=None)


def ask_hosts(target: ProcessTarget, function: Callable[[], Any], *, timeout_s: float, to: str) -> Answers:
    """Call ``function`` on all hosts at once; on a cluster, each call runs in a new process. ``to`` names the task in messages."""
    if target.cluster is None:
        return Answers(hosts={"this host": function()}, failed={})
    from rollcall.process.ray.connect import connected
    from rollcall.process.ray.each_node import answers_of, run_on
    from rollcall.process.ray.members import ranked_nodes

    with connected(target.cluster):
        nodes = {node.rank: node for node in ranked_nodes()}
        # Ray does not accept a partial.
        calls = {rank: run_on(node.node_id, lambda: function(), env={}) for rank, node in nodes.items()}
        answers, failures = answers_of(calls, wait=Wait(timeout_s), to=to)
    names = {rank: f"node {rank} ({node.address})" for rank, node in nodes.items()}
    return Answers(
        hosts={names[rank]: answer for rank, answer in sorted(answers.items())},
        failed={names[rank]: why for rank, why in sorted(failures.items())},
    )


def read_stacks(target: ProcessTarget, *, native: bool, timeout_s: float) -> Answers:
    """Read the stacks of all threads in every process without stopping the process."""
    look = partial(reachable.stacks_here, run=target.run, native=native)
    return ask_hosts(target, look, timeout_s=timeout_s, to="read the stacks of its processes")


# The environment variables that each node's workers see


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenVariable:
    """One variable on one node; secrets are redacted."""

    name: str
    value: str | None  # None if the variable is not set there
    source: str  # where the variable is declared, else one of ORDER
    wanted: str | None  # the declared value if the worker sees a different one, else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    rank: int
    address: str
    variables: tuple[SeenVariable, ...]


def view_workers(cluster: Cluster, section: ClusterSection | None, *, submitted: Mapping[str, str]) -> list[NodeView]:
    """Return a view for every node of the cluster, by rank. If ranks do not answer in time, raise an error that names them."""
    from rollcall.process.ray.connect import connected
    from rollcall.process.ray.each_node import answers_of, run_on
    from rollcall.process.ray.members import ranked_nodes

    with connected(cluster):
        nodes = {node.rank: node for node in ranked_nodes()}
        wanted = {rank: declared(section, submitted=submitted, node_rank=rank) for rank in nodes}
        calls = {}
        for rank, variables in wanted.items():
            env = for_ray({name: each.value for name, each in variables.items()})
            calls[rank] = run_on(nodes[rank].node_id, seen_here, env=env)
        answers, failures = answers_of(calls, wait=Wait(ANSWER_S), to="report its workers' variables")
    if failures:
        why = "; ".join(f"node {rank}: {reason}" for rank, reason in sorted(failures.items()))
        raise ClusterError(f"{why}; see `rollcall status`")
    return [
        NodeView(rank=rank, address=nodes[rank].address, variables=_compare(variables, answers[rank]))
        for rank, variables in wanted.items()
    ]


def _compare(variables: Mapping[str, Variable], found: Mapping[str, tuple[str, str]]) -> tuple[SeenVariable, ...]:
    """Return the declared variables in their order, then the node's own paths, then all other variables by source."""
    rows = []
    for name, variable in variables.items():
        value, _ = found.get(name, (None, ""))
        wanted = REDACTED if hides(name, variable.value) else variable.value
        wanted = wanted if wanted != value else None
        rows.append(SeenVariable(name=name, value=value, source=variable.source, wanted=wanted))
    others = found.keys() - variables.keys() - set(NODE_OWN)
    for name in (*NODE_OWN, *sorted(others, key=lambda name: (ORDER.index(found[name][1]), name))):
        value, source = found.get(name, (None, "the node's own"))
        rows.append(SeenVariable(name=name, value=value, source=source, wanted=None))
    return tuple(rows)


# Processes that are waiting in the debugger


def find_waiting(text: str | None) -> list[Waiting]:
    """Return the processes that are waiting in a debugger. ``text`` names a run directory or a cluster; None is this node's cluster."""
    if (run_dir := run_dir_of(text)) is not None:
        found = read_board(run_dir)
    else:
        from rollcall.process.ray.connect import connected, read_waiting

        cluster = wished_cluster(text)
        if cluster is None:
            raise ClusterError(
                "this machine is not a node of a cluster, so name a run directory: `rollcall debug RUN_DIR`"
            )
        with connected(cluster):
            found = read_waiting()
    return [one for one in found if is_there(one)]


# Profiles: torch's profiler runs in a thread of the process, and py-spy samples the process from outside


FORMATS = {"torch": "trace.json.gz", "speedscope": "speedscope.json", "flamegraph": "svg"}  # the endings of their files


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    files: list[Path]
    failed: dict[str, str]  # reasons by process or host


def profile_role(target: ProcessTarget, *, role: str, seconds: float, kind: str, out: Path) -> Result:
    """Profile each of the role's processes and write one file per process to the folder ``out``."""
    work = partial(profile_here, run=target.run, role=role, seconds=seconds, kind=kind)
    timeout_s = seconds + reachable.START_S + reachable.END_S
    answers = ask_hosts(target, work, timeout_s=timeout_s, to=f"profile the {role} processes")
    failed, files, others = dict(answers.failed), list[Path](), set[str]()
    for host, (found, roles) in answers.hosts.items():
        others |= set(roles)
        for pid, (title, data, error) in found.items():
            if error:
                failed[f"{title} (process {pid}) on {host}"] = error
                continue
            name = re.sub("[^a-z0-9]+", "-", f"{title} {host.partition(' (')[0]} {pid}".lower()).strip("-")
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"{name}.{FORMATS[kind]}"
            write_atomic(path, data, durable=False)
            files.append(path)
    if not files and not failed:
        there = ", ".join(sorted(others))
        raise ClusterError(
            f"no process of role {role} is running; the running roles are: {there}"
            if there
            else "no process of a run was found; check that the run is active (`rollcall status RUN_DIR`), and that you started it"
        )
    return Result(files=files, failed=failed)


def profile_here(
    *, run: str | None, role: str, seconds: float, kind: str
) -> tuple[dict[int, tuple[str, bytes, str]], list[str]]:
    """Return title, profile and error for each of the role's processes on this host, and all roles that are running here."""
    known = reachable.reachable_here(run=run)
    chosen = {pid: about for pid, about in known.items() if role in about.roles}

    def profiled(pid: int) -> tuple[str, bytes, str]:
        try:
            if kind == "torch":
                return chosen[pid].title, reachable.profile_process(pid, seconds=seconds), ""
            return chosen[pid].title, _sample(pid, seconds=seconds, kind=kind), ""
        except (reachable.ProfileError, OSError) as error:
            return chosen[pid].title, b"", str(error)

    with ThreadPoolExecutor(max_workers=max(len(chosen), 1)) as pool:
        found = dict(zip(chosen, pool.map(profiled, chosen), strict=True))
    return found, sorted({role for about in known.values() for role in about.roles})


def _sample(pid: int, *, seconds: float, kind: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="rollcall-profile-") as folder:
        path, timeout_s = Path(folder) / "profile", seconds + reachable.END_S
        command = [reachable.py_spy(), "record", "--pid", str(pid), "--duration", str(max(round(seconds), 1))]
        command += ["--format", kind, "--output", str(path), "--nonblocking", "--threads"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, errors="replace")
        except subprocess.TimeoutExpired:
            raise reachable.ProfileError(f"py-spy did not finish within {timeout_s:g} s") from None
        if done.returncode or not path.exists():
            lines = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
            raise reachable.ProfileError(f"py-spy failed: {lines[-1]}")
        return path.read_bytes()
