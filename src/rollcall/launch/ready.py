"""The entrypoint of a job on a Ray cluster that Rollcall did not start (`python -m rollcall.launch.ready`). An environment
variable contains the run file. The job waits for all slots, prepares the nodes with Ray tasks, checks for problems, and becomes
`rollcall train`.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rollcall.base.errors import ClusterError
from rollcall.base.wait import Wait, say
from rollcall.config import Config, dump_config, load_config
from rollcall.config.sections import ClusterSection
from rollcall.launch.doctor.examine import examine, show
from rollcall.launch.jobs.prepare import prepare_once
from rollcall.launch.rendered import RUN_FILE_VARIABLE
from rollcall.nodes.check import describe, list_nodes
from rollcall.nodes.cluster import Cluster, find_cluster
from rollcall.nodes.head import NodeInfo
from rollcall.process.ray.connect import connected
from rollcall.process.ray.each_node import answers_of, run_on

# How long to wait for all nodes. Each node prepares itself before it joins and may have to download a model. A Kubernetes cluster may
# still be waiting for its machines.
JOIN_S = 1800.0


def look_first(cluster: Cluster, config: Config) -> None:
    """Run `prepare.once` and then the doctor. One node does this before a run. Raise an error if the doctor finds a serious problem."""
    prepare_once(config)
    report = examine(cluster, config=config, quick=True)
    show(report)
    if report.breaks:
        raise ClusterError("the run was not started: the doctor found problems that would break it (see above)")


def make_ready(config: Config, section: ClusterSection) -> None:
    cluster = find_cluster(ray_address=section.ray_address)
    wait = Wait(JOIN_S, first_s=0.0)
    cluster.wait_until_known(wait)
    # More slots are fine: the cluster may be shared with other runs.
    while (found := list_nodes(cluster)).num_slots < section.num_slots:
        if not wait.again(state := describe(found, num_slots=section.num_slots), after_s=2.0):
            raise ClusterError(f"after {wait.waited_s:.0f} s {state}")
    if config.prepare.each_node or config.prepare.fetch_model:
        _prepare(cluster, [node for node in found.alive if node.slots], config)
    look_first(cluster, config)


def _prepare(cluster: Cluster, nodes: list[NodeInfo], config: Config) -> None:
    run_file = dump_config(config)

    def prepare() -> str:
        """Return the last lines of the command's output if it failed, else an empty string."""
        words = [sys.executable, "-m", "rollcall", "prepare", "/dev/stdin"]
        ended = subprocess.run(words, input=run_file.encode(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        last = ended.stdout.decode(errors="replace").strip().splitlines()[-15:]
        return "\n".join(last) or f"status {ended.returncode}" if ended.returncode else ""

    with connected(cluster):
        calls = {rank: run_on(node.node_id, prepare, env={}) for rank, node in enumerate(nodes)}
        wait = Wait(config.prepare.timeout_s + 86_400.0)  # a stalled download fails by itself
        answers, failures = answers_of(calls, wait=wait, to="prepare itself")
    wrong = {rank: why for rank, why in [*answers.items(), *failures.items()] if why}
    for rank, why in wrong.items():
        say(f"{nodes[rank].host} ({nodes[rank].address}) could not be prepared:\n{why}")
    if wrong:
        raise ClusterError("the run was not started: a node could not be prepared (see above)")


def main() -> None:
    text = os.environ.pop(RUN_FILE_VARIABLE, None)
    if text is None:
        raise SystemExit(f"{RUN_FILE_VARIABLE} is not set: this command is for jobs that `rollcall launch` created")
    run_file = Path(tempfile.mkdtemp(prefix="rollcall-run-")) / "run.yaml"  # a job's own folder may be read-only
    run_file.write_bytes(base64.b64decode(text, validate=True))
    try:
        config = load_config(run_file)
        assert config.cluster is not None, "a launch requires a cluster section"
        make_ready(config, config.cluster)
    except (ClusterError, ValueError, OSError) as error:
        say(f"error: {error}")
        raise SystemExit(1) from None
    os.execv(sys.executable, [sys.executable, "-m", "rollcall", "train", str(run_file)])


if __name__ == "__main__":
    main()
