"""Losses and what follows: attempts, requests that go back, watches; and two runs on Ray that lose a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import column, make_run, num_records, weights
from test_router import make_request

from rollcall.attempts import Budget, Regrow, RestartsSpentError, closing, run_attempts
from rollcall.cluster.elastic import shrink
from rollcall.cluster.failures import (
    NoRoomError,
    PeerLostError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    is_about_a_peer,
)
from rollcall.cluster.placement import PlacementError, Role, plan_placement
from rollcall.cluster.pulse import Pulse, Seen, dump_stacks, look
from rollcall.cluster.router import Place, Router
from rollcall.cluster.state import ClusterError
from rollcall.cluster.watch import FACTOR, FIRST_CALL_S, LEAST_S, Watch
from rollcall.config import ClusterSection, Config
from rollcall.journal import Journal
from rollcall.train import train


def died(text: str = "actor rank 1 on node 0 is dead: killed", kind: type[WorkerError] = WorkerDiedError) -> Exception:
    return kind(text, role="actor", ranks=[1], node_ranks=[0])


# Attempts


def attempts(*outcomes: Exception | str, most: int = 10) -> tuple[str, list[int], list[str]]:
    """Run attempts with these outcomes, one each; what came out, the attempts' numbers, and what was said."""
    left, numbers, said = list(outcomes), [], []

    def attempt(number: int) -> str:
        numbers.append(number)
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return run_attempts(attempt, budget=Budget(most=most, window_s=3600), say=said.append), numbers, said


@pytest.mark.parametrize(
    "loss",
    [
        died(),
        died("no answer after 9 s from 1 of 2 workers: actor rank 1", WorkerTimeoutError),
        died("actor rank 0 lost its peer", PeerLostError),
        ExceptionGroup("two at once", [ValueError("an effect"), died()]),
    ],
)
def test_a_loss_is_told_in_one_line_and_tried_again(loss: Exception) -> None:
    result, numbers, said = attempts(loss, "done")
    assert result == "done" and numbers == [1, 2]
    assert len(said) == 1 and "rank" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize("error", [ValueError("a bug"), WorkerError("raised", role="actor", ranks=[0], node_ranks=[0])])
