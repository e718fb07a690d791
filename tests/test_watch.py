"""What tells that a worker or a node is lost: pulse, watch, stacks; and the placement on the nodes that are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rollcall.base.errors import PlacementError
from rollcall.config import ClusterSection
from rollcall.plan.placement import Role, plan_placement, shrink
from rollcall.process.groups.backend import Member, NodeSeats, WorkerSpec
from rollcall.process.groups.gang import waits_words
from rollcall.process.groups.host import marked_processes
from rollcall.process.groups.pulse import Pulse, Seen, look
from rollcall.process.groups.reachable import UnreadableError, as_text, read_threads
from rollcall.process.groups.sightings import FACTOR, FIRST_CALL_S, LEAST_S, Lookout, Watch
from rollcall.process.ray import carrier, supervise

# Pulse and watch

BUSY = """
import time
from rollcall.process.groups.pulse import Pulse
pulse = Pulse(3)
with pulse.doing("warm_up"):
    pass
def a_function_that_hangs():
    with pulse.doing("update"):
        print("ready", flush=True)
        time.sleep(600)
a_function_that_hangs()
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def wait_for_state(process: subprocess.Popen[str], state: str) -> Seen:
    while (seen := look(process.pid)).state != state:
        time.sleep(0.01)
    return seen


def test_a_stopped_process_is_seen_as_such_and_tells_its_stacks(busy: subprocess.Popen[str]) -> None:
    seen = look(busy.pid)
    assert seen.is_alive and seen.doing == "update" and seen.num_done == 1 and set(seen.longest_s or ()) == {"warm_up"}
    busy.send_signal(signal.SIGSTOP)
    stopped = wait_for_state(busy, psutil.STATUS_STOPPED)
    watch = Watch()
    assert watch.judge({"a": {3: stopped}}, seats={"a": [3]}, gone=set(), kinds={}) == []
    (loss,) = watch.judge({"a": {3: stopped}}, seats={"a": [3]}, gone=set(), kinds={})
    assert loss.rank == 3 and loss.still_runs and "stopped" in loss.why and "update" in loss.why
    assert "a_function_that_hangs" in as_text(read_threads(busy.pid))
    assert look(busy.pid).state == psutil.STATUS_STOPPED, "it is not woken for it"
    busy.kill()
    busy.wait()
    assert not look(busy.pid).is_alive
    with pytest.raises(UnreadableError, match="the process has ended"):
        read_threads(busy.pid)


def test_a_killed_worker_leaves_no_file_behind(busy: subprocess.Popen[str]) -> None:
    names = {os.readlink(entry) for entry in Path(f"/proc/{busy.pid}/fd").iterdir()}
    assert "/memfd:rollcall-pulse-3 (deleted)" in names
    busy.kill()
    assert not list(Path("/dev/shm").glob("rollcall-*"))


def test_a_pulse_tells_the_longest_call_of_each_method() -> None:
    pulse = Pulse(0)
    for _ in range(3):
        with pulse.doing("score"):
            pass
    seen = look(os.getpid())
    assert seen.doing == "" and seen.num_done == 3 and (seen.longest_s or {})["score"] >= 0


