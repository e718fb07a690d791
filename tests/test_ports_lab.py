"""Who listens where on a cluster with a live run, and what a stranger on a third host gets from each port."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab import Host, Lab, needs_lab
from lab.cluster import ENV, bring_up, rollcall
from lab.lab import CHECKOUT, HostProcess
from runs import make_run

from rollcall.config import dump_config

pytestmark = [needs_lab, pytest.mark.chaos, pytest.mark.slow]

STRANGER = Path(__file__).with_name("lab") / "stranger.py"
WAIT_S = 900.0  # 32 simulated slots may start beside it
# What a stranger may get, and no more: nothing of a run, no key of a store, no code.
HARMLESS = {
    "no connection": "not reachable from another host",
    "door: 32 random bytes, then hung up": "",
    "accepted and ignored": "gloo, whose members have greeted each other",
    "hung up without a word": "",
    "gRPC refused: no token": "",
    "HTTP 401: no token": "",
    "HTTP 403: no token": "",
    "TLS refused: no certificate": "",
}


# What a listening process is, by a word of its command line.
NAMES = {
    "ray::Host": "worker of the run", "ray::Eyes": "watch of the run", "ray::IDLE": "idle worker",
    "RuntimeEnv": "environment agent", "DashboardAgent": "dashboard agent", "dashboard.py": "dashboard",
    "ray.util.client.server": "Ray client", "rollcall train": "controller",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    host: str
    address: str  # where it is bound
    port: int
    process: str
    reached_at: str


def listeners(host: Host) -> list[Listener]:
    found: dict[tuple[str, int], Listener] = {}
    names = {process.pid: process for process in host.processes()}
    for line in host.run(["ss", "-ltnpH"]).stdout.splitlines():
        where, users = line.split()[3], line.partition("users:")[2]
        address, _, port = where.rpartition(":")
        address = address.strip("[]").removeprefix("::ffff:")
        # A worker's own socket is inherited by what it starts; the first one opened it.
        pid = min(int(pid) for pid in re.findall(r"pid=(\d+)", users))
        process = names[pid]
        everywhere = address in ("*", "0.0.0.0", "::")
        reached_at = host.ip if everywhere or address.startswith("127.") else address
        found[address, int(port)] = Listener(
            host=host.name,
            address="*" if everywhere else address,
            port=int(port),
            process=called(process),
            reached_at=reached_at,
        )
    return list(found.values())


def called(process: HostProcess) -> str:
    if process.name in ("raylet", "gcs_server"):
        return process.name
    return next((name for word, name in NAMES.items() if word in process.cmdline), process.name)


@pytest.fixture(params=["plain", "tls"])
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Lab, bool]]:
    with Lab(hosts=3, shared=tmp_path / "shared") as lab:
        yield lab, request.param == "tls"


def test_a_stranger_gets_nothing_from_any_port_of_a_cluster_with_a_live_run(lab: tuple[Lab, bool]) -> None:
    rack, with_tls = lab
    *members, stranger = rack.hosts
    options = ["--rendezvous", str(rack.shared / "meet"), "--slots", "2", *(["--tls"] if with_tls else [])]
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{CHECKOUT / 'tests'}{os.pathsep}{CHECKOUT / 'src'}"}
    bring_up(dict(enumerate(members)), *options, env=env)
    say("the nodes are up")
    placement = '{"actor": "0,2", "rollout": "1,3"}'  # both on both nodes
    config = make_run(
        rack.shared,
        "cluster.num_nodes=2",
        "cluster.num_gpus_per_node=2",
        "cluster.accelerator=cpu",
        f"cluster.component_placement={placement}",
        "trainer.steps=1000000",
        "trainer.save_every=2",
    )
    path = rack.shared / "live.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "rollcall", "train", str(path)]
    run = members[0].start(command, env={**ENV, **env}, cwd=rack.shared)
    metrics = Path(config.run.dir) / "metrics.jsonl"
    wait_until(lambda: run.poll() is not None or count(metrics) >= 2, what="two steps of the run")
    assert run.poll() is None, run.output

    say("two steps are done")
    found = [listener for host in members for listener in listeners(host)]
    addresses = [f"{one.reached_at}:{one.port}" for one in found]
    asked = stranger.run([sys.executable, str(STRANGER), *addresses], timeout_s=500)
    assert asked.returncode == 0, asked.stderr
    answers = json.loads(asked.stdout)
    rows = [(one, answers[f"{one.reached_at}:{one.port}"]) for one in found]
    show(rows, title="TLS" if with_tls else "without TLS")

    assert {one.process for one in found} >= {"gcs_server", "raylet"}
    assert any(answer.startswith("door") for _, answer in rows), "no gang and no weight desk was seen"
    harm = [(one, answer) for one, answer in rows if not answer.startswith(tuple(HARMLESS))]
    assert not harm
    if with_tls:
        assert not any("gRPC" in answer for _, answer in rows)
        sync = stranger.run([sys.executable, str(STRANGER), "--start-sync", *addresses], timeout_s=500)
        assert sync.returncode == 0, sync.stderr
    for host in members:
        assert not (host.root / "tmp/stranger-was-here").exists()
    steps = count(metrics)
    wait_until(
        lambda: run.poll() is not None or count(metrics) >= steps + 2, what="two steps after the stranger's tries"
    )
    assert run.poll() is None, run.output
    assert "attempt" not in run.output and "restart" not in run.output, run.output
    listed = json.loads(rollcall(members[1], "status", "--json").stdout)
    assert [node["alive"] for node in listed["nodes"]] == [True] * 2
    if with_tls:
        run.kill()
        return
    # Without TLS one call ends the head, whoever sends it (Ray 2.60). It is then started again as after any other loss.
    (gcs,) = [f"{one.reached_at}:{one.port}" for one in found if one.process == "gcs_server"]
    stranger.run([sys.executable, str(STRANGER), "--start-sync", gcs], timeout_s=100)
    wait_until(lambda: run.poll() is not None, what="the end of a run whose head is gone")
    say("the head is gone, and the run with it")
    bring_up(dict(enumerate(members)), *options, env=env)
    steps = count(metrics)
    run = members[0].start(command, env={**ENV, **env}, cwd=rack.shared)
    wait_until(lambda: run.poll() is not None or count(metrics) >= steps + 2, what="two steps after the head's end")
    assert run.poll() is None and "resuming" in run.output, run.output
    run.kill()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def show(rows: list[tuple[Listener, str]], *, title: str) -> None:
    print(f"\n{title}\nhost   process                 bound to         port   a stranger gets")
    for one, answer in rows:
        print(f"{one.host:<6} {one.process:<23} {one.address:<16} {one.port:<6} {answer}")


def count(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_until(done: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, f"{what} did not come in {WAIT_S:.0f} s"
        time.sleep(0.5)
