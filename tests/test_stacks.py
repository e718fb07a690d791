"""`rollcall stacks` and `rollcall profile`: what the processes of a run do, asked from outside while they work."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import cloudpickle
import psutil
import pytest
import torch
from runs import make_run
from typer.testing import CliRunner

from rollcall.base.lease import hold
from rollcall.base.process_table import Process, status_of
from rollcall.cli.main import app
from rollcall.launch.processes import ProcessTarget, find_target, profile_role, read_stacks
from rollcall.nodes.framing import json_frame, read_exactly, read_json_frame
from rollcall.observe.live import Live, read_live, write_live
from rollcall.process.groups import reachable as module
from rollcall.process.groups.reachable import (
    About,
    ProfileError,
    UnreadableError,
    about_process,
    be_reachable,
    profile_process,
    reachable,
    reachable_here,
    read_threads,
)

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a run that this process trains."""
    for name in ("RAY_ADDRESS", "ROLLCALL_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text("{}")
    about = About(title="controller", roles=("controller", "actor"), run=str(folder.resolve()))
    with hold(folder), reachable(about):
        yield folder


def a_function_that_works(stop: threading.Event) -> None:
    matrix = torch.randn(16, 16)
    while not stop.is_set():
        matrix = (matrix @ matrix).clamp(-1, 1)


@pytest.fixture
def work() -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=a_function_that_works, args=(stop,))
    thread.start()
    yield
    stop.set()
    thread.join()


