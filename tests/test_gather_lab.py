"""Parts on four hosts' own disks become a verified model: one host is slow, one loses its link, one command is killed."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lab.cluster import LabCluster, rollcall
from lab.command import Command
from lab.lab import Host, Lab, missing_for_lab
from lab.sshd import missing_for_ssh, serve_ssh
from learners import make_learner, trainable
from safetensors.torch import load_file, save_file
from saved import write_parts

from rollcall.checkpoint.merge.merge import merge
from rollcall.checkpoint.store import CheckpointStore
from rollcall.checkpoint.verify import verify
from rollcall.launch.finish.gather import FOLDER

pytestmark = pytest.mark.slow

WAIT_S = 600.0
RUN = "spread-0123456789ab"
PARTS = Path("/tmp/rollcall-0/parts") / RUN
SLOW = "20mbit"  # a part of 12 MB takes a few seconds


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    reason = missing_for_lab() or missing_for_ssh()
    if reason is not None:
        pytest.skip(reason)
    with Lab(hosts=5, shared=tmp_path_factory.mktemp("gather") / "shared") as lab:
        serve_ssh(lab.hosts[:4], client=lab.hosts[4])
        yield lab


def spread(shared: Path, hosts: list[Host], *, name: str) -> Path:
    """A checkpoint on the shared folder whose weights are on the disks of these hosts."""
    learner = make_learner(trainable("qwen3-untied", hidden_size=256, vocab_size=24_000))
    store = CheckpointStore(shared / name / "checkpoints", keep_last=1, keep_best=0)
    checkpoint = store.save(3, write=partial(write_parts, learner=learner), state={}, score=None)
    (checkpoint.parent / "node-folder").write_text(RUN)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    whole = checkpoint / "model/model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    del manifest["files"]["model/model.safetensors"]
    for rank, host in enumerate(hosts):
        part = f"model/part-{rank:05}-of-{len(hosts):05}.safetensors"
        place = PARTS / f"{name}-{checkpoint.name}" / part
        outside = host.root / place.relative_to("/")
        outside.parent.mkdir(parents=True)
        facts = write_part(outside, tensors, rank=rank, count=len(hosts))
        manifest["files"][part] = {**facts, "place": str(place), "node": str(rank), "host": host.name}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


def write_part(path: Path, tensors: dict[str, Any], *, rank: int, count: int) -> dict[str, Any]:
    own, parts = {}, {}
    for name, tensor in tensors.items():
        size = len(tensor) // count
        own[name] = tensor[size * rank : size * (rank + 1)].contiguous()
        start = [size * rank, *[0] * (tensor.ndim - 1)]
        parts[name] = {"name": name, "start": start, "shape": list(tensor.shape)}
    save_file(own, path, metadata={"parts": json.dumps(parts)})
    data = path.read_bytes()
    return {"size": len(data), "blake2b": hashlib.blake2b(data, digest_size=16).hexdigest(), "kind": "weights"}


def slow_down(host: Host) -> None:
    """What it sends; its own disk and processes are as fast as before."""
    done = host.run(["tc", *f"qdisc replace dev eth0 root tbf rate {SLOW} burst 32kb latency 10s".split()])
    assert done.returncode == 0, done.stderr


def speed_up(host: Host) -> None:
    host.run(["tc", "qdisc", "del", "dev", "eth0", "root"])


def arrives(checkpoint: Path, rank: int, command: Command) -> None:
    """Wait until some of a host's part is here, and not all of it."""
    give_up = time.monotonic() + WAIT_S
    while begun_bytes(checkpoint, rank) == 0:
        assert command.poll() is None and time.monotonic() < give_up, command.output
        time.sleep(0.01)


def begun_bytes(checkpoint: Path, rank: int) -> int:
    try:
        return (checkpoint / FOLDER / f"model/part-{rank:05}-of-00004.safetensors").stat().st_size
    except FileNotFoundError:
        return 0


def assert_is_the_model(checkpoint: Path, out: Path) -> None:
    merge(checkpoint, out)
    verify(out)


def test_over_ssh_a_slow_host_and_one_without_a_link_for_a_while(lab: Lab) -> None:
    hosts, client = lab.hosts[:4], lab.hosts[4]
    checkpoint = spread(lab.shared, hosts, name="over-ssh")
    for host in hosts[1:3]:
        slow_down(host)
    names = ",".join(host.name for host in reversed(hosts))  # their order does not matter
    words = ["gather", str(checkpoint), "--hosts", names]
    try:
        command = client.start([sys.executable, "-m", "rollcall", *words])
        arrives(checkpoint, 2, command)
        hosts[2].cut()
        give_up = time.monotonic() + WAIT_S
        while "continuing in" not in command.output:
            assert command.poll() is None and time.monotonic() < give_up, command.output
            time.sleep(0.1)
        hosts[2].heal()
        assert command.wait(timeout_s=WAIT_S) == 0, command.output
    finally:
        hosts[2].heal()
        for host in hosts[1:3]:
            speed_up(host)
    assert "gathered 4 parts" in command.output
    assert_is_the_model(checkpoint, lab.shared / "merged-ssh")
    again = rollcall(client, *words, "--delete", timeout_s=WAIT_S)
    assert again.returncode == 0 and "removed 4 parts from the nodes" in again.stdout, again.stdout + again.stderr
    assert [list((host.root / PARTS.relative_to("/")).rglob("part-*")) for host in hosts] == [[]] * 4


def test_over_the_cluster_a_slow_host_and_a_command_that_was_killed(lab_cluster: LabCluster) -> None:
    hosts = lab_cluster.hosts
    checkpoint = spread(lab_cluster.lab.shared, hosts, name="over-ray")
    words = ["gather", str(checkpoint)]
    slow_down(hosts[2])
    try:
        command = hosts[0].start([sys.executable, "-m", "rollcall", *words])
        arrives(checkpoint, 2, command)
        command.kill()
        assert not (checkpoint / "model/part-00002-of-00004.safetensors").exists()
        begun = begun_bytes(checkpoint, 2)
        done = rollcall(hosts[0], *words, "--json", timeout_s=WAIT_S)
    finally:
        speed_up(hosts[2])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    sizes = {
        name: facts["size"] for name, facts in json.loads((checkpoint / "manifest.json").read_text())["files"].items()
    }
    assert found["num_bytes"] <= sum(sizes[name] for name in found["parts"]) - begun, "what was here was sent again"
    assert_is_the_model(checkpoint, lab_cluster.lab.shared / "merged-ray")
    assert all((host.root / PARTS.relative_to("/")).exists() for host in hosts)
