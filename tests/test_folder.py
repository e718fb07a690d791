"""Nodes that share only a folder: messages, signs of life, worker groups, and whole runs by the real command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import pytest
import torch
from runs import groups, make_run, metric_rows, num_records
from weights_contract import bits, blank_like, change, make_tensors

from rollcall.base.atomic import TEMPORARY
from rollcall.base.errors import ClusterError, ConfigError, WorkerDiedError, WorkerError
from rollcall.base.journal import Journal
from rollcall.config import Config, dump_config, parse_config
from rollcall.engine.weights.protocol import RefusedUpdateError
from rollcall.engine.weights.transports import open_receiver, open_sender
from rollcall.observe.live import REWARDS
from rollcall.observe.timeline import CONTROLLER, read_timeline
from rollcall.process.groups.cluster import VirtualCluster
from rollcall.process.groups.folder import master as folder_master
from rollcall.process.groups.folder import messages as mailbox
from rollcall.process.groups.folder.master import FolderBackend
from rollcall.process.groups.folder.messages import (
    Inbox,
    Messages,
    Peer,
    Presence,
    State,
    message_name,
    names,
    own_folder,
    put,
    sweep,
)
from rollcall.process.groups.folder.worker import FolderWorker
from rollcall.process.groups.group import WorkerBuilder, WorkerGroup
from rollcall.run.train_in_folder import read_weights, with_folder

WAIT_S = 600.0


def until(true: Callable[[], Any], *, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def tests_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes that a test starts, for their worker classes and rewards."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def share(tmp_path: Path) -> Path:
    folder = tmp_path / "share"
    folder.mkdir(mode=0o700)
    return folder


# Messages


def test_messages_are_taken_in_order_whatever_order_a_folder_shows_them_in(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path, label="m-w-1")
    put(tmp_path / message_name("m-w-1", 2), b"two")
    assert inbox.take() is None
    put(tmp_path / message_name("m-w-1", 1), b"one")
    assert [inbox.take(), inbox.take(), inbox.take()] == [(1, b"one"), (2, b"two"), None]
    assert names(tmp_path) == []


def test_a_message_of_another_label_is_not_taken(tmp_path: Path) -> None:
    put(tmp_path / message_name("m-old-1", 1), b"for another")
    assert Inbox(tmp_path, label="m-w-1").take() is None


def test_a_file_that_is_half_written_is_seen_by_nobody_and_swept_up_later(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY}{message_name('m-w-1', 1)}-x").write_bytes(b"hal")
    assert names(tmp_path) == []
    assert Inbox(tmp_path, label="m-w-1").take() is None
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_listed_file_that_is_gone_when_it_is_read_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = message_name("m-w-1", 1)
    inbox = Inbox(tmp_path, label="m-w-1")
    monkeypatch.setattr(mailbox, "names", lambda folder: [name])  # as a folder that NFS remembers
    assert inbox.take() is None
    put(tmp_path / name, b"one")
    assert inbox.take() == (1, b"one")


def test_messages_between_two_processes_arrive_whole_and_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rollcall.process.groups.folder.messages import *\n"
        "for number in range(1, 101): put(Path(sys.argv[1]) / message_name('m-w-1', number), bytes([number]) * 50_000)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    inbox, taken = Inbox(tmp_path, label="m-w-1"), []

    def take() -> bool:
        while (message := inbox.take()) is not None:
            taken.append(message)
        return len(taken) == 100

    until(take, what="100 messages")
    assert writer.wait() == 0
    assert taken == [(number, bytes([number]) * 50_000) for number in range(1, 101)]


def test_a_folder_that_others_may_open_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(ClusterError, match="mode 755.*chmod 700"):
        own_folder(folder)
    folder.chmod(0o700)
    assert own_folder(folder) == folder.resolve()
    assert own_folder(tmp_path / "new").stat().st_mode & 0o777 == 0o700


# Signs of life


def test_a_master_that_has_just_appeared_is_not_said_to_stand_still(tmp_path: Path) -> None:
    worker, told = FolderWorker(tmp_path, rank=1, num_nodes=2), list[str]()
    worker._label = "m-w-1"
    worker._master.facts = {"host": "one", "pid": 7, "state": State.HERE}
    worker._wait_for_master(SimpleNamespace(tell=told.append, is_over=False))  # type: ignore[arg-type]
    assert told == ["the master on one (process 7) has appeared; waiting to see that it is alive"]
    worker._master.beat._since -= 30
    worker._wait_for_master(SimpleNamespace(tell=told.append, is_over=False))  # type: ignore[arg-type]
    assert told[1].startswith("the master on one (process 7) has been silent for 30 s; waiting for it")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"--phase": "both", "--rank-weights": "1,1"}, None),
        (
            {"--phase": "rollout"},
            "was started with --phase both, but this worker with --phase rollout; use the same for both",
        ),
        ({"--eval-interval": "6"}, "was started without --eval-interval, but this worker with --eval-interval 6"),
    ],
)
def test_a_worker_compares_its_options_with_the_masters(
    tmp_path: Path, given: dict[str, str], told: str | None
) -> None:
    worker = FolderWorker(tmp_path, rank=1, num_nodes=2, options=given)
    masters = {"--num-nodes": "2", "--phase": "both", "--split": "train", "--rank-weights": "1,1"}
    worker._master.facts = {"host": "one", "options": masters, "folder": str(worker.folder)}
    with nullcontext() if told is None else pytest.raises(ClusterError, match=told):
        worker._check_master()


def test_a_worker_with_other_options_is_refused_before_the_master_sees_it(share: Path) -> None:
    with FolderBackend(share, num_nodes=2, run="one", options={"--phase": "both"}):
        with pytest.raises(ClusterError, match="this worker with --phase update; use the same for both"):
            FolderWorker(share, rank=1, num_nodes=2, options={"--phase": "update"}).run()
        assert not (Messages(share).node(1) / "presence.json").exists()


def test_a_process_is_alive_when_its_counter_moves_and_not_because_its_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "BEAT_S", 0.02)
    presence, peer = Presence(tmp_path, {"state": State.HERE}), Peer(tmp_path)
    presence.begin()
    presence.end(state=State.HERE)
    peer.look()
    peer.look()
    assert peer.incarnation == presence.incarnation and not peer.is_alive
    successor = Presence(tmp_path, {"state": State.HERE})
    successor.begin()
    until(lambda: peer.look() or peer.is_alive, what="the successor's counter to move")
    assert peer.incarnation == successor.incarnation != presence.incarnation
    successor.end()


def test_a_second_master_and_a_second_worker_of_a_rank_are_refused_while_the_first_lives(share: Path) -> None:
    second = FolderBackend(share, num_nodes=2, run="two")
    with (
        FolderBackend(share, num_nodes=2, run="one"),
        pytest.raises(ClusterError, match="a master is already running"),
        second,
    ):
        pass
    own = Messages(share).node(1)
    presence = Presence(own, {"state": State.HERE, "host": "elsewhere", "pid": 1})
    presence.begin()
    with pytest.raises(ClusterError, match="worker 1 is already running, as process 1 on elsewhere"):
        FolderWorker(share, rank=1, num_nodes=2).run()
    presence.end()


# Worker groups


class Node:
    """A worker's process, as `rollcall train --worker` is one."""

    def __init__(self, share: Path, rank: int, *, num_nodes: int) -> None:
        command = [sys.executable, "-m", "rollcall.process.groups.folder.worker", str(share), str(rank), str(num_nodes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def echoes(share: Path, *, num_nodes: int = 2) -> Iterator[tuple[WorkerGroup, list[Node]]]:
    """A group of one worker per node; the list has the nodes 1 and on, and may be added to."""
    nodes = [Node(share, rank, num_nodes=num_nodes) for rank in range(1, num_nodes)]
    try:
        master = FolderBackend(share, num_nodes=num_nodes, run="echo")
        with master, VirtualCluster([1] * num_nodes, name="echo", backend=master) as cluster:
            builder = WorkerBuilder("group_workers.Echo", base=100)
            yield WorkerGroup(cluster=cluster, remote_worker_builder=builder, name_prefix="echo"), nodes
        for node in nodes:
            if node.process.poll() is None:
                assert node.process.wait(timeout=WAIT_S) == 0, "a worker ends when the run does"
    finally:
        for node in nodes:
            node.kill()


def test_a_worker_group_in_a_folder_calls_answers_raises_and_leaves_no_message_behind(share: Path) -> None:
    # Left by an earlier master for an earlier worker: nobody may answer it.
    Messages(share).inbox(1).mkdir(parents=True)
    put(Messages(share).inbox(1) / message_name("oldmaster-oldworker-00001", 1), b"not even a pickle")
    Messages(share).answers.mkdir()
    put(Messages(share).answers / message_name("oldmaster-oldworker-00001", 1), b"not even a pickle")
    with echoes(share) as (group, _):
        assert group.get_all_worker_results(group.run_all_workers_single_data("prepare_for_training")) == [100, 101]
        pids = {worker["pid"] for worker in group.worker_metadata}
        assert len(pids) == 2 and os.getpid() not in pids
        many = [group.run_single_worker_single_data("size", 1, "x" * number) for number in range(40)]
        assert group.get_all_worker_results(many) == list(range(40))
        sightings = group.sightings()
        seen = sightings.calls[1]
        assert [one.seen and one.seen.num_done for one in sightings.workers][1] == 41
        assert [call.name for call in seen] == ["prepare_for_training", *["size"] * 40]
        assert all(before.end_s <= after.start_s <= after.end_s for before, after in pairwise(seen))
        assert group.get_all_worker_results(group.run_single_worker_single_data("size", 0, b"x" * 5_000_000)) == [
            5_000_000
        ]
        with pytest.raises(WorkerError, match="echo rank 1 on node 1 (?s:.*)KeyError") as raised:
            group.get_all_worker_results(group.run_single_worker_single_data("fail", 1))
        assert isinstance(raised.value.__cause__, KeyError)
        with pytest.raises(WorkerError, match="no attribute 'nothing'"):
            group.get_all_worker_results(group.run_single_worker_single_data("nothing", 0))
    left = [path for path in share.rglob("*") if path.is_file()]
    assert sorted(path.name for path in left) == ["presence.json"] * 3


@pytest.mark.slow
def test_a_worker_that_is_killed_fails_its_calls_and_its_next_incarnation_takes_its_seat(share: Path) -> None:
    with echoes(share) as (group, nodes):
        slow = group.run_single_worker_single_data("sleep", 1, 600)
        until(lambda: not names(Messages(share).inbox(1)), what="the call to be taken")
        nodes[0].kill()
        nodes.append(Node(share, 1, num_nodes=2))
        with pytest.raises(WorkerDiedError, match="echo rank 1 on node 1 .* is dead: another process took its place"):
            group.get_all_worker_results(slow, timeout_s=WAIT_S)
        assert not group.workers[1].is_alive() and group.workers[0].is_alive()
        group.replace(1, timeout_s=WAIT_S)
        assert group.get_all_worker_results(group.run_all_workers_single_data("prepare_for_training")) == [100, 101]


@pytest.mark.slow
def test_worker_0_is_started_again_when_it_is_lost_while_the_others_are_waited_for(share: Path) -> None:
    late: list[Node] = []
    with FolderBackend(share, num_nodes=2, run="echo") as master:
        (first,) = master.await_workers([0], timeout_s=WAIT_S)

        def lose_it_and_start_the_other() -> None:
            os.kill(master.facts_of(first)["pid"], signal.SIGKILL)
            until(lambda: first.death, what="its loss to be noticed")
            late.append(Node(share, 1, num_nodes=2))

        losing = threading.Timer(0.5, lose_it_and_start_the_other)
        losing.start()
        try:
            again, _ = master.await_workers([0, 1], timeout_s=WAIT_S)
            assert again.incarnation != first.incarnation and not again.death
        finally:
            losing.join()
            for node in late:
                node.kill()


@pytest.mark.slow
def test_a_worker_that_stands_still_is_given_up_and_comes_back_as_a_new_one(
    share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with echoes(share) as (group, nodes):
        monkeypatch.setattr(folder_master, "SILENT_S", 3.0)
        nodes[0].process.send_signal(signal.SIGSTOP)
        with pytest.raises(WorkerDiedError, match="has not moved for"):
            group.get_all_worker_results(group.run_single_worker_single_data("size", 1, "x"), timeout_s=WAIT_S)
        nodes[0].process.send_signal(signal.SIGCONT)
        monkeypatch.setattr(folder_master, "SILENT_S", mailbox.SILENT_S)
        group.replace(1, timeout_s=WAIT_S)
        assert group.get_all_worker_results(group.run_all_workers_single_data("prepare_for_training")) == [100, 101]


def test_a_worker_that_hangs_in_a_call_is_given_up_at_the_deadline_of_the_call(
    share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait in ``wait_for_some``, as a run does for its engines."""
    with echoes(share) as (group, _):
        group.tolerate([0, 1])
        monkeypatch.setattr(folder_master, "CALL_S", 1.0)
        slow = group.run_single_worker_single_data("sleep", 1, WAIT_S)
        until(lambda: group.wait_for_some([slow], timeout_s=0.5), what="the call to fail")
        with pytest.raises(WorkerDiedError, match="echo rank 1 on node 1 .* is dead: it has not answered a call for"):
            group.get_all_worker_results(slow)
        monkeypatch.setattr(folder_master, "CALL_S", WAIT_S)
        group.replace(1, timeout_s=WAIT_S)  # the same process: it gives that call up
        assert group.get_all_worker_results(group.run_all_workers_single_data("prepare_for_training")) == [100, 101]


def test_every_wait_ends_when_the_folder_cannot_be_read_any_more(share: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with echoes(share) as (group, _):
        answer = group.run_single_worker_single_data("sleep", 1, 3.0)

        def unreadable(folder: Path) -> list[str]:
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as broken:
            broken.setattr(mailbox, "names", unreadable)
            with pytest.raises(ClusterError, match="the messages in .* cannot be read: .*Permission denied"):
                until(lambda: group.wait_for_some([answer], timeout_s=0.5), what="an error")


def test_a_worker_that_does_not_appear_is_named(
    share: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_master, "APPEAR_S", 3.0)
    master = FolderBackend(share, num_nodes=3, run="x")
    # Worker 0 is a process that the master starts; on a busy machine it may be late too.
    missing = pytest.raises(
        ClusterError, match="worker (0, )?1, 2 did not appear in .* within 3 s; on each of these nodes, run"
    )
    with master, missing:
        VirtualCluster([1, 1, 1], backend=master)
    assert "waiting for worker" in capfd.readouterr().err


# The run


def test_the_cluster_is_implied_and_a_run_file_that_says_another_is_refused(share: Path) -> None:
    run = {"dir": str(share / "run")}
    config = with_folder(parse_config({"run": run}), share, num_nodes=3, rank_weights=[2, 1, 1])
    assert config.cluster is not None and config.cluster.num_slots == 3
    assert config.cluster.node_weights == [2, 1, 1] and config.rollout.weights == "file"
    same = parse_config({"run": run, "cluster": {"num_nodes": 3, "env": {"A": "1"}}})
    assert with_folder(same, share, num_nodes=3, rank_weights=None).cluster.env == {"A": "1"}  # type: ignore[union-attr]
    other = parse_config({"run": run, "cluster": {"num_nodes": 4}})
    with pytest.raises(ConfigError, match="cluster.num_nodes=4 .*num_nodes=3"):
        with_folder(other, share, num_nodes=3, rank_weights=None)
    with pytest.raises(ConfigError, match="node_weights"):
        with_folder(parse_config({"run": run}), share, num_nodes=3, rank_weights=[2, 1])
    with pytest.raises(ConfigError, match="rollout.weights=broadcast needs a network"):
        with_folder(
            parse_config({"run": run, "rollout": {"weights": "broadcast"}}), share, num_nodes=3, rank_weights=None
        )
    with pytest.raises(ConfigError, match="must not contain that folder"):
        with_folder(parse_config({"run": {"dir": str(share)}}), share, num_nodes=3, rank_weights=None)
    with pytest.raises(ConfigError, match="is not a list of numbers"):
        read_weights("2,x")


def test_weights_left_as_a_file_arrive_and_those_of_another_sender_are_not_taken(tmp_path: Path) -> None:
    tensors = make_tensors(0)
    held = blank_like(tensors)

    def sender() -> Any:
        return open_sender("file", receivers={"one": False}, name="actor", host="", on_gpu=False, folder=tmp_path)

    old = sender()
    receiver = open_receiver(old.invitations["one"], name="one", tensors=held)
    old.send(tensors, version=1)
    receiver.receive(version=1)
    change(tensors, seed=1)
    old.send(tensors, version=2)
    receiver.receive(version=2)
    assert all(torch.equal(bits(held[name]), bits(tensors[name])) for name in tensors)
    assert len(list(tmp_path.iterdir())) == 1
    late = blank_like(tensors)
    open_receiver(old.invitations["one"], name="one", tensors=late).receive(version=2)  # one that comes later
    assert all(torch.equal(bits(late[name]), bits(tensors[name])) for name in tensors)
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(RefusedUpdateError, match="twice: .* is not a complete safetensors file"):
        open_receiver(old.invitations["one"], name="one", tensors=late).receive(version=2)
    new = sender()
    assert list(tmp_path.iterdir()) == [], "what an earlier sender left is removed"
    assert new.invitations["one"] != old.invitations["one"]


def start_train(config: Config, share: Path, *options: str) -> commands.Command:
    """`rollcall train` in a folder; where that can be had, without a network."""
    run_file = share.parent / "run.yaml"
    if not run_file.exists():  # another command may be reading it
        run_file.write_text(dump_config(config))
    return commands.start(
        "train", str(run_file), "--log-path", str(share), *options, cwd=share.parent,
        has_network=not commands.can_cut_the_network(), variables={"PYTHONPATH": os.environ["PYTHONPATH"]},
    )  # fmt: skip


@contextmanager
def run_of_three(
    config: Config, share: Path, *options: str
) -> Iterator[tuple[commands.Command, dict[int, commands.Command]]]:
    """Master and two workers; killed at the end if they still live."""
    started: list[commands.Command] = []

    def start(*more: str) -> commands.Command:
        started.append(start_train(config, share, "--num-nodes", "3", *more))
        return started[-1]

    workers = {rank: start(*options, "--worker", str(rank)) for rank in (1, 2)}
    try:
        yield start(*options, "--master"), workers
    finally:
        for command in [*started, *workers.values()]:
            command.kill()


def audit(config: Config) -> Counter[str]:
    """Every draw of every step once, in the journal and in the updates; returns the groups by who made them."""
    wanted = config.data.prompts_per_step
    makers: Counter[str] = Counter()
    for step in range(1, config.trainer.steps + 1):
        found = groups(config, step)
        assert sorted(found) == list(range((step - 1) * wanted, step * wanted))
        makers.update(group.worker for group in found.values())
    assert num_records(config) == config.trainer.steps * wanted, "no group was made twice"
    with Journal(config.run.dir / "journal") as journal:
        trained = journal.trained()
    draws = [draw for entry in trained.values() for draw in entry.draws]
    assert sorted(trained) == list(range(1, config.trainer.steps + 1)) and len(draws) == len(set(draws))
    return makers


@pytest.mark.slow  # the worker of node 0 is a new interpreter, which imports torch
def test_three_processes_train_through_a_folder_and_share_the_groups_by_rank_weights(share: Path) -> None:
    """Every node gets the line of WebGym's guide, with its names."""
    config = make_run(share, "trainer.steps=3", "data.prompts_per_step=16")
    webgym = ["--data-path", str(share.parent), "--rl-phase", "both", "--eval-interval", "6", "--rank-weights", "2,1,1"]
    with run_of_three(config, share, *webgym) as (master, workers):
        assert master.wait() == 0, master.stderr
        assert [worker.wait() for worker in workers.values()] == [0, 0]
    assert "has ended" in workers[1].stderr
    assert [row["step"] for row in metric_rows(config) if "time/step_s" in row] == [1, 2, 3]
    makers = audit(config)
    assert makers == {"rollout-0 on node 0": 24, "rollout-1 on node 1": 12, "rollout-2 on node 2": 12}
    assert [path for path in Messages(share).root.rglob("*") if path.is_file() and path.name != "presence.json"] == []
    said = json.loads((Messages(share).master / "presence.json").read_text())
    assert said["state"] == State.ENDED != State.RUNNING
    found = read_timeline(config.run.dir)
    lanes = ["actor 0 + rollout 0 @ node 0", "rollout 1 @ node 1", "rollout 2 @ node 2"]
    assert found.lanes == (CONTROLLER, *lanes, REWARDS)
    assert all({"rollout", "sync"} <= {span.kind for span in found.spans if span.lane == lane} for lane in lanes)


def test_the_lines_of_webgyms_guide_for_one_node_sample_and_then_train(share: Path) -> None:
    settings = make_run(share.parent / "settings", "trainer.steps=1").model_dump(mode="json", exclude_unset=True)
    run_file = share.parent / "run.yaml"
    run_file.write_text(json.dumps({**settings, "run": {"name": "x"}}))
    line = ["train", str(run_file), "--data-path", str(share.parent), "--log-path", str(share)]
    for phase in (["rollout", "--rollout-split", "train-only"], ["update"]):
        done = commands.rollcall(*line, "--rl-phase", *phase, cwd=share.parent)
        assert done.returncode == 0, done.stderr
    assert (share / "run" / "model").is_dir()
    both = commands.rollcall(*line, "run.dir=other", cwd=share.parent)
    assert both.returncode == 2 and "both say where the run is" in both.stderr


@pytest.mark.slow
@pytest.mark.chaos
def test_a_killed_worker_and_a_killed_master_are_started_again_and_every_draw_is_trained_once(share: Path) -> None:
    config = make_run(share, "trainer.steps=60", "trainer.save_every=5", "rollout.max_response_tokens=24")

    def has_begun(step: int) -> bool:
        return (config.run.dir / "journal" / f"{step:06d}.groups").exists()

    with run_of_three(config, share) as (master, workers):
        until(lambda: has_begun(8) or master.poll() is not None, what="step 8")
        workers[1].kill()
        workers[1] = start_train(config, share, "--worker", "1", "--num-nodes", "3")
        until(lambda: has_begun(30) or master.poll() is not None, what="step 30")
        master.kill()
        assert "is dead: another process took its place" in master.stderr, master.stderr
        again = start_train(config, share, "--master", "--num-nodes", "3")
        try:
            assert again.wait() == 0, again.stderr
            assert [worker.wait() for worker in workers.values()] == [0, 0]
        finally:
            again.kill()
    assert "serving the master" in workers[2].stderr and workers[2].stderr.count("serving the master") == 2
    audit(config)


@pytest.mark.slow
def test_a_worker_says_goodbye_on_sigterm_and_the_master_names_it(share: Path) -> None:
    with echoes(share) as (group, nodes):
        nodes[0].process.terminate()
        assert nodes[0].process.wait(timeout=WAIT_S) == 128 + signal.SIGTERM
        with pytest.raises(WorkerDiedError, match=r"echo rank 1 on node 1 .*it left \(SIGTERM\)"):
            group.get_all_worker_results(group.run_single_worker_single_data("size", 1, "x"), timeout_s=WAIT_S)
        nodes.clear()