def test_a_process_says_which_run_it_is_of_and_no_longer_after_it(run_dir: Path) -> None:
    assert about_process(os.getpid()) == About(title="controller", roles=("controller", "actor"), run=str(run_dir))
    assert list(reachable_here(run=str(run_dir))) == [os.getpid()] and reachable_here(run="/another") == {}
    child = os.fork()
    if child == 0:  # it inherits all, and is not the controller
        os._exit(0 if about_process(os.getpid()) is None and module._descriptor == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    with reachable(About(title="x")):
        pass
    assert os.getpid() not in reachable_here()
    assert about_process(1 << 30) is None


@pytest.mark.slow
def test_stacks_show_every_thread_of_the_run_and_what_it_started(run_dir: Path, work: None) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        result = CliRunner().invoke(app, ["stacks", str(run_dir), "--json"])
        assert Process.of(child.pid) is not None, "it goes on"
        child.kill()
    assert result.exit_code == 0, result.output
    own, *others = json.loads(result.stdout)["processes"]
    assert (own["title"], own["pid"], own["error"]) == ("controller", os.getpid(), "")
    functions = {frame["function"] for thread in own["threads"] for frame in thread["frames"]}
    assert {"a_function_that_works", "test_stacks_show_every_thread_of_the_run_and_what_it_started"} <= functions
    (started,) = [one for one in others if one["pid"] == child.pid]
    assert started["title"].startswith("started by controller: ") and started["threads"]
    shown = CliRunner().invoke(app, ["stacks", str(run_dir)])
    assert "== controller on this host" in shown.stdout and "a_function_that_works" in shown.stdout


def test_a_stopped_process_is_not_woken_to_show_its_stacks(run_dir: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        os.kill(child.pid, signal.SIGSTOP)
        while status_of(child.pid) != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        report = read_stacks(find_target(str(run_dir)), native=False, timeout_s=60)
        (one,) = [one for own in report.hosts.values() for one in own if one.pid == child.pid]
        assert one.state == status_of(child.pid) == psutil.STATUS_STOPPED and one.threads
        child.kill()


@pytest.mark.skipif(
    not YAMA.exists() or YAMA.read_text() != "1\n" or os.geteuid() == 0,
    reason="needs Ubuntu's rule and a user who is not root",
)
def test_a_process_of_a_run_may_be_read_by_its_user_and_what_it_forks_may_not() -> None:
    """The reader is a child of the one and a sibling of the other."""
    with reachable(About(title="controller")):
        child = os.fork()
        if child == 0:
            time.sleep(600)
        assert read_threads(os.getpid())
        with pytest.raises(UnreadableError, match="Permission|permitted"):
            read_threads(child)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.slow
def test_a_profile_of_a_role_is_a_trace_of_what_its_threads_did(run_dir: Path, work: None, tmp_path: Path) -> None:
    arguments = ["profile", str(run_dir), "--role", "actor", "--seconds", "0.3", "--out", str(tmp_path / "p"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (name,) = json.loads(result.stdout)["files"]
    trace = json.loads(gzip.decompress(Path(name).read_bytes()))
    assert "aten::mm" in {event["name"] for event in trace["traceEvents"]}
    with pytest.raises(RuntimeError, match="no process of role critic .* actor, controller"):
        profile_role(find_target(str(run_dir)), role="critic", seconds=1, kind="torch", out=tmp_path)
    assert CliRunner().invoke(app, ["profile", str(run_dir), "--format", "png"]).exit_code == 1


def test_a_profiler_that_fails_or_is_left_alone_ends_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Process.of(os.getpid())
    assert own is not None
    with socket.socket(socket.AF_UNIX) as line:  # asks, and is gone
        line.connect(f"\0rollcall-profile-{own.pid}-{own.started}")
        line.sendall(json_frame({"seconds": 600}))
        assert read_json_frame(partial(read_exactly, line.recv)) == {}, "it has started"
    with socket.socket(socket.AF_UNIX) as line:  # says rubbish
        line.connect(f"\0rollcall-profile-{own.pid}-{own.started}")
        line.sendall(b"rubbish\n")
        assert line.recv(100) == b""
    monkeypatch.setattr("torch.profiler.profile", lambda **options: 1 / 0)
    with pytest.raises(ProfileError, match="ZeroDivisionError"):
        profile_process(os.getpid(), seconds=0.1)
    monkeypatch.undo()
    assert "traceEvents" in json.loads(gzip.decompress(profile_process(os.getpid(), seconds=0.1)))


def test_what_cannot_be_asked_is_refused_with_what_to_do(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        find_target(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not a run directory"):
        find_target(str(tmp_path / "empty"))
    ended = tmp_path / "ended"
    ended.mkdir()
    (ended / "run.yaml").write_text("{}")
    with pytest.raises(ValueError, match="no run is active in"):
        find_target(str(ended))
    be_reachable(About(title=""))
    result = CliRunner().invoke(app, ["stacks", str(run_dir)])
    assert result.exit_code == 1 and "no process of a run was found" in result.output


def test_every_node_of_a_cluster_is_asked_by_a_function_that_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the calls of Ray replaced: what it would send is sent, and one node does not answer."""

    def run_on(node_id: str, function: Any, *, env: Any) -> Any:
        assert isinstance(function, FunctionType), "Ray takes nothing else"
        return cloudpickle.loads(cloudpickle.dumps(function))()

    nodes = [SimpleNamespace(rank=rank, node_id=f"id{rank}", address=f"10.0.0.{rank}") for rank in (0, 1)]
    monkeypatch.setattr("rollcall.process.ray.connect.connect", lambda cluster, log_to_driver: None)
    monkeypatch.setattr("rollcall.process.ray.connect.disconnect", lambda: None)
    monkeypatch.setattr("rollcall.process.ray.members.ranked_nodes", lambda: nodes)
    monkeypatch.setattr("rollcall.process.ray.each_node.run_on", run_on)
    monkeypatch.setattr(
        "rollcall.process.ray.each_node.answers_of",
        lambda calls, wait, to: ({0: calls[0]}, {1: "no answer after 60 s"}),
    )
    target = ProcessTarget(run="/nothing", cluster=cast(Any, "a cluster"))
    report = read_stacks(target, native=False, timeout_s=60)
    assert report.hosts == {"node 0 (10.0.0.0)": []} and report.failed == {"node 1 (10.0.0.1)": "no answer after 60 s"}
    result = profile_role(target, role="actor", seconds=1, kind="torch", out=Path("unused"))
    assert result.files == [] and set(result.failed) == {"node 1 (10.0.0.1)"}


# On Ray


@pytest.mark.slow
def test_stacks_and_profiles_of_a_run_on_a_cluster_are_brought_here_and_the_run_goes_on() -> None:
    with tempfile.TemporaryDirectory(prefix="rc-st-", dir="/tmp") as name:
        root = Path(name)
        env = {**os.environ, "ROLLCALL_CLUSTER": "stacks", "ROLLCALL_STATE_DIR": str(root / "node")}
        env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
        placed = "cluster={num_nodes: 1, num_gpus_per_node: 2, accelerator: cpu, component_placement: {rollout: 0, actor: 1}}"
        config = make_run(root, placed, "trainer.steps=100000", "trainer.save_every=50", name="long")

        def rollcall(*arguments: str) -> list[str]:
            return [sys.executable, "-m", "rollcall", *arguments]

        def ask(*arguments: str) -> Any:
            done = subprocess.run(rollcall(*arguments, "--json"), env=env, capture_output=True, text=True, timeout=400)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        from rollcall.config import dump_config

        (root / "run.yaml").write_text(dump_config(config))
        node = ["node", "--rank", "0", "--num-nodes", "1", "--rendezvous", str(root / "meet"), "--slots", "2"]
        subprocess.run(rollcall(*node), env=env, check=True, capture_output=True)
        training = subprocess.Popen(rollcall("train", str(root / "run.yaml")), env=env, stdout=subprocess.DEVNULL)
        try:
            metrics = config.run.dir / "metrics.jsonl"
            while not metrics.exists() or metrics.stat().st_size == 0:
                assert training.poll() is None
                time.sleep(0.5)
            found = {one["title"]: one for one in ask("stacks", str(config.run.dir))["processes"]}
            assert {"controller", "actor 0", "rollout 0"} <= set(found)
            assert all(found[title]["threads"] for title in ("controller", "actor 0", "rollout 0"))
            assert {one["host"].partition(" (")[0] for one in found.values()} == {"node 0"}
            files = ask("profile", str(config.run.dir), "--seconds", "2", "--out", str(root / "p"))["files"]
            (trace,) = [json.loads(gzip.decompress(Path(path).read_bytes())) for path in files]
            assert any(event["name"].startswith("aten::") for event in trace["traceEvents"])
            options = ["--role", "rollout", "--seconds", "1", "--format", "flamegraph", "--out", str(root / "p")]
            (picture,) = ask("profile", str(config.run.dir), *options)["files"]
            assert b"<svg" in Path(picture).read_bytes()
            live = read_live(config.run.dir)
            assert live is not None and live.on_ray and not live.is_stale
            before = metrics.stat().st_size
            while metrics.stat().st_size == before:
                assert training.poll() is None
                time.sleep(0.2)
            events = (config.run.dir / "events.jsonl").read_text()
            assert "worker lost" not in events and "attempt lost" not in events
        finally:
            training.send_signal(signal.SIGKILL)
            training.wait()
            subprocess.run(rollcall("down"), env=env, capture_output=True)


def test_a_run_whose_workers_are_not_on_ray_is_asked_on_its_own_host(run_dir: Path) -> None:
    live = Live(time_s=time.time(), host="h", is_over=False, processes=(), on_ray=False)
    write_live(run_dir, live)
    assert find_target(str(run_dir)).cluster is None and find_target(str(run_dir)).run == str(run_dir)
