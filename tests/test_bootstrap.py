"""Bring-up on this host, with real Ray: a node is whoever has a state folder of its own."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_nodes import make_node, make_record
from sleeping import set_sleep

from rollcall.base.atomic import write_atomic
from rollcall.base.errors import ClusterError
from rollcall.base.stop import STOPPED
from rollcall.base.wait import speaking
from rollcall.cli.cluster import down
from rollcall.nodes import bootstrap, foreground, ray_start
from rollcall.nodes.bootstrap import start_node, stop_node
from rollcall.nodes.head import HeadAnswer, HeadRefuses, ask_head, dashboard_url
from rollcall.nodes.processes import MARK, command_names, find_processes, stop_processes
from rollcall.nodes.rank import LAUNCHERS, find_identity
from rollcall.nodes.ray_start import NodeRequest, RayletEnded, Start, choose_temp_dir, find_slots, own_temp_dir
from rollcall.nodes.rendezvous import Head, Rendezvous
from rollcall.nodes.state import (
    NodeRecord,
    Process,
    note_driver,
    read_record,
    read_token,
    state_dir,
    write_record,
)
from rollcall.process.ray import gcs as ask_gcs

ROOT = Path(__file__).parents[1]
WAIT_S = 600.0
LAUNCHER_VARIABLES = {name for rank, counts in LAUNCHERS for name in (rank, *counts)}


class Node:
    """A pretended node: the command line with a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = folder
        kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        extra = {"ROLLCALL_STATE_DIR": str(folder), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        # Somebody else's Ray, which nothing may follow: the cluster is named.
        self.env = {**kept, **extra, "RAY_ADDRESS": "203.0.113.9:6379", "ROLLCALL_CLUSTER": "default"}

    def rollcall(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rollcall", *arguments]
        return subprocess.run(command, env={**self.env, **env}, capture_output=True, text=True, timeout=WAIT_S)

    def record(self, monkeypatch: pytest.MonkeyPatch, cluster: str = "default") -> NodeRecord:
        monkeypatch.setenv("ROLLCALL_STATE_DIR", str(self.state))
        record = read_record(cluster)
        assert record is not None
        return record


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short, since Ray keeps sockets in it; pytest's own folders are too long."""
    path = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[Node]:
    """Rank 0 of 2, with four slots."""
    node = Node(folder / "n0")
    started = node.rollcall(
        "node", "--rank", "0", "--num-nodes", "2", "--rendezvous", str(folder / "shared"), "--slots", "4"
    )
    assert started.returncode == 0, started.stderr
    assert started.stdout.startswith("Ray started\n")
    yield node
    assert node.rollcall("down").returncode == 0


def join(folder: Path, *, rank: int = 1, **changes: Any) -> NodeRequest:
    request = NodeRequest(
        cluster="default", rank=rank, num_nodes=2, rendezvous=folder / "shared", slots=2, timeout_s=60.0
    )
    return replace(request, **changes)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_second_start_on_the_same_node_says_so(head: Node, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = head.record(monkeypatch)
    again = head.rollcall(
        "node", "--master", "--num-nodes", "2", "--rendezvous", str(folder / "shared"), "--slots", "4"
    )
    assert again.returncode == 0 and "already running" in again.stdout and before.head_address in again.stdout
    assert head.record(monkeypatch) == before


@pytest.mark.slow
def test_another_rank_on_the_same_node_is_refused(head: Node, folder: Path) -> None:
    refused = head.rollcall("node", "--worker", "1", "--rendezvous", str(folder / "shared"), "--slots", "4")
    assert refused.returncode == 1 and "this node is rank 0 of cluster 'default', not rank 1" in refused.stderr


@pytest.mark.slow
def test_ports_are_recorded_and_the_dashboard_listens_on_loopback(head: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    record = head.record(monkeypatch)
    assert record.dashboard_url == f"http://127.0.0.1:{record.ports['dashboard']}"
    assert {"gcs", "dashboard", "client", "node_manager", "object_manager", "runtime_env_agent"} <= set(record.ports)
    assert len(set(record.ports.values())) == len(record.ports)


@pytest.mark.slow
def test_without_the_token_there_is_no_answer_no_join_and_no_dashboard(
    head: Node, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = head.record(monkeypatch)
    with pytest.raises(HeadRefuses):
        ask_head(record.head_address, token="0" * 64)
    for headers in ({}, {"Authorization": f"Bearer {'0' * 64}"}):
        request = urllib.request.Request(f"{record.dashboard_url}/api/jobs/", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=20)
        assert refused.value.code in (401, 403)
    plain = {name: value for name, value in head.env.items() if not name.startswith("RAY_")}
    stranger = folder / "stranger"
    command = [*(sys.executable, "-m", "ray.scripts.scripts", "start"), f"--address={record.head_address}"]
    joined = subprocess.run(
        [*command, f"--temp-dir={stranger}"],
        env={**plain, "HOME": str(folder), MARK: str(stranger)}, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert joined.returncode != 0 and find_processes(stranger) == []
    assert [node.rank for node in ask_head(record.head_address, token=read_token("default")).nodes] == [0]


@pytest.mark.slow
def test_the_token_is_in_no_log_and_no_process_list(head: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    record = head.record(monkeypatch)
    token = read_token("default").encode()
    holders = [path for path in head.state.rglob("*") if path.is_file() and token in path.read_bytes()]
    assert holders == [head.state / "default" / "token"]
    processes = find_processes(state_dir("default"), recorded=record.processes)
    assert len(processes) > 5
    for process in processes:
        for name in ("cmdline", "environ"):
            assert token not in Path(f"/proc/{process.pid}/{name}").read_bytes(), (process, name)


@pytest.mark.slow
def test_check_and_status_tell_who_is_missing(head: Node) -> None:
    missing = head.rollcall("check", "6", "--timeout", "1")
    assert missing.returncode == 1 and "4 of 6" in missing.stderr and "missing: rank 1" in missing.stderr
    assert head.rollcall("check", "3").returncode == 1
    status = json.loads(head.rollcall("status", "--json").stdout)
    assert (status["num_slots"], status["missing"], status["nodes"][0]["rank"]) == (4, [1], 0)
    assert "not joined" in head.rollcall("status").stdout


@pytest.mark.slow
def test_a_file_with_another_id_at_a_living_head_is_not_joined(
    head: Node, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = Rendezvous(folder / "shared", "default")
    genuine = published.read()
    assert genuine is not None
    forged = Rendezvous(folder / "forged", "default")
    forged.publish(replace(genuine, cluster_id="0" * 16), token=published.read_token())
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(folder / "n1"))
    with pytest.raises(ClusterError, match="a different cluster answers at that address"):
        start_node(join(folder, rendezvous=folder / "forged", timeout_s=1.0))
    assert read_record("default") is None


@pytest.mark.slow
def test_a_number_of_nodes_or_a_rank_that_does_not_fit_is_refused(
    head: Node, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(folder / "n1"))
    with pytest.raises(ClusterError, match="--num-nodes is 3, but rank 0 at .* was started with --num-nodes 2"):
        start_node(join(folder, num_nodes=3))
    with pytest.raises(ClusterError, match="rank 2 is too high: this cluster has 2 nodes"):
        start_node(join(folder, rank=2, num_nodes=None))
    monkeypatch.setattr(bootstrap, "TAKEN_S", 0.0)
    with pytest.raises(ClusterError, match="rank 0 is taken by .* which is alive"):
        start_node(join(folder, rank=0))


DRIVER = """
import os, subprocess, sys, time
import ray
from rollcall.process.ray.connect import connect

record = connect().record

@ray.remote(num_gpus=1, resources={f"rollcall_node_{record.rank}": 1})
class Worker:
    def start_a_child_that_hides(self):
        return subprocess.Popen(["sleep", "600"], start_new_session=True, env={}).pid

    def where(self):
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

worker = Worker.remote()
node_id, slot = ray.get(worker.where.remote())
assert node_id == ray.get_runtime_context().get_node_id(), "the driver is not on its own node"
print(record.rank, slot, ray.get(worker.start_a_child_that_hides.remote()), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.chaos
def test_a_worker_joins_takes_work_and_leaves_nothing_when_it_goes_down(
    head: Node, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(folder / "n1")
    started = node.rollcall("node", "--rendezvous", str(folder / "shared"), "--slots", "2", NODE_RANK="1")
    assert started.returncode == 0, started.stderr
    record = node.record(monkeypatch)
    assert (record.rank, record.num_nodes) == (1, 2)
    assert head.rollcall("check", "6").returncode == 0
    with pytest.raises(ClusterError, match="rank 1 is taken"):
        monkeypatch.setenv("ROLLCALL_STATE_DIR", str(folder / "n2"))
        monkeypatch.setattr(bootstrap, "TAKEN_S", 0.0)
        start_node(join(folder))

    driver = subprocess.Popen([sys.executable, "-c", DRIVER], env=node.env, stdout=subprocess.PIPE, text=True)
    reader = subprocess.Popen(
        ["tail", "-f", f"{record.temp_dir}/session_latest/logs/raylet.out"], stdout=subprocess.DEVNULL
    )
    try:
        assert driver.stdout is not None
        rank, slot, child = driver.stdout.readline().split()
        assert (rank, slot) in (("1", "0"), ("1", "1")) and Path(f"/proc/{child}").exists()
        stopped = node.rollcall("down")
        assert stopped.returncode == 0 and "stopped" in stopped.stdout
        monkeypatch.setenv("ROLLCALL_STATE_DIR", str(node.state))
        assert find_processes(state_dir("default"), recorded=record.processes) == []
        assert not is_living(int(child))
        assert reader.poll() is None, "a process that only reads the logs is not the cluster's"
    finally:
        for process in (driver, reader):
            process.kill()
            process.wait()
    assert read_record("default") is None and not (state_dir("default") / "token").exists()
    assert "no process of cluster" in node.rollcall("down").stdout
    assert head.rollcall("check", "4").returncode == 0


def is_living(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.chaos
def test_a_second_cluster_lives_beside_the_first_and_ends_alone(
    head: Node, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = head.record(monkeypatch)
    options = ["--cluster", "other", "--num-nodes", "1", "--head-address", "127.0.0.1:26379", "--slots", "3", "--block"]
    command = [sys.executable, "-m", "rollcall", "node", "--master", *options]
    env = {**head.env, "ROLLCALL_TOKEN": "0123456789abcdef" * 4}
    second = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert second.stdout is not None and second.stdout.readline() == "Ray started\n"
        record = wait_for_record("other")
        assert record.head_address == "127.0.0.1:26379"
        assert not set(record.ports.values()) & set(first.ports.values())
        assert head.rollcall("check", "3", "--cluster", "other").returncode == 0
        assert head.rollcall("check", "4").returncode == 0
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=WAIT_S) == 0
    finally:
        second.kill()
        second.wait()
        stop_node("other")
    assert read_record("other") is None
    assert head.rollcall("check", "4").returncode == 0 and head.record(monkeypatch) == first


def wait_for_record(cluster: str) -> NodeRecord:
    deadline = time.monotonic() + WAIT_S
    while (record := read_record(cluster)) is None:
        assert time.monotonic() < deadline, f"no record of cluster {cluster}"
        time.sleep(0.1)
    return record


@pytest.mark.slow
def test_the_head_withdraws_what_it_published_when_it_goes_down(head: Node, folder: Path) -> None:
    """The last of those that use the head; the fixture's own `down` then finds nothing to do."""
    assert Rendezvous(folder / "shared", "default").read() is not None
    assert head.rollcall("down").returncode == 0
    assert list((folder / "shared" / "default").iterdir()) == []
    gone = head.rollcall("status")
    assert gone.returncode == 1 and "not part of a cluster 'default'" in gone.stderr


def identity(*, rank=None, master=False, worker=None, num_nodes=None, **environ: str):
    return find_identity(rank=rank, master=master, worker=worker, num_nodes=num_nodes, environ=environ)


def test_the_rank_comes_from_options_first_and_then_from_the_launchers_in_order() -> None:
    assert identity(rank=2, num_nodes=4, RANK="1", WORLD_SIZE="8") == (2, 4)
    assert identity(rank=2, RANK="1", WORLD_SIZE="8") == (2, None)
    assert identity(master=True, num_nodes=2) == (0, 2) and identity(worker=3) == (3, None)
    assert identity(RANK="1", WORLD_SIZE="3", NODE_RANK="2", NNODES="4") == (1, 3)
    assert identity(NODE_RANK="2", NNODES="4", SLURM_NODEID="0") == (2, 4)
    assert identity(SLURM_NODEID="1", SLURM_NNODES="2", SLURM_PROCID="7") == (1, 2)
    assert identity(SLURM_PROCID="1", SLURM_NNODES="2") == (1, 2)
    assert identity(SKYPILOT_NODE_RANK="1", SKYPILOT_NUM_NODES="2") == (1, 2)
    assert identity(DSTACK_NODE_RANK="1", DSTACK_NODES_NUM="2") == (1, 2)
    assert identity(RANK="", NODE_RANK="1") == (1, None)
    assert identity(master=True, SLURM_NNODES="6") == (0, 6)


def test_no_rank_anywhere_lists_where_it_could_come_from() -> None:
    with pytest.raises(ClusterError) as error:
        identity()
    for name in ("--rank", "--master", "--worker", *(name for name, _ in LAUNCHERS)):
        assert name in str(error.value)


def test_ranks_that_contradict_themselves_are_refused() -> None:
    for wrong, words in (
        (dict(rank=1, master=True), "all set the rank"),
        (dict(rank=4, num_nodes=4), "ranks are 0 to 3"),
        (dict(worker=0), "workers start at 1"),
        (dict(rank=0), "give --num-nodes"),
        (dict(RANK="one"), "RANK='one'"),
    ):
        with pytest.raises(ClusterError, match=words):
            identity(**wrong)  # pyright: ignore[reportArgumentType]


def test_slots_are_the_gpus_or_what_was_asked_on_a_node_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "_count_gpus", lambda: 0)
    assert find_slots(8) == (8, "cpu")
    with pytest.raises(ClusterError, match="--slots N"):
        find_slots(None)
    monkeypatch.setattr(ray_start, "_count_gpus", lambda: 8)
    assert find_slots(None) == (8, "gpu") and find_slots(4) == (4, "gpu")
    with pytest.raises(ClusterError, match="give at most 8"):
        find_slots(16)


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path / "s"))
    monkeypatch.delenv("ROLLCALL_TOKEN", raising=False)
    monkeypatch.setattr(ray_start, "_count_gpus", lambda: 0)
    short = Path("/tmp/rc")
    for changes, words in (
        (dict(rendezvous=None), "--rendezvous DIR .* or --head-address"),
        (dict(temp_dir=Path("/tmp") / ("x" * 60)), "give a shorter --temp-dir"),
        (dict(temp_dir=short, rendezvous=None, head_address="node0:1234"), "set ROLLCALL_TOKEN"),
        (dict(temp_dir=short, cluster="my cluster"), "is not a valid cluster name"),
        (dict(temp_dir=short, cluster="../escape"), "is not a valid cluster name"),
    ):
        with pytest.raises(ClusterError, match=words):
            start_node(replace(join(tmp_path), **changes))


def test_the_longest_name_of_a_cluster_leaves_room_for_rays_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="rc", dir="/tmp") as root:
        monkeypatch.setenv("ROLLCALL_STATE_DIR", root)
        requests = [NodeRequest(cluster=name, rank=0, num_nodes=1) for name in ("a" * 32, "a" * 31 + "b", "a")]
        folders = [choose_temp_dir(request) for request in requests]
        assert len(set(folders)) == 3 and folders[2] == Path(root, "a/ray")
        for request, folder in zip(requests, folders, strict=True):
            folder.mkdir()
            stop_node(request.cluster)
            assert not folder.exists()


def test_a_disk_without_room_for_rays_logs_is_refused_before_ray_ends_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = NodeRequest(cluster="a", rank=0, num_nodes=1, temp_dir=Path("/tmp/rollcall-of-a-test/ray"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=63_000_000))
    with pytest.raises(
        ClusterError, match=r"of-a-test/ray has 63.00 MB of free space, but Ray needs at least 64.00 MB"
    ):
        choose_temp_dir(request)


@pytest.mark.parametrize("token", ["a", "secret", "x" * 64, "password" * 8, "0123456789abcdef0123456789abcde"])
def test_a_token_that_can_be_guessed_is_refused_with_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path / "s"))
    monkeypatch.setenv("ROLLCALL_TOKEN", token)
    monkeypatch.setattr(ray_start, "_count_gpus", lambda: 0)
    with pytest.raises(ClusterError, match="needs at least 32, 8 of them distinct.* `openssl rand -hex 32`") as refused:
        start_node(replace(join(tmp_path), temp_dir=Path("/tmp/rc")))
    assert len(token) == 1 or token not in str(refused.value)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_node_on_loopback_listens_nowhere_else_and_takes_drivers(
    head: Node, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that this cluster's processes listen on."""
    options = ["--cluster", "inward", "--num-nodes", "1", "--node-ip", "127.0.0.1", "--slots", "1"]
    meet = ["--rendezvous", str(folder / "inward")]
    started = head.rollcall("node", "--master", *options, *meet)
    try:
        assert started.returncode == 0, started.stderr
        record = head.record(monkeypatch, "inward")
        pids = {process.pid for process in find_processes(state_dir("inward"))}
        rows = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout.splitlines()
        bound = [row.split()[3] for row in rows if any(f"pid={pid}," in row for pid in pids)]
        assert (
            len(bound) > 5 and [one for one in bound if not one.startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:"))] == []
        )
        assert record.node_ip == "127.0.0.1"
        driver = "from rollcall.process.ray.connect import connect; from rollcall.nodes.cluster import find_cluster; connect(find_cluster('inward')); import ray; print(len(ray.nodes()))"
        done = subprocess.run(
            [sys.executable, "-c", driver], env=head.env, capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.stdout == "1\n", done.stderr
    finally:
        head.rollcall("down", "--cluster", "inward")


@pytest.mark.slow
def test_a_ray_that_fails_to_start_shows_its_own_words_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path))
    temp_dir = folder / "t"
    request = NodeRequest(
        cluster="default", rank=0, num_nodes=1, rendezvous=tmp_path / "shared", slots=1, temp_dir=temp_dir,
        dashboard_host="not an address",
    )  # fmt: skip
    with pytest.raises(ClusterError, match="Ray did not start on"):
        start_node(request)
    assert read_record("default") is None and find_processes(state_dir("default")) == []
    assert not (tmp_path / "shared" / "default" / "head.json").exists()


RAYLET_ENDS = """#!/bin/bash
mkdir -p {folder}/session_1/logs
ln -s {folder}/session_1 {folder}/session_latest
echo "[2026-11-19 03:21:20,329 C 31995 31995] (raylet) main.cc:7: Timed out waiting for file /tmp/x" > {folder}/session_1/logs/raylet.out
cp /bin/sleep {folder}/raylet
{folder}/raylet 1.5
sleep 600
"""


def test_a_raylet_that_ends_while_ray_starts_is_told_at_once_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path / "s"))
    folder, program = tmp_path / "t", tmp_path / "python"
    folder.mkdir()
    program.write_text(RAYLET_ENDS.format(folder=folder))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    record = replace(make_record(), rank=1, node_ip="127.0.0.1", temp_dir=str(folder))
    request = NodeRequest(cluster="default", rank=record.rank, num_nodes=1)
    start = Start(record=record, token="x" * 64, publish_token=False, tls=False)
    words = "raylet on 127.0.0.1 ended while Ray was starting; .*session_1/logs.* same command .*(?s:.*)Timed out waiting for file"
    try:
        with pytest.raises(ClusterError, match=words):
            ray_start.ray_start(request, start, log=tmp_path / "start.log", deadline=time.monotonic() + WAIT_S)
    finally:
        stop_processes(state_dir("default"))


