"""Jobs on real hosts: submitted from a node that is not the head, and from a fifth host; followed, and stopped."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.cluster import ENV, LabCluster, bring_up, rollcall
from lab.lab import Host
from one_node import write_run

WAIT_S = 600.0
CLUSTER = "open"
SECRET = "wandb-5e77a9-not-for-you"


@pytest.fixture(scope="module")
def open_cluster(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """Beside the first, a cluster whose dashboard other machines reach."""
    options = ["--cluster", CLUSTER, "--rendezvous", str(lab_cluster.rendezvous), "--slots", "1"]
    try:
        bring_up({0: lab_cluster.head}, *options, "--dashboard-host", "0.0.0.0", num_nodes=1)
        yield lab_cluster
    finally:
        down = rollcall(lab_cluster.head, "down", "--cluster", CLUSTER)
        assert down.returncode == 0, down.stderr


def test_a_node_that_is_not_the_head_submits_and_stops_without_address_or_token(lab_cluster: LabCluster) -> None:
    run = write_run(lab_cluster.lab.shared, "stopped")
    submitted = rollcall(lab_cluster.hosts[2], "submit", str(run), "--no-wait")
    assert submitted.returncode == 0 and submitted.stdout.startswith("rollcall-stopped-"), submitted.stderr
    stopped = rollcall(lab_cluster.hosts[3], "job", "stop", "latest")
    assert stopped.stdout.strip() == f"{submitted.stdout.strip()} is STOPPED", stopped.stderr
    status = json.loads(rollcall(lab_cluster.hosts[1], "job", "status", "--json").stdout)
    assert (status["run"], status["status"], status["submitter"]) == ("stopped", "STOPPED", "root@node2")


@pytest.mark.slow  # `test_jobs.py` has a job that trains, on one node
def test_a_job_that_is_submitted_beside_the_head_trains_to_its_end(lab_cluster: LabCluster) -> None:
    """The dashboard listens on the head's loopback; the run directory is relative to the shared folder it is started in."""
    run = write_run(lab_cluster.lab.shared, "from-node-2", run={"name": "from-node-2", "dir": "run"})
    host = lab_cluster.hosts[2]
    command = [sys.executable, "-m", "rollcall", "submit", "run.yaml"]
    result = host.run(command, cwd=run.parent, env=ENV, timeout_s=WAIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((run.parent / "run/summary.json").read_text())["steps"] == 2
    assert "Running entrypoint" in result.stdout and "succeeded" in result.stderr
    status = json.loads(rollcall(lab_cluster.hosts[1], "job", "status", "--json").stdout)
    assert (status["run"], status["status"], status["submitter"]) == ("from-node-2", "SUCCEEDED", "root@node2")


def test_rays_own_command_sees_the_same_jobs(lab_cluster: LabCluster) -> None:
    """On the head, where the dashboard listens, with the cluster's token."""
    ours = json.loads(rollcall(lab_cluster.head, "job", "list", "--json").stdout)["jobs"]
    url = json.loads(rollcall(lab_cluster.head, "status", "--json").stdout)["dashboard_url"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/tmp/rollcall-0/default/token"}
    seen = lab_cluster.head.run(["ray", "job", "list", "--address", url], env={**ENV, **token})
    assert seen.returncode == 0 and ours, seen.stderr
    assert all(job["id"] in seen.stdout for job in ours)


def test_a_folder_that_nodes_do_not_share_is_refused(lab_cluster: LabCluster) -> None:
    run = write_run(lab_cluster.lab.shared, "unshared")
    result = rollcall(lab_cluster.hosts[2], "submit", str(run), "run.dir=runs/one")
    assert result.returncode == 1 and "run.dir=runs/one: relative paths start at" in result.stderr


@pytest.mark.slow
def test_env_shows_each_nodes_own_variables(lab_cluster: LabCluster) -> None:
    nodes = {"num_nodes": 4, "num_gpus_per_node": 8, "accelerator": "cpu"}
    cluster = {**nodes, "env": {"MODE": "fast"}, "env_pass": ["A_KEY"], "node_env": {2: {"MODE": "slow"}}}
    run = write_run(lab_cluster.lab.shared, "env", cluster=cluster)
    result = rollcall(lab_cluster.hosts[1], "env", str(run), "--json", env={"A_KEY": SECRET})
    assert result.returncode == 0 and SECRET not in result.stdout + result.stderr, result.stderr
    found = json.loads(result.stdout)["nodes"]
    assert [(node["rank"], node["address"]) for node in found] == [
        (r, host.ip) for r, host in enumerate(lab_cluster.hosts)
    ]
    seen = [{variable["name"]: variable["value"] for variable in node["variables"]} for node in found]
    assert [node["MODE"] for node in seen] == ["fast", "fast", "slow", "fast"]
    assert all(node["A_KEY"] == "<redacted>" for node in seen)
    for host in lab_cluster.hosts:
        assert not host_files_with(SECRET, host)


@pytest.mark.slow  # a second cluster; `test_jobs.py` has one node that is spoken to by its address
def test_a_fifth_host_submits_by_address_and_token(open_cluster: LabCluster) -> None:
    run = write_run(open_cluster.lab.shared, "fifth", cluster={"env_pass": ["A_KEY"]})
    url = json.loads(rollcall(open_cluster.head, "status", "--cluster", CLUSTER, "--json").stdout)["dashboard_url"]
    token = (open_cluster.rendezvous / CLUSTER / "token").read_text().strip()
    submit = ["submit", str(run), "--address", url]
    for env, refusal in (
        ({}, "requires a token, but none is set"),
        ({"ROLLCALL_TOKEN": "wrong"}, "refuses the token"),
    ):
        refused = rollcall(open_cluster.outsider, *submit, env={"A_KEY": SECRET, **env})
        assert refused.returncode == 1 and refusal in refused.stderr
    env = {"A_KEY": SECRET, "ROLLCALL_TOKEN": token}
    result = rollcall(open_cluster.outsider, *submit, env=env, timeout_s=WAIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((run.parent / "run/summary.json").read_text())["steps"] == 2
    assert not host_files_with(SECRET, open_cluster.head)
    assert open_cluster.outsider.processes() == []


@pytest.mark.slow
def test_a_fifth_host_follows_and_stops_a_job_by_the_rendezvous_folder(open_cluster: LabCluster) -> None:
    run = write_run(open_cluster.lab.shared, "long")
    where = ["--rendezvous", str(open_cluster.rendezvous), "--cluster", CLUSTER]
    submitted = rollcall(open_cluster.outsider, "submit", str(run), "trainer.steps=1000000", "--no-wait", *where)
    assert submitted.returncode == 0 and submitted.stdout.startswith("rollcall-long-"), submitted.stderr
    job_id = submitted.stdout.strip()
    follow = [sys.executable, "-m", "rollcall", "job", "logs", "--follow", job_id, *where]
    follower = open_cluster.outsider.start(follow, env=ENV)
    wait_for(run.parent / "run/metrics.jsonl")
    assert follower.poll() is None
    stopped = rollcall(open_cluster.outsider, "job", "stop", "latest", *where)
    assert stopped.stdout.strip() == f"{job_id} is STOPPED", stopped.stderr
    assert follower.wait(timeout_s=WAIT_S) == 1
    assert "Running entrypoint" in follower.output and f"\n{job_id} was stopped\n" in follower.output
    assert not [process for process in open_cluster.head.processes() if "rollcall train" in process.cmdline]


def test_a_head_that_does_not_answer_is_named_within_its_limit(lab_cluster: LabCluster) -> None:
    result = rollcall(
        lab_cluster.outsider, "job", "list", "--address", "http://10.77.0.99:8265", env={"ROLLCALL_TOKEN": "any-token"}
    )
    assert result.returncode == 1 and "no answer from the cluster's head at http://10.77.0.99:8265" in result.stderr


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.2)


def host_files_with(text: str, host: Host) -> list[Path]:
    """In what the host alone has: Ray's folders and the cluster's state."""
    found = (path for path in (host.root / "tmp").rglob("*") if "rollcall-" in str(path))
    return [path for path in found if not path.is_symlink() and path.is_file() and text.encode() in path.read_bytes()]
