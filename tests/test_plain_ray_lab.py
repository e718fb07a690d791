"""A Ray that `rollcall node` did not start, on real hosts: `ray start --head` and two `ray start --address`.

Once without a token, once in Ray's own token mode. Runs are small: what is looked at is where they run and that none of
their work is lost.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.cluster import ENV, rollcall
from lab.command import Command
from lab.lab import Host, Lab, needs_lab

from rollcall.base.journal import Journal
from rollcall.observe.events import read_phases
from rollcall.view.audit import audit

pytestmark = [needs_lab, pytest.mark.slow]
RAY = str(Path(sys.executable).with_name("ray"))
ROLLCALL = str(Path(sys.executable).with_name("rollcall"))
START_S = 240.0
RUN_S = 900.0
TOGETHER = {"actor,rollout": "all"}
TOKEN = "7f3a9c51e0b24d68" * 4
TOKEN_MODE = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
NO_TOKEN = "has no token, so anyone who reaches its ports can run code"
GROUP = """
import os
from rollcall.cluster import RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup, init_ray

class Worker:
    def where(self):
        return os.environ["NODE_RANK"], os.uname().nodename

if __name__ == "__main__":
    init_ray()
    with RayVirtualCluster(bundle_ct_per_node_list=[1, 1, 1], num_gpus_per_node=1) as cluster:
        group = RayWorkerGroup(cluster=cluster, remote_worker_builder=RayWorkerBuilder(Worker), name_prefix="where")
        print(group.get_all_worker_results(group.run_all_workers_single_data(method_name="where")))