@pytest.mark.parametrize("num_ends", [1, 2])
def test_a_raylet_that_ends_while_ray_starts_gets_one_more_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_ends: int
) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path / "s"))
    starts: list[Start] = []

    def plan_head(request: NodeRequest, **rest: Any) -> Start:
        record = replace(make_record(), temp_dir=str(own_temp_dir("default")))
        return Start(record=record, token="x" * 64, publish_token=False, tls=False)

    def start_ray(request: NodeRequest, start: Start, **rest: Any) -> None:
        starts.append(start)
        if len(starts) <= num_ends:
            raise RayletEnded("Ray's raylet on 10.0.0.1 ended; its logs:\n  Timed out waiting for file")
        (own_temp_dir("default") / "session_latest").mkdir()

    monkeypatch.setattr(bootstrap, "choose_temp_dir", lambda request: own_temp_dir("default"))
    monkeypatch.setattr(bootstrap, "_refuse_second_head", lambda request, token: None)
    monkeypatch.setattr(bootstrap, "plan_head", plan_head)
    monkeypatch.setattr(bootstrap, "ray_start", start_ray)
    monkeypatch.setattr(bootstrap, "_joined", lambda start, deadline: start.record)
    monkeypatch.setattr(bootstrap, "_publish", lambda *given, deadline: None)
    request = NodeRequest(cluster="default", rank=0, num_nodes=1, rendezvous=tmp_path / "r", slots=1)
    if num_ends == 1:
        record, was_there = bootstrap.start_node(request)
        assert record == read_record("default") and not was_there
    else:
        with pytest.raises(RayletEnded):
            bootstrap.start_node(request)
        assert read_record("default") is None
    first, second = starts
    assert first.mark != second.mark, "the head still lists the node that ended"
    said = capsys.readouterr()
    assert (
        "Timed out waiting for file\nRay's raylet ended while Ray was starting; trying once more" in said.out + said.err
    )


