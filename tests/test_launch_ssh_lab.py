"""`rollcall launch ssh` on four lab hosts with real sshd, from a fifth: it trains, names what is wrong, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lab.cluster import leftovers, rollcall
from lab.command import Command
from lab.lab import CHECKOUT, Host, Lab, missing_for_lab
from lab.sshd import missing_for_ssh, serve_ssh, start_sshd
from one_node import write_run

pytestmark = pytest.mark.slow

WAIT_S = 900.0
ACTIVATE = Path("/run/activate")  # each host's own
# The lab's own, and what torch caches.
OTHERS = re.compile(r"sshd|/run/(lab-sshd|sshd|activate)|/\.(ssh|cache|config)\b|/tmp/torchinductor|:0016$")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    reason = missing_for_lab() or missing_for_ssh()
    if reason is not None:
        pytest.skip(reason)
    with Lab(hosts=5, shared=tmp_path_factory.mktemp("ssh") / "shared") as lab:
        serve_ssh(lab.hosts[:4], client=lab.hosts[4])
        for host in lab.hosts[:4]:
            write_activate(host)
        yield lab


def write_activate(host: Host) -> None:
    inside(host, ACTIVATE).write_text(f". {sys.prefix}/bin/activate\n")


def inside(host: Host, path: Path) -> Path:
    return host.root / path.relative_to("/")


def client(lab: Lab) -> Host:
    return lab.hosts[4]


def make_run(
    lab: Lab, name: str, hosts: Any, *, num_nodes: int, ssh: Mapping[str, Any] | None = None, **trainer: Any
) -> Path:
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT / "src")}
    return write_run(
        lab.shared,
        name,
        cluster={"num_nodes": num_nodes, "num_gpus_per_node": 1, "accelerator": "cpu"},
        launch={"ssh": {"hosts": hosts, "activate": str(ACTIVATE), "env": env, **(ssh or {})}},
        trainer={"steps": 2, "save_every": 1, "num_threads": 1, "loggers": [], **trainer},
    )


def launch(lab: Lab, *words: str) -> subprocess.CompletedProcess[str]:
    return rollcall(client(lab), "launch", *words, timeout_s=WAIT_S)


def begin(lab: Lab, *words: str) -> Command:
    return client(lab).start([sys.executable, "-m", "rollcall", *words])


def wait_for(command: Command, text: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while text not in command.output:
        assert command.poll() is None and time.monotonic() < give_up, command.output
        time.sleep(0.05)


def send(lab: Lab, number: int, *, to: str) -> None:
    """A signal to the one process of the client with these words in its command line."""
    pids = [
        pid
        for pid in client(lab).seen_from_here()
        if to in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    ]
    assert len(pids) == 1, pids
    os.kill(pids[0], number)


def left(lab: Lab, hosts: Sequence[Host]) -> dict[str, list[str]]:
    """What a launch has left on its hosts, and on the machine that it was started from."""
    found = {name: [each for each in what if not OTHERS.search(each)] for name, what in leftovers(hosts).items()}
    home = inside(client(lab), client(lab).home)
    found["client"] = [process.cmdline for process in client(lab).processes()]
    found["client"] += [str(path) for path in home.glob(".rollcall/launches/[!.]*")]
    return {name: what for name, what in found.items() if what}


def steps_of(run: Path) -> int:
    return json.loads((run.parent / "run/summary.json").read_text())["steps"]


def test_four_hosts_train_and_are_taken_down(lab: Lab) -> None:
    hosts = [host.name for host in lab.hosts[:4]]
    run = make_run(lab, "four", hosts, num_nodes=4)
    ended = launch(lab, "ssh", str(run), "--wait")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert steps_of(run) == 2
    assert all(f"{host} | Ray started" in ended.stderr for host in hosts)
    assert "4 of 4 nodes alive" in launch(lab, "status", "four").stdout
    assert "step 2/2" in launch(lab, "logs", "four").stdout
    said = rollcall(client(lab), "ssh", "all", "--", "hostname")
    assert sorted(said.stdout.splitlines()) == [f"{host} | {host}" for host in hosts], said.stderr
    look_through_a_tunnel(lab)
    down = launch(lab, "down", "four")
    assert down.returncode == 0, down.stderr
    assert left(lab, lab.hosts[:4]) == {}


def look_through_a_tunnel(lab: Lab) -> None:
    """The dashboard asks for the token; with it, `rollcall job` answers."""
    tunnel = begin(lab, "tunnel", "four", "--port", "18265")
    wait_for(tunnel, "http://127.0.0.1:18265")
    token = (inside(client(lab), client(lab).home) / ".rollcall/launches/four/token").read_text()
    where = ["--address", "http://127.0.0.1:18265"]
    listed = rollcall(client(lab), "job", "list", *where, env={"ROLLCALL_TOKEN": token})
    assert "SUCCEEDED" in listed.stdout, listed.stderr
    refused = rollcall(client(lab), "job", "list", *where, env={"ROLLCALL_TOKEN": token[::-1]})
    assert refused.returncode == 1 and "refuses the token" in refused.stderr
    send(lab, signal.SIGINT, to="rollcall tunnel")
    assert tunnel.wait(timeout_s=WAIT_S) == 130


def test_hosts_that_cannot_be_used_are_all_named_and_nothing_is_started(lab: Lab) -> None:
    """One is down, one does not know the key, one has no activate script."""
    down, wrong_key, bare = lab.hosts[1:4]
    run = make_run(lab, "wrong", [host.name for host in lab.hosts[:4]], num_nodes=4)
    keys = inside(wrong_key, Path("/run/lab-sshd/authorized_keys"))
    kept = keys.read_text()
    keys.write_text("")
    inside(bare, ACTIVATE).unlink()
    down.cut()
    try:
        ended = launch(lab, "ssh", str(run))
    finally:
        down.heal()
        keys.write_text(kept)
        write_activate(bare)
    assert ended.returncode == 1
    assert "3 problems with the hosts, so nothing was started" in ended.stderr
    assert re.search(rf"{down.name}: ssh cannot reach it\n.*{down.name}", ended.stderr)
    assert re.search(rf"{wrong_key.name}: ssh cannot reach it\n.*Permission denied", ended.stderr)
    assert f"{bare.name}: failed with status 1\n    the activate script {ACTIVATE} does not exist" in ended.stderr
    assert left(lab, lab.hosts[:4]) == {}


def test_a_host_with_another_host_key_is_refused(lab: Lab) -> None:
    host = lab.hosts[3]
    known = inside(client(lab), client(lab).home / ".ssh/known_hosts")
    kept = known.read_text()
    other = kept.splitlines()[0].split()[2]
    known.write_text(re.sub(rf"({host.name},\S+ \S+) \S+", rf"\1 {other}", kept))
    try:
        ended = launch(lab, "ssh", str(make_run(lab, "forged", [host.name], num_nodes=1)))
    finally:
        known.write_text(kept)
    assert ended.returncode == 1 and "Host key verification failed" in ended.stderr, ended.stderr
    assert "run `ssh HOST` by hand to see its key" in ended.stderr


def test_hosts_that_only_the_users_own_configuration_reaches_train(lab: Lab) -> None:
    """By an alias that no host knows, through a jump host, with a key that is not where ssh looks."""
    ssh = inside(client(lab), client(lab).home / ".ssh")
    key = client(lab).home / ".ssh/id_ed25519"
    other = client(lab).home / "my key"
    (ssh / "config").write_text(
        f"Host far\n  HostName node1\n  ProxyJump node3\nHost node3\n  IdentityFile '{other}'\n"
    )
    inside(client(lab), key).rename(inside(client(lab), other))
    try:
        run = make_run(lab, "far", ["far", "node0"], num_nodes=2, ssh={"key": str(other), "user": "root", "port": 22})
        ended = launch(lab, "ssh", str(run), "--wait")
        down = launch(lab, "down", "far")
    finally:
        inside(client(lab), other).rename(inside(client(lab), key))
        (ssh / "config").unlink()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert steps_of(run) == 2 and "far   |   head       10.77.0.2:" in ended.stderr
    assert down.returncode == 0, down.stderr
    assert left(lab, lab.hosts[:4]) == {}


def test_two_clusters_side_by_side_from_one_file(lab: Lab) -> None:
    (lab.shared / "hosts.txt").write_text("".join(f"{host.name}\n" for host in lab.hosts[:4]))
    first = make_run(lab, "east", str(lab.shared / "hosts.txt"), num_nodes=2, steps=1_000_000, save_every=1_000_000)
    second = make_run(lab, "west", str(lab.shared / "hosts.txt"), num_nodes=2)
    started = launch(lab, "ssh", str(first))
    assert started.returncode == 0, started.stderr
    ended = launch(lab, "ssh", str(second), "--wait")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert steps_of(second) == 2
    assert "node2 | Ray started" in ended.stderr and "node0 |" not in ended.stderr
    refused = launch(lab, "ssh", str(second), "--name", "third")
    assert "0 free hosts" in refused.stderr and "node0 is used by launch 'east'" in refused.stderr
    refused = launch(lab, "ssh", str(make_run(lab, "fourth", ["node3"], num_nodes=1)))
    assert "already in use: node3 (launch 'west')" in refused.stderr
    assert launch(lab, "down", "west").returncode == 0
    assert "RUNNING" in launch(lab, "status", "east").stdout
    down = launch(lab, "down", "east")
    assert down.returncode == 0, down.stderr
    assert list((first.parent / "run/checkpoints").glob("step-*")), "the run has saved"
    assert left(lab, lab.hosts[:4]) == {}


def test_ctrl_c_while_it_starts_leaves_nothing(lab: Lab) -> None:
    run = make_run(lab, "stopped", ["node0", "node1"], num_nodes=2)
    starting = begin(lab, "launch", "ssh", str(run))
    wait_for(starting, "node0 | Ray started")
    time.sleep(2.0)  # into the start of Ray
    send(lab, signal.SIGINT, to="rollcall launch")
    assert starting.wait(timeout_s=WAIT_S) == 130, starting.output
    assert left(lab, lab.hosts[:2]) == {}, starting.output


# test_launch_ssh.py has every moment, on hosts that are stubs.
@pytest.mark.parametrize(("moment", "then"), [("node0 | starting Ray", "again"), ("submitted rollcall-", "down")])
def test_a_launcher_that_is_killed_is_finished_or_cleaned_up_by_the_next(lab: Lab, moment: str, then: str) -> None:
    name = re.sub(r"\W+", "-", f"killed {moment}").strip("-")
    run = make_run(lab, name, ["node0", "node1"], num_nodes=2)
    starting = begin(lab, "launch", "ssh", str(run))
    wait_for(starting, moment)
    send(lab, signal.SIGKILL, to="rollcall launch")
    starting.wait(timeout_s=WAIT_S)
    if then == "again":
        ended = launch(lab, "ssh", str(run), "--wait")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert steps_of(run) == 2
    down = launch(lab, "down", name)
    assert down.returncode == 0, down.stderr
    assert left(lab, lab.hosts[:2]) == {}


def reboot(host: Host, *, keep: Path) -> None:
    """All its processes are gone at once; its sshd is up again with the same key."""
    folder = Path("/run/lab-sshd")
    shutil.copytree(inside(host, folder), keep)
    host.kill()
    host.restart()
    shutil.copytree(keep, inside(host, folder))
    inside(host, Path("/run/sshd")).mkdir(mode=0o755, exist_ok=True)
    start_sshd(host)
    write_activate(host)


def steps_so_far(run: Path) -> int:
    path = run.parent / "run/metrics.jsonl"
    return path.read_text().count('"time/step_s"') if path.exists() else 0


def wait_for_steps(run: Path, count: int, *, said: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while steps_so_far(run) < count:
        assert time.monotonic() < give_up, said
        time.sleep(0.2)


def test_a_head_that_was_rebooted_is_started_again_and_its_run_goes_on(lab: Lab, tmp_path: Path) -> None:
    run = make_run(lab, "reboot", ["node0", "node1"], num_nodes=2, steps=1_000_000, save_every=5)
    assert launch(lab, "ssh", str(run)).returncode == 0
    wait_for_steps(run, 6, said="the first steps")
    reboot(lab.hosts[0], keep=tmp_path / "sshd")
    status = launch(lab, "status", "reboot")
    assert "node0: failed with status 1" in status.stdout and "not part of a cluster 'reboot'" in status.stdout, status
    before = steps_so_far(run)
    again = launch(lab, "ssh", str(run))
    assert again.returncode == 0, again.stdout + again.stderr
    wait_for_steps(run, before + 3, said=launch(lab, "logs", "reboot").stdout)
    down = launch(lab, "down", "reboot")
    assert down.returncode == 0, down.stderr
    assert left(lab, lab.hosts[:2]) == {}


def test_a_host_whose_disk_is_full_is_named_and_only_logs_are_left(lab: Lab) -> None:
    full = lab.hosts[1]
    run = make_run(lab, "full", ["node0", "node1"], num_nodes=2)
    assert full.run(["mount", "-n", "-o", "remount,size=4k", "/tmp"]).returncode == 0
    try:
        ended = launch(lab, "ssh", str(run))
    finally:
        full.run(["mount", "-n", "-o", "remount,size=50%", "/tmp"])
    assert ended.returncode == 1 and re.search(r"node1: .*(\n.*)*the disk of /tmp/.* of free space", ended.stderr), (
        ended.stderr
    )
    found = left(lab, lab.hosts[:2])
    assert all(each.startswith("/tmp/rollcall-0/full/") for what in found.values() for each in what), found
    for host in lab.hosts[:2]:
        assert rollcall(host, "down", "--cluster", "full").returncode == 0
    assert left(lab, lab.hosts[:2]) == {}
