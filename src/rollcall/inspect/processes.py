"""The processes of a run that runs now, on this host or on the nodes of a cluster: a function is called on each of these hosts.

``find_target`` reads what a person means: a run directory, the name of a cluster, or nothing. Nothing means the cluster that this
node belongs to, and where there is none, the runs on this host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcall.checkpoint.run_dir import RUN_FILE, is_run
from rollcall.config import load_config
from rollcall.durable.lease import read_holder
from rollcall.loop.tasks import start
from rollcall.nodes.which import Cluster, find_cluster, wished_cluster
from rollcall.observe.live import Live, read_live
from rollcall.wait import Wait, say

HERE = "this host"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTarget:
    run: str | None  # the run directory; None: every run there
    cluster: Cluster | None  # None: this host alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What hosts answered, by their name for a reader, and why others did not."""

    found: dict[str, Any]
    failed: dict[str, str]


def find_target(text: str | None, *, cluster: str | None = None) -> ProcessTarget:
    """``text``: a run directory or the name of a cluster; ``cluster``: of ``--cluster``."""
    if text is None:
        return ProcessTarget(run=None, cluster=find_cluster(cluster) if cluster else wished_cluster())
    if not Path(text).is_dir():
        if "/" in text:
            raise ValueError(f"{text} is not a directory; give the run.dir of a run, or the name of a cluster")
        return ProcessTarget(run=None, cluster=find_cluster(text))
    return _of_run(Path(text), cluster=cluster)


def _of_run(run_dir: Path, *, cluster: str | None) -> ProcessTarget:
    holder, live = read_holder(run_dir), read_live(run_dir)
    if not is_run(run_dir):
        raise ValueError(f"{run_dir} holds no file of a run; give the run.dir of a run, or the name of a cluster")
    if holder is None or holder.is_gone:
        raise ValueError(f"nothing runs in {run_dir}; `rollcall status {run_dir}` shows how it ended")
    run = str(run_dir.resolve())
    if live is not None and live.on_ray:
        return ProcessTarget(run=run, cluster=find_cluster(cluster, ray_address=_ray_address(run_dir)))
    if not holder.is_here:
        raise ValueError(f"{run_dir} is held by {holder}; run this command on that host")
    if others := _elsewhere(live):
        say(f"note: {others} share only a folder with this host; run this command there to see theirs")
    return ProcessTarget(run=run, cluster=None)


def _elsewhere(live: Live | None) -> str:
    nodes = sorted({one.node for one in live.processes if one.node}) if live is not None else []
    return f"the workers of node {', '.join(map(str, nodes))}" if nodes else ""


def _ray_address(run_dir: Path) -> str | None:
    section = load_config(run_dir / RUN_FILE, []).cluster
    return section.ray_address if section is not None else None


def _ask_here(function: Callable[[], Any], *, timeout_s: float, to: str) -> Answers:
    """In a thread that ends with this process, so that Ctrl-C ends the command at once."""
    wait, answer = Wait(timeout_s), start(function)
    while not answer.done() and not wait.is_over:
        wait.tell(f"waiting for {HERE} to {to}")
        wait.sleep(0.05)
    if not answer.done():
        return Answers(found={}, failed={HERE: f"no answer after {timeout_s:.0f} s"})
    return Answers(found={HERE: answer.result()}, failed={})


def ask_hosts(target: ProcessTarget, function: Callable[[], Any], *, timeout_s: float, to: str) -> Answers:
    """Call it on every host, all at once, in a process of its own on a cluster. ``to``: what they are asked to do."""
    if target.cluster is None:
        return _ask_here(function, timeout_s=timeout_s, to=to)
    from rollcall.on_ray.connect import connect, disconnect
    from rollcall.on_ray.each_node import answers_of, run_on
    from rollcall.on_ray.members import ranked_nodes

    connect(target.cluster, log_to_driver=False)
    try:
        nodes = {node.rank: node for node in ranked_nodes()}
        # Ray takes no partial.
        calls = {rank: run_on(node.node_id, lambda: function(), env={}) for rank, node in nodes.items()}
        answers, failures = answers_of(calls, wait=Wait(timeout_s), to=to)
    finally:
        disconnect()
    names = {rank: f"node {rank} ({node.address})" for rank, node in nodes.items()}
    return Answers(
        found={names[rank]: answer for rank, answer in sorted(answers.items())},
        failed={names[rank]: why for rank, why in sorted(failures.items())},
    )