def test_logs_of_a_start_that_failed_stay_until_the_next_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path))
    logs = [state_dir("default") / "start.log", own_temp_dir("default") / "session_1/logs/raylet.out"]
    for path in logs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    down(cluster="default", keep_logs=True)
    assert (
        f"no process of cluster 'default' is running on this node; its logs are in {tmp_path}/default"
        in capsys.readouterr().out
    )
    assert all(path.exists() for path in logs)
    down(cluster="default")
    assert capsys.readouterr().out == "no process of cluster 'default' is running on this node\n"
    assert not (tmp_path / "default").exists()


@pytest.mark.chaos
def test_processes_are_found_by_their_mark_session_or_parent_and_only_those_are_stopped(tmp_path: Path) -> None:
    script = "sleep 600 & env -i setsid sleep 601 & exec env -i sleep 602"  # a child, one that hides, one unmarked
    ours = subprocess.Popen(["bash", "-c", script], env={**os.environ, MARK: str(tmp_path)}, start_new_session=True)
    other = subprocess.Popen(["sleep", "603"], env={**os.environ, MARK: str(tmp_path / "other")})
    try:
        found = wait_for_processes(tmp_path, count=3, recorded=Process.of(ours.pid))
        assert other.pid not in found
        assert stop_processes(tmp_path, recorded=[started for pid in found if (started := Process.of(pid))]) == 3
        ours.wait(timeout=WAIT_S)
        assert find_processes(tmp_path) == [] and other.poll() is None
        assert stop_processes(tmp_path) == 0
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def wait_for_processes(folder: Path, *, count: int, recorded: Process | None) -> list[int]:
    assert recorded is not None
    deadline = time.monotonic() + WAIT_S
    while len(found := find_processes(folder, recorded=[recorded])) != count or "bash" in command_names(found):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return [process.pid for process in found]


