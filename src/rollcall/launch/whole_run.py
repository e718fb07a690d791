"""`rollcall node --run`: one command on every node, which ends when the run ends.

Every node prepares itself, joins the cluster and stays up. Rank 0 also starts this module as a script. The script waits for all nodes,
checks for problems that would break the run, submits the run and follows its log. When the run is over, the script writes the exit
status to Ray's folder on every node. Each node's command reads the status, stops Ray and exits with that status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rollcall.base.atomic import write_atomic
from rollcall.base.errors import ClusterError, ConfigError
from rollcall.base.journal import ATTEMPTS, GROUPS
from rollcall.base.stop import SIGNALS, STOPPED
from rollcall.base.wait import Wait, say
from rollcall.base.words import counted
from rollcall.checkpoint.run_dir import newest_step
from rollcall.config import Config, load_config
from rollcall.launch.jobs.prepare import prepare_node
from rollcall.launch.jobs.submit import Job, Jobs, reach
from rollcall.launch.ready import JOIN_S, look_first
from rollcall.nodes.bootstrap import NodeRequest, require_meeting
from rollcall.nodes.check import wait_for_slots
from rollcall.nodes.cluster import OurCluster
from rollcall.nodes.foreground import hold
from rollcall.nodes.ray_start import find_slots
from rollcall.nodes.rendezvous import Rendezvous
from rollcall.nodes.state import NodeRecord
from rollcall.process.ray.connect import connected
from rollcall.process.ray.each_node import answers_of, run_on

ENDED = "rollcall-run-ended"  # contains the exit status, in Ray's folder on each node
HEARD_S = 2.0  # how long rank 0 may take to learn that a node has received the status


class WholeRun:
    """One node's part in the run."""

    join_s = JOIN_S  # how long to wait for rank 0, and then for all slots

    def __init__(self, run_file: Path) -> None:
        self._run_file = run_file
        self._config = load_config(run_file)
        if self._config.cluster is None:
            raise ConfigError(
                "--run needs a run file with a `cluster:` section: num_nodes, num_gpus_per_node and the placement of roles"
            )
        self._cluster = self._config.cluster
        self.num_nodes = self._cluster.num_nodes

    def complete(self, request: NodeRequest) -> NodeRequest:
        """Fill in, from the run file, the values that the command line leaves out for this node."""
        if request.num_nodes not in (None, self.num_nodes):
            raise ClusterError(
                f"starting {request.num_nodes} nodes, but the run file has cluster.num_nodes={self.num_nodes}; make the two numbers equal"
            )
        logical = self._cluster.slots_per_node[request.rank] if self._cluster.accelerator == "cpu" else None
        return replace(request, num_nodes=self.num_nodes, slots=request.slots or logical)

    def get_ready(self, request: NodeRequest) -> NodeRequest:
        """Complete the request, check it and prepare this node. The check comes first, because a download may take long."""
        request = self.complete(request)
        self.check(request)
        prepare_node(self._config, once=False)
        return request

    def check(self, request: NodeRequest) -> None:
        require_meeting(request)
        offered, _ = find_slots(request.slots)
        needed = self._cluster.slots_per_node[request.rank]
        if offered != needed:
            raise ClusterError(
                f"this node offers {counted(offered, 'slot')}, but the run file asks for {needed} on node {request.rank}; make the two "
                "numbers equal (cluster.num_gpus_per_node or cluster.nodes, and --slots)"
            )

    def stay(self, record: NodeRecord, *, timeout_s: float, save_s: float) -> int:
        """Keep the node up until the run is over, then return the run's exit status."""
        ended = Path(record.temp_dir) / ENDED
        ended.unlink(missing_ok=True)
        if record.rank:
            return _exit_status(hold(record, save_s=save_s, until=lambda: _status_in(ended)))
        words = [sys.executable, "-m", __name__, record.cluster, str(self._run_file), str(timeout_s)]
        # The driver ignores signals, because it exits when the run's job ends. Slurm may signal every process of a task at any time.
        driver = subprocess.Popen(words, start_new_session=True, preexec_fn=_ignore_signals)
        try:
            return _exit_status(hold(record, save_s=save_s, until=driver.poll, too_early=STOPPED))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)  # including any prepare.once command that it is waiting for
            driver.wait()