ALONE = """
import os, subprocess, sys, time
from rollcall.process.ray import supervise
from rollcall.process.groups.host import GROUP_MARK
supervise.ALONE_S = 6.0
worker = subprocess.Popen(["sleep", "600"], env={GROUP_MARK: sys.argv[1]})
eyes = supervise.Eyes(sys.argv[1])
for _ in range(10):  # longer than it may be left alone
    eyes.look({0: worker.pid})
    time.sleep(0.8)
print("alive" if worker.poll() is None else "ended", flush=True)
print(-worker.wait(), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_watcher_that_is_asked_nothing_any_more_ends_the_workers_of_its_node_and_itself() -> None:
    command = [sys.executable, "-c", ALONE, f"test-{os.getpid()}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines()[0] == "alive"
    assert done.stdout.splitlines()[1:] in ([], [str(int(signal.SIGKILL))])  # whether it still came to say so
    assert done.returncode == 1 and not marked_processes(f"test-{os.getpid()}")


class AnsweredLater:
    """Ray with one node, whose answer comes when the test says so."""

    def __init__(self) -> None:
        self.has_come, self.asked = False, list[dict[int, int]]()
        self.look = SimpleNamespace(remote=self._ask)

    def _ask(self, pids: dict[int, int]) -> Any:
        self.asked.append(pids)
        gone = {rank: Seen(is_alive=pid != 13) for rank, pid in pids.items()}
        return supervise.NodeLook(workers=gone, now_s=0.0, logs=dict.fromkeys(pids, ("log", b"")))

    def wait(self, calls: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return (calls, []) if self.has_come else ([], calls)

    def get(self, call: Any) -> Any:
        return call

    def nodes(self) -> list[Any]:
        return []


def test_a_late_answer_about_a_process_that_was_replaced_is_not_about_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = AnsweredLater()
    monkeypatch.setattr(supervise, "ray", node)
    monkeypatch.setattr(supervise, "ANSWER_S", 0.01)
    seat = NodeSeats(node_rank=0, node_id="a", address="10.0.0.1", bundles=(0, 1))
    specs = [
        WorkerSpec(
            role="rollout", rank=rank, world_size=2, local_rank=rank, local_world_size=2, node=seat, slots=(rank,), share=1, env={}
        )
        for rank in range(2)
    ]  # fmt: skip
    first, dead, successor = Member(specs[0], pid=11), Member(specs[1], pid=13), Member(specs[1], pid=17)
    watched = supervise.Supervisor("mark", SimpleNamespace(lookout=Lookout()))  # type: ignore[arg-type]
    watched._eyes["a"] = node
    watched._seats = {0: first, 1: dead}
    assert watched._look(watched._seats) == []
    watched._seats = {0: first}  # Ray has told its death before the node has answered
    node.has_come = True
    assert watched._look(watched._seats) == [], "nobody sits there"
    watched._seats, node.has_come = {0: first, 1: dead}, False
    watched._look(watched._seats)
    watched._seats, node.has_come = {0: first, 1: successor}, True
    assert watched._look(watched._seats) == [] and node.asked == [{0: 11, 1: 13}] * 2
    watched._seats = {0: first, 1: dead}
    assert [loss.rank for loss in watched._look(watched._seats)] == [1]


def test_a_replacement_that_has_died_before_it_is_watched_keeps_its_spec_until_its_next_call_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        carrier, "ray", SimpleNamespace(nodes=lambda: [dict(NodeID="a", NodeManagerAddress="10.0.0.9")])
    )
    seat = NodeSeats(node_rank=0, node_id="lost", address="10.0.0.1", bundles=(0,))
    spec = WorkerSpec(
        role="rollout", rank=0, world_size=1, local_rank=0, local_world_size=1, node=seat, slots=(0,), share=1, env={}
    )
    watched: list[Member] = []
    on_ray: Any = carrier.OnRay.__new__(carrier.OnRay)
    on_ray._supervisor = SimpleNamespace(add=watched.append)
    member = Member(spec)
    on_ray._may_have_moved = {member}
    for state in ({}, {"State": "DEAD", "Address": {"NodeID": ""}}):
        monkeypatch.setattr(on_ray, "_state_of", lambda _, state=state: state, raising=False)
        on_ray.watch(member)
        assert not watched and member.spec is spec
    monkeypatch.setattr(on_ray, "_state_of", lambda _: {"State": "ALIVE", "Address": {"NodeID": "a"}}, raising=False)
    on_ray.watch(member)
    assert watched == [member] and member.spec.node.address == "10.0.0.9"


def alive(**fields: Any) -> Seen:
    return Seen(is_alive=True, state="S", **fields)


def test_a_node_that_is_silent_loses_its_workers_and_one_that_is_late_does_not() -> None:
    watch = Watch()
    seats = {"a": [0, 1], "b": [2]}
    here: dict[int, Seen] = {2: alive()}
    assert watch.judge({"a": {0: alive(), 1: alive()}, "b": here}, seats=seats, gone=set(), kinds={}) == []
    for _ in range(3):
        assert watch.judge({"a": None, "b": here}, seats=seats, gone=set(), kinds={}) == []
    assert watch.judge({"a": {0: alive(), 1: alive()}, "b": here}, seats=seats, gone=set(), kinds={}) == []
    losses = [loss for _ in range(6) for loss in watch.judge({"b": here}, seats=seats, gone=set(), kinds={})]
    assert [loss.rank for loss in losses] == [0, 1] and not losses[0].still_runs and "silent" in losses[0].why


def test_a_node_that_ray_has_given_up_is_lost_at_once_and_told_once() -> None:
    watch = Watch()
    assert [loss.rank for loss in watch.judge({}, seats={"a": [4]}, gone={"a"}, kinds={})] == [4]
    assert watch.judge({}, seats={"a": [4]}, gone={"a"}, kinds={}) == []
    watch.forgive(4)
    assert [
        loss.rank for loss in watch.judge({"a": {4: Seen(is_alive=False)}}, seats={"a": [4]}, gone=set(), kinds={})
    ] == [4]


def test_patience_grows_with_what_a_call_took_before() -> None:
    watch = Watch()
    assert watch.patience_s("", "update") == FIRST_CALL_S

    def judge(**fields: Any) -> list[int]:
        return [loss.rank for loss in watch.judge({"a": {0: alive(**fields)}}, seats={"a": [0]}, gone=set(), kinds={})]

    assert judge(longest_s={"update": 100.0, "score": 0.1}) == []
    assert watch.patience_s("", "update") == FACTOR * 100 and watch.patience_s("", "score") == LEAST_S
    assert judge(doing="update", busy_s=FACTOR * 100 - 1) == []
    assert judge(doing="update", busy_s=FACTOR * 100 + 1) == [0]


def test_patience_is_that_of_a_workers_own_kind() -> None:
    """An actor has loaded its model in seconds while an engine still compiles."""
    watch = Watch()
    looks = {"a": {0: alive(longest_s={"build": 2.0}), 1: alive(doing="build", busy_s=LEAST_S + 100)}}
    assert watch.judge(looks, seats={"a": [0, 1]}, gone=set(), kinds={0: "actor", 1: "rollout"}) == []
    assert watch.patience_s("rollout", "build") == FIRST_CALL_S and watch.patience_s("actor", "build") == LEAST_S
    (loss,) = watch.judge(looks, seats={"a": [0, 1]}, gone=set(), kinds={0: "actor", 1: "actor"})
    assert loss.rank == 1


def test_who_is_waited_for_is_told_by_purpose() -> None:
    def spec(rank: int, *, title: str = "", node: int, address: str) -> WorkerSpec:
        seats = NodeSeats(node_rank=node, node_id=address, address=address, bundles=(0,))
        return WorkerSpec(
            role="run", rank=rank, world_size=6, local_rank=0, local_world_size=1, node=seats, slots=(0,), share=1.0, env={},
            title=title,
        )  # fmt: skip

    engines = [spec(rank, node=rank, address="10.0.0.2") for rank in range(5)]
    actor = spec(0, title="actor rank 0", node=0, address="10.0.0.1")
    where = ", ".join(f"run rank {rank} on node {rank} (10.0.0.2)" for rank in range(3))
    assert waits_words(
        {"to send version 4 of the weights": [actor], "to receive version 4 of the weights": engines}
    ) == (
        "the run waited for actor rank 0 on node 0 (10.0.0.1) to send version 4 of the weights, and for "
        f"{where} and 2 more to receive version 4 of the weights"
    )
    assert waits_words({}) == ""


# Fewer nodes


def test_the_nodes_that_are_left_keep_their_part_of_the_placement() -> None:
    section = ClusterSection(
        num_nodes=3, num_gpus_per_node=2, accelerator="cpu", node_weights=[1.0, 2.0, 3.0], node_env={2: {"A": "b"}},
        component_placement={"actor,rollout": "all"},
    )  # fmt: skip
    left = shrink(section, plan_placement(section), kept=[0, 2])
    plan = plan_placement(left)
    assert plan.slots_per_node == (2, 2) and plan.world_size(Role.ACTOR) == plan.world_size(Role.ROLLOUT) == 4
    assert left.node_weights == [1.0, 3.0] and left.node_env == {1: {"A": "b"}}
    apart = section.model_copy(update={"component_placement": {"rollout": "0-3:0-1", "actor": "4-5"}})
    plan = plan_placement(shrink(apart, plan_placement(apart), kept=[1, 2]))
    assert [process.slots for process in plan.processes[Role.ROLLOUT]] == [(0, 1)]
    assert plan.role_slots(Role.ACTOR) == (2, 3)
    with pytest.raises(PlacementError, match="all actor processes were on nodes that are missing .2.*rollcall node"):
        shrink(apart, plan_placement(apart), kept=[0, 1])