def test_a_process_number_that_was_given_out_again_is_not_taken_for_the_old_process(tmp_path: Path) -> None:
    mine = Process.of(os.getpid())
    assert mine is not None and mine.is_alive()
    earlier = Process(pid=os.getppid(), started=1)
    assert not earlier.is_alive()
    assert find_processes(tmp_path, recorded=[earlier]) == []


SOME_START = Start(
    record=make_record(), token="t", publish_token=True, tls=False,
)  # fmt: skip


class Store:
    """The head's key-value store; ``before_put`` runs between a look and the write that follows it."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.before_put: Callable[[], object] = lambda: None

    def internal_kv_get(self, key: bytes, namespace: bytes, *, timeout: float) -> bytes | None:
        return self.values.get(key)

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes, *, timeout: float) -> None:
        meanwhile, self.before_put = self.before_put, lambda: None
        meanwhile()
        assert not overwrite
        self.values.setdefault(key, value)


def test_a_rank_goes_to_one_of_those_who_claim_it_at_one_moment() -> None:
    store = Store()
    store.before_put = lambda: ask_gcs.claim(store, "1", "fast", alive={"fast", "slow"})
    assert ask_gcs.claim(store, "1", "slow", alive={"fast", "slow"}) == "fast"
    assert ask_gcs.claim(store, "1", "fast", alive={"fast", "slow"}) == "fast"
    assert ask_gcs.claim(store, "2", "slow", alive={"fast", "slow"}) == "slow"


def test_the_rank_of_a_dead_node_goes_to_one_of_those_who_claim_it_after_it() -> None:
    store = Store()
    for mark in ("first", "second"):
        assert ask_gcs.claim(store, "1", mark, alive={mark}) == mark
    store.before_put = lambda: ask_gcs.claim(store, "1", "fast", alive={"fast", "slow"})
    assert ask_gcs.claim(store, "1", "slow", alive={"fast", "slow"}) == "fast"


def test_of_two_heads_that_publish_at_one_moment_the_second_to_write_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = NodeRequest(cluster="default", rank=0, num_nodes=1, rendezvous=tmp_path)
    start = replace(SOME_START, token="mine")
    other = Head(
        cluster="default", cluster_id="other", address="10.0.0.9:1", host="node9", dashboard=None,
        started_at="",
    )  # fmt: skip
    record = replace(make_record(), ports={"dashboard": 1})
    rendezvous = Rendezvous(tmp_path, "default")
    set_sleep(monkeypatch, bootstrap, lambda seconds: rendezvous.publish(other, token="other"))
    with pytest.raises(ClusterError, match=r"rank 0 is taken by node9 \(10.0.0.9:1\)"):
        bootstrap._publish(request, start, record, deadline=math.inf)
    rendezvous.head_file.unlink()
    tokens = iter(["mixed", "mine"])
    set_sleep(monkeypatch, bootstrap, lambda seconds: write_atomic(rendezvous.token_file, next(tokens), private=True))
    bootstrap._publish(request, start, record, deadline=math.inf)
    assert rendezvous.read_token() == "mine"


def test_a_rendezvous_that_loses_what_is_written_to_it_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = NodeRequest(cluster="default", rank=0, num_nodes=1, rendezvous=tmp_path)
    rendezvous = Rendezvous(tmp_path, "default")
    set_sleep(monkeypatch, bootstrap, lambda seconds: rendezvous.head_file.unlink())
    record = replace(make_record(), ports={"dashboard": 1})
    with pytest.raises(ClusterError, match="the files that this node writes to .* do not appear there"):
        bootstrap._publish(request, SOME_START, record, deadline=0.0)


def test_rays_own_helpers_are_no_run_that_a_node_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    titles = ["/lib/raylet --node", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE"]
    found = [Process(pid=pid, started=0) for pid in range(5)]
    monkeypatch.setattr(foreground, "find_processes", lambda folder, *, recorded: found[: len(titles)])
    monkeypatch.setattr(foreground, "command_of", lambda pid: titles[pid])
    assert not foreground.has_run(make_record())
    titles.append("ray::Host.call")
    assert foreground.has_run(make_record())


def test_a_node_in_the_foreground_ends_with_an_error_when_its_ray_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(foreground, "LOOK_EVERY_S", 0.01)
    write_record(make_record())
    (tmp_path / "default/start.log").touch()
    with pytest.raises(ClusterError, match="rank 0 of cluster 'default'.* has exited by itself; its logs are in"):
        foreground.hold(make_record())
    assert read_record("default") is None and (tmp_path / "default/start.log").exists()
    foreground.hold(make_record())  # taken down by another command, which is no error


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A node in the foreground whose Ray is a list of what happens to it."""
    happened: list[str] = []
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(foreground, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(foreground, "is_running", lambda record: True)
    monkeypatch.setattr(foreground, "stop_node", lambda cluster: happened.append("stopped"))
    monkeypatch.setattr(foreground, "drivers", lambda record: [])
    monkeypatch.setattr(
        foreground, "signal_processes", lambda found, number: happened.append(signal.Signals(number).name)
    )
    return happened


def hold_and_tell(
    *numbers: int, save_s: float = 60.0, until: Callable[[], int | None] | None = None, too_early: int | None = None
) -> int | None:
    """Hold the node, with one signal after the other."""

    def tell() -> None:
        for number in numbers:
            time.sleep(0.1)
            os.kill(os.getpid(), number)

    teller = threading.Thread(target=tell)
    teller.start()
    status = foreground.hold(make_record(), save_s=save_s, until=until, too_early=too_early)
    teller.join()
    return status


def test_a_node_in_the_foreground_lets_its_run_save_before_ray_goes(
    held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([True, True, True])

    def has_run(record: NodeRecord) -> bool:
        held.append("looked")
        return next(looks, False)

    monkeypatch.setattr(foreground, "has_run", has_run)
    hold_and_tell(signal.SIGUSR1, signal.SIGTERM)
    assert held == ["SIGUSR1", "SIGTERM", *["looked"] * 4, "stopped"]


def test_ray_stays_until_the_one_who_follows_the_run_has_printed_its_end(
    held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last line says that it is saved; with Ray, the log would be gone."""
    looks = iter([True])
    monkeypatch.setattr(foreground, "has_run", lambda record: next(looks, False))

    def until() -> int | None:
        if "SIGTERM" not in held:
            return None
        held.append("asked")
        return STOPPED if held.count("asked") == 2 else None

    with speaking(held.append):
        assert hold_and_tell(signal.SIGTERM, until=until) == STOPPED
    assert held[0] == "SIGTERM" and held[2:4] == ["asked", "asked"] and held[-1] == "stopped"
    assert "the run was stopped; its progress is saved, and the same command continues it (status 75)" in held[4]
    del held[:]
    assert hold_and_tell(signal.SIGTERM, until=lambda: None) is None, "no run, so nothing to wait for"


def test_a_node_that_is_told_ahead_before_its_run_has_begun_ends_as_one_that_can_go_on(held: list[str]) -> None:
    assert hold_and_tell(signal.SIGUSR1, too_early=75) == 75
    assert held == ["SIGUSR1", "stopped"]


@pytest.mark.parametrize("save_s, numbers", [(0.0, [signal.SIGTERM]), (60.0, [signal.SIGTERM, signal.SIGINT])])
def test_a_run_that_does_not_end_is_not_waited_for_longer_than_told(
    held: list[str], monkeypatch: pytest.MonkeyPatch, save_s: float, numbers: list[int]
) -> None:
    monkeypatch.setattr(foreground, "has_run", lambda record: True)
    monkeypatch.setattr(foreground, "SAME_S", 0.0)
    hold_and_tell(*numbers, save_s=save_s)
    assert held == ["SIGTERM", "stopped"]


def test_drivers_and_busy_workers_are_known_by_their_titles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path))
    record = make_record()
    environ = {**os.environ, MARK: str(state_dir(record.cluster))}

    def start(title: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", "-c", f"exec -a '{title}' sleep 60"], env=environ, start_new_session=True)

    def settle(process: subprocess.Popen[bytes]) -> None:
        while b"sleep" not in Path(f"/proc/{process.pid}/comm").read_bytes():
            time.sleep(0.01)

    started = []
    try:
        for title, busy, num_drivers in (
            ("ray::IDLE", False, 0),
            ("python -m rollcall.launch.jobs.driver run.yaml", False, 1),
            ("ray::Host.call", True, 1),
        ):
            started.append(start(title))
            settle(started[-1])
            assert (foreground.has_run(record), len(foreground.drivers(record))) == (busy, num_drivers)
        note_driver(record.cluster)  # `rollcall train` on this node
        (state_dir(record.cluster) / "drivers" / "4000000").write_text("1")  # one that has ended
        assert Process.of(os.getpid()) in foreground.drivers(record) and len(foreground.drivers(record)) == 2
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("bound", "node_ip", "url"),
    [
        ("127.0.0.1:8265", "10.0.0.1", "http://127.0.0.1:8265"),
        ("127.0.0.1:8265", "10.0.0.2", None),
        ("0.0.0.0:8265", "10.0.0.2", "http://10.0.0.1:8265"),
        ("10.9.0.1:8265", "10.0.0.2", "http://10.9.0.1:8265"),
        (None, "10.0.0.1", None),
    ],
)
def test_a_node_is_told_a_dashboard_it_can_reach(bound: str | None, node_ip: str, url: str | None) -> None:
    assert dashboard_url(bound, node_ip=node_ip, head_address="10.0.0.1:6379") == url


def test_gpus_that_the_user_hides_stay_hidden_behind_logical_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ray_start._logical_ids(2) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ray_start._logical_ids(2) == {"CUDA_VISIBLE_DEVICES": "1000,1001"}


@pytest.mark.parametrize("alive", [True, False])
def test_a_node_counts_as_running_while_its_head_lists_it_as_alive(
    alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = replace(make_record(), rank=1, node_ip="10.0.0.1")
    answer = HeadAnswer(nodes=(make_node(0), make_node(1, alive=alive)), dashboard=None)
    monkeypatch.setattr(bootstrap, "read_record", lambda cluster: record)
    monkeypatch.setattr(bootstrap, "is_running", lambda record: True)
    monkeypatch.setattr(bootstrap, "ask_own_head", lambda cluster, head_address: answer)
    said: list[str] = []
    request = NodeRequest(cluster="default", rank=1, num_nodes=2, rendezvous=tmp_path)
    with speaking(said.append):
        assert bootstrap._running(request) == (record if alive else None)
    assert ("considers this node dead" in "".join(said)) == (not alive)