"""


# What a head knows of its versions is replaced; prints what was there.
CLAIM = """
import json, sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
print(client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=30).decode())
client.internal_kv_put(b"CLUSTER_METADATA", sys.argv[2].encode(), True, b"cluster", timeout=30)
"""


@dataclass(kw_only=True)
class Plain:
    """Three hosts of one Ray; the head is not the one with the lowest address."""

    lab: Lab
    env: dict[str, str]
    number: int = 0
    runs: list[Path] = field(default_factory=list)

    @property
    def head(self) -> Host:
        return self.lab.hosts[1]

    @property
    def workers(self) -> list[Host]:
        return [self.lab.hosts[0], self.lab.hosts[2]]

    @property
    def address(self) -> str:
        return f"{self.head.ip}:6379"

    @property
    def here(self) -> dict[str, str]:
        """The environment of someone who uses this Ray."""
        return {**self.env, "RAY_ADDRESS": self.address}

    def start(self, host: Host, *options: str) -> None:
        command = [RAY, "start", *options, f"--node-ip-address={host.ip}", "--num-gpus=1"]
        done = host.run(command, env={**ENV, **self.env}, timeout_s=START_S)
        assert done.returncode == 0, done.stdout + done.stderr

    def start_worker(self, host: Host) -> None:
        self.start(host, f"--address={self.address}")

    def write_run(self, *, placement: Mapping[str, str] = TOGETHER, **trainer: Any) -> Path:
        """An absolute path: a job of Ray runs in another folder."""
        self.number += 1
        folder = self.lab.shared / f"run-{self.number}"
        folder.mkdir()
        run = {
            "run": {"name": f"plain-{self.number}", "dir": str(folder / "run"), "seed": 0},
            "cluster": {
                "num_nodes": 3, "num_gpus_per_node": 1, "accelerator": "cpu", "component_placement": dict(placement),
            },
            "model": {"path": "builtin:arithmetic", "device": "cpu"},
            "data": {"train": "builtin:arithmetic", "val": None, "prompts_per_step": 6, "max_prompt_tokens": 16},
            "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4},
            "reward": [{"type": "exact"}],
            "trainer": {"steps": 4, "eval_every": 0, "save_every": 2, "num_threads": 1, "loggers": [], **trainer},
        }  # fmt: skip
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(run))
        return path


@pytest.fixture(scope="module", params=["open", "token"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    with Lab(hosts=4, shared=tmp_path_factory.mktemp("lab") / "shared") as lab:
        found = Plain(lab=lab, env=TOKEN_MODE if request.param == "token" else {})
        found.start(found.head, "--head", "--port=6379")
        for host in found.workers:
            found.start_worker(host)
        yield found


def assert_trained(path: Path, *, steps: int = 4) -> None:
    run_dir = path.parent / "run"
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == steps
    found = audit(run_dir)
    assert found.is_clean, found


def claim_versions(plain: Plain, versions: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-c", CLAIM, plain.address, json.dumps(versions)]
    done = plain.head.run(command, env={**ENV, **plain.env})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wait_for_step(command: Command, run_dir: Path, step: int) -> None:
    give_up = time.monotonic() + RUN_S
    while not any(phase.step >= step for phase in read_phases(run_dir)):
        assert command.poll() is None and time.monotonic() < give_up, command.output
        time.sleep(0.2)


def test_its_nodes_are_listed_and_counted_by_address(plain: Plain) -> None:
    for host in plain.lab.hosts[:3]:
        seen = rollcall(host, "status", "--json", env=plain.here)
        assert seen.returncode == 0, seen.stderr
        nodes = json.loads(seen.stdout)["nodes"]
        rows = [(node["rank"], node["address"], node["slots"], node["is_head"]) for node in nodes]
        assert rows == [(rank, one.ip, 1, one is plain.head) for rank, one in enumerate(plain.lab.hosts[:3])]
    checked = rollcall(plain.head, "check", "3", env=plain.here)
    assert (checked.returncode, checked.stdout) == (0, "all 3 accelerators are present, on 3 nodes\n"), checked.stderr
    short = rollcall(plain.head, "check", "5", "--timeout", "1", env=plain.here)
    assert short.returncode == 1 and "ray start" in short.stderr and "rollcall node" not in short.stderr


def test_worker_groups_run_on_it_in_the_order_of_addresses(plain: Plain) -> None:
    script = plain.lab.shared / "where.py"
    script.write_text(GROUP)
    done = plain.workers[1].run([sys.executable, str(script)], env={**ENV, **plain.here}, timeout_s=RUN_S)
    assert done.stdout.strip() == "[('0', 'node0'), ('1', 'node1'), ('2', 'node2')]", done.stdout + done.stderr


def test_a_run_trains_on_it(plain: Plain) -> None:
    """With a token from another node; without one from the head, named in the run file as the head's own pod of KubeRay names it."""
    path = plain.write_run()
    if plain.env:
        done = rollcall(plain.workers[1], "train", str(path), env=plain.here, timeout_s=RUN_S)
    else:
        done = rollcall(plain.head, "train", str(path), "cluster.ray_address=127.0.0.1:6379", timeout_s=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (NO_TOKEN in done.stdout + done.stderr) == (not plain.env)
    assert_trained(path)


def test_a_job_of_ray_trains_on_it(plain: Plain) -> None:
    path = plain.write_run(steps=1, save_every=1)
    submit = [RAY, "job", "submit", "--address=http://127.0.0.1:8265", "--", ROLLCALL, "train", str(path)]
    done = plain.head.run(submit, env={**ENV, **plain.env}, timeout_s=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_trained(path, steps=1)


def test_a_run_is_submitted_to_it(plain: Plain) -> None:
    """With a token from the head over HTTP, without one from another node through Ray: the dashboard listens on the head's
    loopback."""
    path = plain.write_run(steps=1, save_every=1)
    host = plain.head if plain.env else plain.workers[0]
    done = rollcall(host, "submit", str(path), env=plain.here, timeout_s=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_trained(path, steps=1)
    listed = rollcall(host, "job", "list", "--json", env=plain.here)
    assert json.loads(listed.stdout)["jobs"][0]["status"] == "SUCCEEDED", listed.stderr


@pytest.mark.parametrize("turn", [0, 1])
def test_a_node_that_is_killed_in_a_run_is_recovered_from(plain: Plain, turn: int) -> None:
    """It has an actor, and the next attempt waits for it or goes without; or it only samples, and is replaced in the attempt."""
    mode = (("power", "rollout") if plain.env else ("gang", "elastic"))[
        turn
    ]  # minutes each: two of them on each cluster
    elastic = {"elastic": {"min_nodes": 2, "wait_s": 5.0}} if mode == "elastic" else {}
    placement = {"rollout": "0,2", "actor": "1"} if mode == "rollout" else {"actor,rollout": "all"}
    # Where the others do its work, long enough for it to come back.
    steps, save_every = (200, 50) if mode == "rollout" else (10, 2)
    path = plain.write_run(placement=placement, steps=steps, save_every=save_every, **elastic)
    lost, run_dir = plain.workers[0], path.parent / "run"
    run = plain.head.start([sys.executable, "-m", "rollcall", "train", str(path)], env={**ENV, **plain.here})
    wait_for_step(run, run_dir, 3)
    if mode == "power":
        lost.power_off()  # nobody is told
    else:
        lost.kill()
    lost.restart()
    if mode == "elastic":
        wait_for_step(run, run_dir, 6)
    plain.start_worker(lost)
    assert run.wait(timeout_s=RUN_S) == 0, run.output
    assert f"on node 0 ({lost.ip}) is" in run.output, run.output
    assert ("attempt 2" in run.output) == (mode != "rollout"), run.output
    assert ("the run continues with 2 nodes" in run.output) == (mode == "elastic"), run.output
    assert_trained(path, steps=steps)
    with Journal(run_dir / "journal") as journal:
        samplers = {group.worker for step in range(steps - 5, steps + 1) for group in journal.read(step)}
    assert mode != "rollout" or len(samplers) == 2, samplers


def test_doctor_examines_it(plain: Plain) -> None:
    path = plain.write_run()
    done = rollcall(plain.head, "doctor", str(path), "--json", env=plain.here, timeout_s=RUN_S)
    report = json.loads(done.stdout)
    assert [node["address"] for node in report["nodes"]] == [host.ip for host in plain.lab.hosts[:3]], done.stderr
    assert report["ok"], report["findings"]
    assert any("has no token" in finding["what"] for finding in report["findings"]) == (not plain.env)


def test_down_stops_nothing_there_and_says_so(plain: Plain) -> None:
    before = {process.pid for process in plain.head.processes() if process.name in ("raylet", "gcs_server")}
    done = rollcall(plain.head, "down", env=plain.here)
    assert done.returncode == 0 and f"Rollcall did not start the Ray cluster at {plain.address}" in done.stdout, (
        done.stderr
    )
    assert before == {process.pid for process in plain.head.processes() if process.name in ("raylet", "gcs_server")}


def test_what_does_not_fit_is_refused_in_a_sentence(plain: Plain) -> None:
    path = str(plain.write_run())
    outsider = plain.lab.hosts[3]
    elsewhere = rollcall(outsider, "train", path, env=plain.here)
    assert (
        elsewhere.returncode == 1
        and f"this machine is not a node of the Ray cluster at {plain.address}" in elsewhere.stderr
    )
    nobody = rollcall(plain.head, "train", path, env={**plain.env, "RAY_ADDRESS": f"{plain.head.ip}:6390"})
    assert (
        nobody.returncode == 1 and f"no answer at {plain.head.ip}:6390, which comes from RAY_ADDRESS" in nobody.stderr
    )
    auto = rollcall(plain.head, "status", "--json", env={**plain.env, "RAY_ADDRESS": "auto"})
    assert json.loads(auto.stdout)["head_address"] == plain.address, auto.stderr
    real = claim_versions(plain, {"ray_version": "2.9.3", "python_version": "3.10.1", "ray_init_cluster": False})
    older = rollcall(plain.head, "train", path, env=plain.here)
    claim_versions(plain, real)
    assert (
        older.returncode == 1
        and "runs Ray 2.9.3, but this environment has Ray" in older.stderr
        and "Traceback" not in older.stderr
    )
    if not plain.env:
        return
    bare = rollcall(plain.head, "train", path, env={"RAY_ADDRESS": plain.address})
    assert bare.returncode == 1 and "requires a token, but this shell has none: set RAY_AUTH_TOKEN" in bare.stderr
    wrong = rollcall(plain.head, "status", env={"RAY_ADDRESS": plain.address, "RAY_AUTH_TOKEN": "x" * 40})
    assert wrong.returncode == 1 and "does not accept the token of this shell (RAY_AUTH_TOKEN)" in wrong.stderr
    for said in (elsewhere, nobody, bare, wrong):
        assert "Traceback" not in said.stderr and TOKEN not in said.stderr + said.stdout
    # The mode need not be named: the token is there, and the cluster wants it.
    assert rollcall(plain.head, "status", env={"RAY_ADDRESS": plain.address, "RAY_AUTH_TOKEN": TOKEN}).returncode == 0