def test_what_the_code_raises_is_not_tried_again(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        attempts(error, "never")


def test_missing_slots_end_the_first_attempt_and_are_waited_for_in_a_later_one() -> None:
    with pytest.raises(NoRoomError):
        attempts(NoRoomError("no room"), "never")
    assert attempts(died(), NoRoomError("no room"), "done")[1] == [1, 2, 3]


def test_a_spent_budget_ends_the_run_with_the_last_reason_and_the_first_traceback() -> None:
    def fail(text: str) -> Exception:
        try:
            raise died(text) from KeyError("the root of it")
        except WorkerDiedError as error:
            return error

    with pytest.raises(RestartsSpentError, match="^actor rank 3 .* loss 3 within 3600 s") as caught:
        attempts(fail("actor rank 1 is dead"), fail("actor rank 2 is dead"), fail("actor rank 3 is dead"), most=2)
    text = str(caught.value)
    assert "actor rank 1 is dead" in text and "the root of it" in text and "actor rank 2" not in text


def test_losses_that_lie_far_apart_do_not_add_up() -> None:
    now = 0.0
    budget = Budget(most=1, window_s=10, clock=lambda: now)
    for _ in range(5):
        budget.spend(died())
        now += 11
    budget.spend(died())
    with pytest.raises(RestartsSpentError):
        budget.spend(died())


def test_losses_without_a_step_between_them_add_up_however_long_they_take() -> None:
    now = 0.0
    budget = Budget(most=2, window_s=10, clock=lambda: now)
    for reached in ("step 2", "step 4", "step 4"):
        budget.spend(died(), reached=reached)
        now += 100
    with pytest.raises(RestartsSpentError):
        budget.spend(died(), reached="step 4")


def test_growing_back_costs_nothing_of_the_budget() -> None:
    assert attempts(Regrow("node 1 is back"), Regrow("node 1 is back"), "done", most=0)[1] == [1, 2, 3]


def test_the_reason_stays_the_reason_when_closing_fails_too() -> None:
    class Stubborn:
        def close(self) -> None:
            raise ClusterError("node 1 still has processes")

    said: list[str] = []
    with pytest.raises(WorkerDiedError), closing(Stubborn(), say=said.append):
        raise died()
    assert said == ["node 1 still has processes"]
    with pytest.raises(ClusterError, match="still has"), closing(Stubborn(), say=said.append):
        pass


def test_complaints_about_a_peer_are_told_from_bugs() -> None:
    gloo = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:80"
    assert is_about_a_peer(RuntimeError(gloo), f"Traceback ...\n{gloo}\n")
    assert is_about_a_peer(ConnectionResetError(), "ConnectionResetError")
    bug = "RuntimeError: shape '[4, 3]' is invalid for input of size 8"
    assert not is_about_a_peer(RuntimeError(bug), f"Traceback ...\n{bug}\n")
    assert not is_about_a_peer(None, "")


# The router


def place(worker: int, node_rank: int = 0) -> Place:
    return Place(worker=worker, node_rank=node_rank, name=f"rollout-{worker}")


def handed_out(router: Router) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for worker, request in router.hand_out():
        found.setdefault(worker, []).append(request.id)
    return found


def test_what_a_lost_worker_had_comes_first_again_with_the_same_seeds() -> None:
    router = Router([place(0), place(1)], room=4, node_weights=None)
    requests = [make_request(str(number), size=2) for number in range(12)]
    for request in requests:
        router.add(request)
    first = dict(reversed(router.hand_out()))
    had = [request.id for request in requests if router.worker_of(request.id) == 0]
    assert had and router.lose(0) == had and router.num_workers == 1
    assert all(router.worker_of(request_id) is None for request_id in had)
    for request_id in [request.id for request in requests if router.worker_of(request.id) == 1]:
        router.finish(request_id)
    again = router.hand_out()
    assert {worker for worker, _ in again} == {1} and [request.id for _, request in again] == had[: len(again)]
    assert first[0].seeds == again[0][1].seeds and router.num_unfinished == 12 - len(had)


def test_without_a_worker_everything_waits_and_goes_to_the_one_that_joins() -> None:
    router = Router([place(0)], room=4, node_weights=None)
    router.add(make_request("a", size=2))
    router.hand_out()
    router.lose(0)
    router.add(make_request("b", size=2))
    assert router.hand_out() == [] and router.hand_out_now("a") is None and router.num_workers == 0
    router.join(place(0, node_rank=3))
    assert handed_out(router) == {0: ["a", "b"]}


def test_the_share_of_a_lost_node_goes_to_the_others_and_comes_back() -> None:
    router = Router([place(0), place(1, 1)], room=2, node_weights=[1.0, 1.0])
    for number in range(4):
        router.add(make_request(str(number), size=2))
    router.lose(0)
    assert set(handed_out(router)) == {1}
    router.add(make_request("late", size=2))
    router.lose(1)
    router.join(place(0))
    given = 0
    while found := handed_out(router):
        assert set(found) == {0}
        for request_id in found[0]:
            router.finish(request_id)
            given += 1
    assert given == 5 and router.num_unfinished == 0


# Pulse and watch

BUSY = """
import sys, time
from pathlib import Path
from rollcall.cluster.pulse import Pulse, write_stacks_on_signal
write_stacks_on_signal(Path(sys.argv[2]))
pulse = Pulse(Path(sys.argv[1]))
with pulse.doing("warm_up"):
    pass
def a_function_that_hangs():
    with pulse.doing("update"):
        print("ready", flush=True)
        time.sleep(600)
a_function_that_hangs()
"""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BUSY, str(tmp_path / "pulse"), str(tmp_path / "stacks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def wait_for_state(process: subprocess.Popen[str], pulse: Path, state: str) -> Seen:
    until = time.monotonic() + 30
    while (seen := look(process.pid, pulse)).state != state:
        assert time.monotonic() < until
        time.sleep(0.01)
    return seen


def test_a_stopped_process_is_seen_as_such_and_tells_its_stacks(busy: subprocess.Popen[str], tmp_path: Path) -> None:
    pulse = tmp_path / "pulse"
    seen = look(busy.pid, pulse)
    assert seen.is_alive and seen.doing == "update" and seen.num_done == 1 and set(seen.longest_s or ()) == {"warm_up"}
    busy.send_signal(signal.SIGSTOP)
    stopped = wait_for_state(busy, pulse, "T")
    watch = Watch()
    assert watch.judge({"a": {3: stopped}}, seats={"a": [3]}, gone=set()) == []
    (loss,) = watch.judge({"a": {3: stopped}}, seats={"a": [3]}, gone=set())
    assert loss.rank == 3 and loss.still_runs and "stopped" in loss.why and "update" in loss.why
    stacks = dump_stacks(busy.pid, tmp_path / "stacks")
    assert "a_function_that_hangs" in stacks and busy.poll() is None
    busy.kill()
    busy.wait()
    assert not look(busy.pid, pulse).is_alive


def test_a_pulse_tells_the_longest_call_of_each_method(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")
    for _ in range(3):
        with pulse.doing("score"):
            pass
    seen = look(os.getpid(), tmp_path / "pulse")
    assert seen.doing == "" and seen.num_done == 3 and (seen.longest_s or {})["score"] >= 0


def alive(**fields: Any) -> Seen:
    return Seen(is_alive=True, state="S", **fields)


def test_a_node_that_is_silent_loses_its_workers_and_one_that_is_late_does_not() -> None:
    watch = Watch()
    seats = {"a": [0, 1], "b": [2]}
    here: dict[int, Seen] = {2: alive()}
    assert watch.judge({"a": {0: alive(), 1: alive()}, "b": here}, seats=seats, gone=set()) == []
    for _ in range(3):
        assert watch.judge({"a": None, "b": here}, seats=seats, gone=set()) == []
    assert watch.judge({"a": {0: alive(), 1: alive()}, "b": here}, seats=seats, gone=set()) == []
    losses = [loss for _ in range(6) for loss in watch.judge({"b": here}, seats=seats, gone=set())]
    assert [loss.rank for loss in losses] == [0, 1] and not losses[0].still_runs and "silent" in losses[0].why


def test_a_node_that_ray_has_given_up_is_lost_at_once_and_told_once() -> None:
    watch = Watch()
    assert [loss.rank for loss in watch.judge({}, seats={"a": [4]}, gone={"a"})] == [4]
    assert watch.judge({}, seats={"a": [4]}, gone={"a"}) == []
    watch.forgive(4)
    assert [loss.rank for loss in watch.judge({"a": {4: Seen(is_alive=False)}}, seats={"a": [4]}, gone=set())] == [4]


def test_patience_grows_with_what_a_call_took_before() -> None:
    watch = Watch()
    assert watch.patience_s("update") == FIRST_CALL_S

    def judge(**fields: Any) -> list[int]:
        return [loss.rank for loss in watch.judge({"a": {0: alive(**fields)}}, seats={"a": [0]}, gone=set())]

    assert judge(longest_s={"update": 100.0, "score": 0.1}) == []
    assert watch.patience_s("update") == FACTOR * 100 and watch.patience_s("score") == LEAST_S
    assert judge(doing="update", busy_s=FACTOR * 100 - 1) == []
    assert judge(doing="update", busy_s=FACTOR * 100 + 1) == [0]


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


# Runs on Ray

STEPS, PROMPTS = 6, 8


@pytest.fixture(scope="module")
def node() -> Iterator[None]:
    """A cluster of one node with three slots."""
    import ray

    from rollcall.cluster.bootstrap import start_node, stop_node
    from rollcall.cluster.ray_start import NodeRequest

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="rc-rec-", dir="/tmp") as root:
        patch.setenv("ROLLCALL_CLUSTER", "recovery")
        patch.setenv("ROLLCALL_STATE_DIR", f"{root}/node")
        # Workers find the tests' reward there.
        patch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
        request = NodeRequest(
            cluster="recovery", rank=0, num_nodes=1, rendezvous=Path(root, "rendezvous"), slots=3, object_store_gib=0.1
        )
        try:
            start_node(request, say=lambda line: None)
            yield
        finally:
            ray.shutdown()
            stop_node("recovery")


def on_cluster(folder: Path, placement: str, *overrides: str, slots: int, name: str) -> Config:
    cluster = (
        f"cluster={{num_nodes: 1, num_gpus_per_node: {slots}, accelerator: cpu, component_placement: {placement}}}"
    )
    return make_run(folder, cluster, f"trainer.steps={STEPS}", "trainer.save_every=2", *overrides, name=name)


class Saboteur:
    """Signals a worker of the run when so many groups are in the journal."""

    def __init__(self, patch: pytest.MonkeyPatch, *, worker: int, after: int, signum: int = signal.SIGKILL) -> None:
        import rollcall.train as module

        self.built: list[Any] = []
        self.hit_pid: int | None = None
        build, append, count = module._build, Journal.append, 0

        def remember(*args: Any, **kwargs: Any) -> Any:
            self.built.append(build(*args, **kwargs))
            return self.built[-1]

        def append_and_hit(journal: Journal, group: Any) -> None:
            nonlocal count
            append(journal, group)
            count += 1
            if count == after:
                self.hit_pid = self.built[-1].team.group.worker_metadata[worker]["pid"]
                os.kill(self.hit_pid, signum)

        patch.setattr(module, "_build", remember)
        patch.setattr(Journal, "append", append_and_hit)


def check_whole(config: Config, undisturbed: Config) -> None:
    """Every draw was journaled once and trained once, and the result is that of a run that nothing happened to."""
    with Journal(config.run.dir / "journal") as journal:
        draws = [draw for _, entry in sorted(journal.trained().items()) for draw in entry.draws]
    assert draws == list(range(STEPS * PROMPTS)) and num_records(config) == STEPS * PROMPTS
    np.testing.assert_allclose(column(config, "train/loss"), column(undisturbed, "train/loss"), atol=1e-4)
    for key, tensor in weights(undisturbed).items():
        np.testing.assert_allclose(weights(config)[key], tensor, atol=1e-4, err_msg=key)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = make_run(tmp_path_factory.mktemp("runs"), f"trainer.steps={STEPS}", "trainer.save_every=2", name="whole")
    train(config, quiet=True)
    return config


def test_a_lost_rollout_process_is_replaced_within_the_attempt(
    node: None, undisturbed: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = on_cluster(undisturbed.run.dir.parent, "{rollout: 0, actor: 1}", slots=2, name="apart")
    saboteur = Saboteur(monkeypatch, worker=0, after=2 * PROMPTS + 3)
    summary = train(config, quiet=True)
    assert summary["steps"] == STEPS and saboteur.hit_pid is not None
    assert len(saboteur.built) == 1, "the actor lived on"
    told = capfd.readouterr().err
    assert "rollout-0 on node 0 is lost" in told and "has weights of version 2 and serves again" in told
    check_whole(config, undisturbed)


@pytest.mark.slow
def test_a_stopped_rollout_process_tells_its_stacks_and_others_do_its_part(
    node: None, undisturbed: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = on_cluster(undisturbed.run.dir.parent, "{rollout: 0-1, actor: 2}", slots=3, name="stopped")
    saboteur = Saboteur(monkeypatch, worker=0, after=2 * PROMPTS + 3, signum=signal.SIGSTOP)
    assert train(config, quiet=True)["steps"] == STEPS and len(saboteur.built) == 1
    told = capfd.readouterr().err
    assert "its process is stopped" in told and "most recent call first" in told
    check_whole(config, undisturbed)


def test_a_lost_actor_ends_the_attempt_and_the_next_one_goes_on(
    node: None, undisturbed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_cluster(undisturbed.run.dir.parent, "{'actor,rollout': all}", slots=2, name="together")
    saboteur = Saboteur(monkeypatch, worker=1, after=3 * PROMPTS + 3)
    summary = train(config, quiet=True)
    assert summary["steps"] == STEPS and len(saboteur.built) == 2
    pids = {meta["pid"] for meta in saboteur.built[0].team.group.worker_metadata}
    assert not any(look(pid, Path("/nonexistent")).is_alive for pid in pids), "the survivors were ended too"
    check_whole(config, undisturbed)
