"""`rollcall node --run`: a node from bring-up to the end of the run. tests/test_whole_run_lab.py does it for real."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import start

from rollcall.base.errors import ClusterError, ConfigError
from rollcall.base.stop import SIGNALS, STOPPED
from rollcall.launch import whole_run
from rollcall.launch.whole_run import ENDED, WholeRun
from rollcall.nodes.bootstrap import NodeRequest


def request(*, rank: int = 0, num_nodes: int | None = None, slots: int | None = None) -> NodeRequest:
    return NodeRequest(cluster="one", rank=rank, num_nodes=num_nodes, rendezvous=Path("/r"), slots=slots)


def run_file(tmp_path: Path, cluster: str = "{nodes: [{gpus: 4}, {gpus: 2}], accelerator: cpu}") -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(f"cluster: {cluster}\n")
    return path


def test_the_run_file_says_how_many_nodes_and_slots(tmp_path: Path) -> None:
    whole = WholeRun(run_file(tmp_path))
    made = [whole.complete(request(rank=rank)) for rank in (0, 1)]
    assert [(each.num_nodes, each.slots) for each in made] == [(2, 4), (2, 2)]
    assert whole.complete(request(slots=8)).slots == 8
    assert WholeRun(run_file(tmp_path, "{num_nodes: 2}")).complete(request()).slots is None, "GPUs are counted"


def test_another_number_of_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="starting 3 nodes, but .*num_nodes=2"):
        WholeRun(run_file(tmp_path)).complete(request(num_nodes=3))


@pytest.mark.slow
def test_what_ends_a_start_is_said_before_the_node_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    whole = WholeRun(run_file(tmp_path))
    whole.check(whole.complete(request(rank=1)))
    with pytest.raises(ClusterError, match="offers 8 slots, but the run file asks for 2 on node 1"):
        whole.check(whole.complete(request(rank=1, slots=8)))
    with pytest.raises(ClusterError, match="--rendezvous DIR"):
        whole.check(replace(whole.complete(request()), rendezvous=None))


def test_a_run_file_without_a_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer: {steps: 1}\n")
    with pytest.raises(ConfigError, match="cluster"):
        WholeRun(tmp_path / "run.yaml")


@pytest.mark.parametrize(("left", "status"), [("0", 0), ("3", 3), ("-9", 137), (None, STOPPED)])
def test_a_node_ends_as_the_run_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str | None, status: int
) -> None:
    """What rank 0 leaves in Ray's folder; a node that a signal stopped has left the run to be continued."""

    class Record:
        rank, cluster, temp_dir = 1, "one", str(tmp_path)

    def hold(record: Any, *, save_s: float, until: Any, too_early: int | None = None) -> int | None:
        assert until() is None, "what an earlier run left does not count"
        if left is not None:
            (tmp_path / ENDED).write_text(left)
        return until()

    (tmp_path / ENDED).write_text("9")
    monkeypatch.setattr(whole_run, "hold", hold)
    monkeypatch.setattr(whole_run, "HEARD_S", 0.0)
    record: Any = Record()
    assert WholeRun(run_file(tmp_path)).stay(record, timeout_s=1, save_s=1) == status


def test_what_works_beside_rank_0_hears_no_signal_and_ends_with_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm signals every process of a task, from its first moment on; a command of prepare.once is a child of this one."""
    child = tmp_path / "child"
    text = f"import subprocess; subprocess.run(['sh', '-c', 'echo $$ > {child}; sleep 600'])"
    popen = subprocess.Popen

    class Record:
        rank, cluster, temp_dir = 0, "one", str(tmp_path)

    def hold(record: Any, *, save_s: float, until: Any, too_early: int | None = None) -> int | None:
        give_up = time.monotonic() + 60
        while not (child.exists() and child.read_text()) and time.monotonic() < give_up:
            for number in SIGNALS:
                os.killpg(started[0].pid, number)
            time.sleep(0.01)
        assert until() is None
        return 7

    started: list[Any] = []
    monkeypatch.setattr(whole_run, "hold", hold)
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda words, **more: started.append(popen([words[0], "-S", "-c", text], **more)) or started[0],
    )
    record: Any = Record()
    assert WholeRun(run_file(tmp_path)).stay(record, timeout_s=1, save_s=1) == 7
    pid = int(child.read_text())
    give_up = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_a_run_that_was_stopped_leaves_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints/step-000007").mkdir(parents=True)
    (run_dir / "journal").mkdir()
    (run_dir / "journal/000008.groups").write_bytes(b"12345")
    path = run_file(tmp_path)
    path.write_text(f"{path.read_text()}run: {{dir: {run_dir}}}\n")
    meet = tmp_path / "meet"
    monkeypatch.setattr(whole_run, "OurCluster", lambda name: SimpleNamespace(rendezvous=str(meet)))
    monkeypatch.setattr(whole_run, "_tell_nodes", lambda cluster, status: None)
    for status in (0, STOPPED):
        monkeypatch.setattr(whole_run, "_run", lambda *args, status=status, **options: status)
        assert whole_run.drive("one", path, timeout_s=1.0) == status, "also where nothing can be written"
    (meet / "one").mkdir(parents=True)
    assert whole_run.drive("one", path, timeout_s=1.0) == STOPPED
    assert (meet / "one/reached").read_text() == "step 7, with 5 bytes of groups"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_node_that_is_told_to_stop_while_it_waits_for_the_head_can_be_started_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    words = ["node", "--run", str(run_file(tmp_path)), "--rank", "1", "--rendezvous", str(tmp_path / "meet")]
    words += ["--temp-dir", "/tmp/rollcall-unused"]  # short enough for sockets; Ray does not start
    node = start(
        *words, cwd=tmp_path, variables={"ROLLCALL_STATE_DIR": str(tmp_path / "state"), "CUDA_VISIBLE_DEVICES": ""}
    )
    give_up = time.monotonic() + 120
    while "waiting for rank 0" not in node.stderr and node.poll() is None and time.monotonic() < give_up:
        time.sleep(0.05)
    assert node.poll() is None, node.stderr
    os.kill(node.pid, number)
    assert node.wait() == STOPPED, node.stderr
    assert f"stopped by {number.name}" in node.stderr