def _exit_status(status: int | None) -> int:
    """Return the exit status; ``status`` is None if a signal stopped the node before the run's own status was known."""
    return STOPPED if status is None else 128 - status if status < 0 else status


def _status_in(ended: Path) -> int | None:
    """Return the status that rank 0 wrote, but only after rank 0 has had time to learn from Ray that it arrived."""
    if not ended.exists() or time.time() - ended.stat().st_mtime < HEARD_S:
        return None
    return int(ended.read_text())


def drive(cluster: str, run_file: Path, *, timeout_s: float) -> int:
    """Do rank 0's part: check, examine, submit, follow, and tell all nodes how the run ended."""
    try:
        config = load_config(run_file)
        status = _run(cluster, config, timeout_s=timeout_s)
        if status == STOPPED:
            _note_reached(cluster, config.run.dir)
    except (ClusterError, ValueError, OSError) as error:
        say(f"error: {error}")
        status = 1
    _tell_nodes(cluster, status)
    return status


def _run(cluster: str, config: Config, *, timeout_s: float) -> int:
    ours = OurCluster(cluster)
    assert config.cluster is not None, "checked by the node that started this process"
    wait_for_slots(ours, num_slots=config.cluster.num_slots, timeout_s=timeout_s)
    look_first(ours, config)
    jobs = reach(cluster, address=None, rendezvous=None)
    running = [job for job in _known(jobs) if job.run_dir == str(config.run.dir) and not job.is_over]
    job = running[0] if running else jobs.submit(config, folder=Path.cwd(), environ=os.environ)
    say(f"{'following' if running else 'submitted'} {job.id}")
    return jobs.follow(job.id).exit_status


def _note_reached(cluster: str, run_dir: Path) -> None:
    """Write the run's progress to the rendezvous. If it is the same at two stops, the run has made no progress in between."""
    root = OurCluster(cluster).rendezvous
    if root is None:
        return
    try:
        kinds = (f"*.{GROUPS}", f"*.{ATTEMPTS}")
        num_bytes = sum(path.stat().st_size for kind in kinds for path in (run_dir / "journal").glob(kind))
        text = f"step {newest_step(run_dir) or 0}, with {num_bytes} bytes of groups"
        write_atomic(Rendezvous(Path(root), cluster).reached_file, text)
    except OSError as error:  # the run has stopped and saved anyway
        say(f"cannot record the run's progress: {error}")


def _known(jobs: Jobs) -> list[Job]:
    """List the jobs, once Ray's dashboard answers. It starts after Ray, and on a busy node it may start much later."""
    from rollcall.process.ray.job_client import Unreachable

    wait = Wait(180.0)
    while True:
        try:
            return jobs.jobs()
        except Unreachable:
            if not wait.again("waiting for this node's dashboard, which accepts jobs", after_s=1.0):
                raise


def _tell_nodes(cluster: str, status: int) -> None:
    """Send the run's status to all nodes. A node that does not get it exits with an error when Ray stops."""

    def leave(folder: str) -> Callable[[], None]:
        return lambda: write_atomic(Path(folder) / ENDED, str(status))  # the node keeps polling for it

    try:
        ours = OurCluster(cluster)
        nodes = [node for node in ours.ask().nodes if node.alive and node.rank]
        with connected(ours):
            calls = {node.rank: run_on(node.node_id, leave(node.temp_dir), env={}) for node in nodes if node.rank}
            _, failures = answers_of(calls, wait=Wait(30.0), to="receive the run's exit status")
    except ClusterError as error:
        failures = {0: str(error)}
    for rank, why in failures.items():
        say(f"could not tell rank {rank} that the run is over: {why}")


def _ignore_signals() -> None:
    """Ignore signals, because they are meant for the run. This process exits after the run has saved and its job has ended."""
    for number in (*SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    _, name, file, seconds = sys.argv
    sys.exit(drive(name, Path(file), timeout_s=float(seconds)))
