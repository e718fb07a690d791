"""Losses and what follows: attempts, requests that go back, watches; and two runs on Ray that lose a process."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from requests_of import add, make_group
from runs import column, make_run, num_records, weights

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks' stand-ins

from benchmarks import recovery
from benchmarks.standin_worker import Pace, StandIn
from benchmarks.standins import ThreadGroup
from rollcall.base.errors import (
    ClusterError,
    NoRoomError,
    PeerLostError,
    RestartsSpentError,
    WorkerDiedError,
    WorkerError,
    WorkerLostError,
    WorkerTimeoutError,
)
from rollcall.base.journal import Journal
from rollcall.base.wait import speaking
from rollcall.config import Config
from rollcall.engine.protocol import Made, Request
from rollcall.loop.attempts import Budget, Regrow, closing, run_attempts
from rollcall.loop.tasks import start
from rollcall.loop.workers import Workers
from rollcall.observe.live import REWARDS, read_live
from rollcall.observe.timeline import CONTROLLER, WORKER_BACK, WORKER_LOST, read_timeline
from rollcall.plan.placement import Role
from rollcall.process.groups.host import is_about_a_peer
from rollcall.process.groups.pulse import look
from rollcall.run.engines import Engines
from rollcall.run.router import RolloutWorker, Router
from rollcall.run.team import Team
from rollcall.run.training import train
from rollcall.run.weight_sync import WeightSync

T = TypeVar("T")


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

    budget = Budget(most=most, window_s=3600)
    with speaking(said.append):
        return run_attempts(attempt, budget=budget, reached=lambda: None, note=lambda reason: None), numbers, said


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

    with pytest.raises(RestartsSpentError, match="^actor rank 3 .* failure 3 within 3600 s") as caught:
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
    with pytest.raises(WorkerDiedError), speaking(said.append), closing(cast(Workers, Stubborn())):
        raise died()
    assert said == ["node 1 still has processes"]
    with pytest.raises(ClusterError, match="still has"), closing(cast(Workers, Stubborn())):
        pass


def test_a_call_that_a_stopped_run_waits_for_is_named() -> None:
    class Closed:
        def close(self) -> None: ...

    go, said = threading.Event(), []

    def write_checkpoint(step: int) -> None:
        go.wait(60)

    def voice(text: str) -> None:
        said.append(text)
        go.set()

    start(partial(write_checkpoint, 4))
    with pytest.raises(KeyboardInterrupt), speaking(voice), closing(cast(Workers, Closed())):
        raise KeyboardInterrupt
    assert said == ["waiting up to 30 s for write_checkpoint"]


def test_complaints_about_a_peer_are_told_from_bugs() -> None:
    gloo = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:80"
    assert is_about_a_peer(RuntimeError(gloo), f"Traceback ...\n{gloo}\n")
    assert is_about_a_peer(ConnectionResetError(), "ConnectionResetError")
    bug = "RuntimeError: shape '[4, 3]' is invalid for input of size 8"
    assert not is_about_a_peer(RuntimeError(bug), f"Traceback ...\n{bug}\n")
    assert not is_about_a_peer(None, "")


# The router


def place(worker: int, node_rank: int = 0) -> RolloutWorker:
    return RolloutWorker(worker=worker, node_rank=node_rank, name=f"rollout-{worker}")


def handed_out(router: Router) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for worker, requests in router.hand_out():
        found.setdefault(worker, []).extend(request.id for request in requests)
    return found


def test_what_a_lost_worker_had_not_finished_comes_first_again_with_the_same_seeds() -> None:
    router = Router([place(0), place(1)], room=4, node_weights=None)
    for number in range(12):
        add(router, make_group(number))
    given = router.hand_out()
    had = [requests for worker, requests in given if worker == 0]
    router.finish(had[0][0].id)
    left = [had[0][1:], *had[1:]]
    router.lose(0)
    assert router.num_workers == 1 and all(
        router.worker_of(each.id) is None for requests in had for each in requests if each is not had[0][0]
    )
    for request in [request for worker, requests in given if worker == 1 for request in requests]:
        router.finish(request.id)
    again = router.hand_out()
    assert {worker for worker, _ in again} == {1}
    assert [requests for _, requests in again][: len(left)] == left[: len(again)], (
        "what was finished is not asked for again"
    )


def test_without_a_worker_everything_waits_and_goes_to_the_one_that_joins() -> None:
    router = Router([place(0)], room=4, node_weights=None)
    add(router, make_group("a"))
    router.hand_out()
    router.lose(0)
    add(router, make_group("b"))
    assert router.hand_out() == [] and router.num_workers == 0
    router.join(place(0, node_rank=3))
    assert handed_out(router) == {0: ["a/0", "a/1", "b/0", "b/1"]}


def test_the_share_of_a_lost_node_goes_to_the_others_and_comes_back() -> None:
    router = Router([place(0), place(1, 1)], room=2, node_weights=[1.0, 1.0])
    for number in range(4):
        add(router, make_group(number))
    router.lose(0)
    assert set(handed_out(router)) == {1}
    add(router, make_group("late"))
    router.lose(1)
    router.join(place(0))
    given = 0
    while found := handed_out(router):
        assert set(found) == {0}
        for request_id in found[0]:
            router.finish(request_id)
            given += 1
    assert given == 10


# The engines of all rollout processes


class FragileGroup(ThreadGroup):
    """Stand-ins that can be killed: whatever they owe then, and are asked from then on, is told as their death."""

    def __init__(self, num_workers: int) -> None:
        super().__init__([self._make() for _ in range(num_workers)], node_ranks=[0] * num_workers)
        self.dead: set[int] = set()
        self._owes: dict[int, tuple[int, Any]] = {}

    def _make(self) -> Any:
        stand_in: Any = StandIn(Pace(request_s=0.01, places=2))
        stand_in.is_alive = lambda: True
        return stand_in

    def revive(self, worker: int) -> None:
        self.workers[worker] = self._make()
        self.dead.discard(worker)

    def run_single_worker_single_data(self, method: str, worker: int, *args: Any) -> Any:
        future = super().run_single_worker_single_data(method, worker, *args)
        self._owes[id(future)] = (worker, self.workers[worker])
        return future

    def get_all_worker_results(self, futures: Any, **options: Any) -> list[Any]:
        for future in futures:
            worker, stand_in = self._owes[id(future)]
            if worker in self.dead or stand_in is not self.workers[worker]:
                raise WorkerDiedError(f"rank {worker} is dead", role="rollout", ranks=[worker], node_ranks=[0])
        return super().get_all_worker_results(futures)


def fragile(num_rollouts: int, **options: Any) -> tuple[FragileGroup, Engines]:
    """Rollouts, and an actor as the last worker."""
    group: Any = FragileGroup(num_rollouts + 1)
    rollouts = list(range(num_rollouts))
    team = Team(group=group, members={Role.ROLLOUT: rollouts, Role.ACTOR: [num_rollouts]})
    return group, Engines(team, room=4, node_weights=None, replaceable=rollouts, **options)


def in_a_loop(engine: Engines, work: Coroutine[Any, Any, T]) -> T:
    async def main() -> T:
        try:
            async with asyncio.timeout(600):
                return await work
        finally:
            await engine.close()

    return asyncio.run(main())


async def generate_all(
    engine: Engines, requests: list[Request], after_each: Callable[[int], None] = lambda num_done: None
) -> list[Made]:
    num_done = 0

    async def one(request: Request) -> Made:
        nonlocal num_done
        made = await engine.generate(request)
        num_done += 1
        after_each(num_done)
        return made

    return list(await asyncio.gather(*map(one, requests)))


def groups_of(count: int) -> list[Request]:
    return [request for number in range(count) for request in make_group(number)]


def test_what_a_dead_engine_had_is_done_by_the_others_once_each() -> None:
    never = threading.Event()
    group, engine = fragile(2, replace=lambda worker: never.wait() and None)
    requests = groups_of(30)

    def kill_after_five(num_done: int) -> None:
        if num_done >= 5:
            group.dead.add(0)

    async def work() -> list[Made]:
        await engine.serve(0)
        return await generate_all(engine, requests, kill_after_five)

    made = in_a_loop(engine, work())
    assert [one.completion.seed for one in made] == [request.seed for request in requests]
    assert {one.worker for one in made} == {"rollout-0 on node 0", "rollout-1 on node 0"}
    assert group.dead == {0} and not engine._new_ones
    never.set()


def test_a_session_is_ended_where_its_requests_were() -> None:
    group, engine = fragile(2)
    ended: list[tuple[int, str]] = []
    for number, stand_in in enumerate(group.workers[:2]):
        stand_in.engine.end_session = lambda session, number=number: ended.append((number, session))

    async def work() -> None:
        await engine.serve(0)
        for turn in range(3):
            await engine.generate(replace(make_group(turn)[0], group=None, session="s"))
        engine.end_session("s")
        engine.end_session("unknown")
        await generate_all(engine, groups_of(2))

    in_a_loop(engine, work())
    assert ended == [(0, "s")]


def test_a_new_engine_serves_when_it_has_the_current_weights() -> None:
    group, engine = fragile(1, replace=lambda worker: group.revive(worker))
    first = group.workers[0]

    def kill_after_two(num_done: int) -> None:
        if num_done == 2:
            group.dead.add(0)

    async def mend() -> None:
        while not engine._new_ones:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert group.workers[0].engine.num_unfinished == 0, "it was asked for nothing before it had weights"
        await engine.admit()

    async def work() -> None:
        await engine.serve(7)
        made, _ = await asyncio.gather(generate_all(engine, groups_of(6), kill_after_two), mend())
        assert len(made) == 12

    in_a_loop(engine, work())
    assert group.workers[0] is not first and group.workers[0].engine.version == 7


def test_a_new_engine_that_gets_weights_in_a_pause_decodes_nothing_before_serve() -> None:
    group, engine = fragile(1, replace=lambda worker: group.revive(worker))

    async def work() -> None:
        await engine.serve(0)
        waiting = asyncio.create_task(generate_all(engine, groups_of(100)))
        await asyncio.sleep(0.005)
        await engine.pause(drain=False)
        group.dead.add(0)
        engine._lose(0, WorkerDiedError("rank 0 is dead", role="rollout", ranks=[0], node_ranks=[0]))
        while not engine._new_ones:
            await asyncio.sleep(0.001)
        await engine.admit()
        await asyncio.sleep(0.05)
        assert not waiting.done() and group.workers[0].engine.num_unfinished == 0
        await engine.serve(1)
        assert (await waiting)[-1].completion.segments[0].version == 1

    in_a_loop(engine, work())


def test_a_receiver_that_dies_in_a_push_is_left_out_and_the_others_get_the_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    never = threading.Event()
    group, engine = fragile(2, replace=lambda worker: never.wait() and None)

    async def work() -> None:
        await engine.serve(1)
        group.dead.add(0)
        await engine.serve(2)

    in_a_loop(engine, work())
    assert group.workers[1].engine.version == 2 and engine.version == 2
    assert recovery.NOTICED.search(caplog.text), "the benchmark knows the sentence"
    never.set()


def test_the_benchmark_gives_no_time_for_a_fault_that_the_run_did_not_tell_of() -> None:
    told = recovery.cost(10.0, told=[12.5, 11.5], updates=[9.0, 11.0, 14.0], by_run=True)
    assert told == {"noticed_s": 1.5, "next_update_s": 4.0}
    untold = recovery.cost(10.0, told=[], updates=[11.0, 14.0], by_run=True)
    assert untold == {"noticed_s": None, "next_update_s": None}
    controller = recovery.cost(10.0, told=[], updates=[9.0, 14.0], by_run=False)
    assert controller == {"noticed_s": None, "next_update_s": 4.0}


def test_without_any_engine_the_attempt_ends_after_a_while() -> None:
    never = threading.Event()
    group, engine = fragile(1, replace=lambda worker: never.wait() and None, wait_s=0.05)

    async def work() -> None:
        await engine.serve(0)
        group.dead.add(0)
        await generate_all(engine, groups_of(1))

    with pytest.raises(WorkerLostError, match="no rollout process is left"):
        in_a_loop(engine, work())
    never.set()


def test_an_engine_that_cannot_be_replaced_ends_the_attempt() -> None:
    def refuse(worker: int) -> None:
        raise RestartsSpentError("too many losses")

    group, engine = fragile(2, replace=refuse)

    async def work() -> None:
        await engine.serve(0)
        group.dead.add(0)
        await generate_all(engine, groups_of(200))

    with pytest.raises(RestartsSpentError, match="too many losses"):
        in_a_loop(engine, work())


def test_the_loss_of_an_actor_is_not_mended_by_the_engine() -> None:
    group, engine = fragile(1, replace=group_is_not_asked)

    async def work() -> None:
        await engine.serve(0)
        group.dead.add(1)
        await engine.serve(1)

    with pytest.raises(WorkerDiedError, match="rank 1 is dead"):
        in_a_loop(engine, work())


def group_is_not_asked(worker: int) -> None:
    raise AssertionError("nothing can be replaced")


# Runs on Ray

STEPS, PROMPTS = 6, 8


@pytest.fixture(scope="module")
def node() -> Iterator[None]:
    """A cluster of one node with three slots."""
    import ray

    from rollcall.nodes.bootstrap import start_node, stop_node
    from rollcall.nodes.ray_start import NodeRequest

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="rc-rec-", dir="/tmp") as root:
        patch.setenv("ROLLCALL_CLUSTER", "recovery")
        patch.setenv("ROLLCALL_STATE_DIR", f"{root}/node")
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):  # set by a connection, in this process
            patch.setenv(name, "")  # so that the patch takes note of it
            patch.delenv(name)
        # Workers find the tests' reward there.
        patch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
        request = NodeRequest(
            cluster="recovery", rank=0, num_nodes=1, rendezvous=Path(root, "rendezvous"), slots=3, object_store_gib=0.1
        )
        try:
            start_node(request)
            yield
        finally:
            gc.collect()  # handles that are left would be taken for those of the next Ray's first actors
            ray.shutdown()
            stop_node("recovery")
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")  # reads the environment again: tests that follow have Rays without a token


def on_cluster(folder: Path, placement: str, *overrides: str, slots: int, name: str) -> Config:
    cluster = (
        f"cluster={{num_nodes: 1, num_gpus_per_node: {slots}, accelerator: cpu, component_placement: {placement}}}"
    )
    return make_run(folder, cluster, f"trainer.steps={STEPS}", "trainer.save_every=2", *overrides, name=name)


class Saboteur:
    """Signals a worker of the run before the n-th call of a method, here in the controller's process."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        worker: int,
        before: int,
        owner: type = Journal,
        method: str = "append",
        signum: int = signal.SIGKILL,
    ) -> None:
        import rollcall.run.on_cluster as module

        self.teams: list[Team] = []  # of each attempt
        self.hit_pid: int | None = None
        make, original, count = module.Team, getattr(owner, method), 0

        def remember(**fields: Any) -> Team:
            self.teams.append(make(**fields))
            return self.teams[-1]

        def hit(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == before:
                pid = self.hit_pid = int(self.teams[-1].group.worker_metadata[worker]["pid"])
                os.kill(pid, signum)
            return original(*args, **kwargs)

        patch.setattr(module, "Team", remember)
        patch.setattr(owner, method, hit)


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


@pytest.mark.slow
def test_a_lost_rollout_process_is_replaced_within_the_attempt_and_a_lost_actor_ends_it(
    node: None, undisturbed: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = on_cluster(undisturbed.run.dir.parent, "{rollout: 0, actor: 1}", slots=2, name="apart")
    rollout = Saboteur(monkeypatch, worker=0, before=2 * PROMPTS + 3)
    actor = Saboteur(monkeypatch, worker=1, before=4 * PROMPTS + 3)
    summary = train(config, quiet=True)
    assert summary["steps"] == STEPS and rollout.hit_pid is not None and actor.hit_pid is not None
    assert len(actor.teams) == 2, "the actor lived on without the rollout process, and not the other way round"
    assert "rollout-0 on node 0 is lost" in caplog.text
    check_whole(config, undisturbed)
    check_timeline(config)


def check_timeline(config: Config) -> None:
    """It has both workers with what they did, the two losses where they were, and what came back."""
    found = read_timeline(config.run.dir)
    rollout, actor = "rollout 0 @ node 0", "actor 0 @ node 0"
    assert found.lanes == (CONTROLLER, actor, rollout, REWARDS)
    for lane, kinds in ((actor, {"update", "sync", "wait"}), (rollout, {"rollout", "sync", "wait"})):
        spans = [span for span in found.spans if span.lane == lane]
        assert kinds <= {span.kind for span in spans}
        # What a process did in the moments before it was killed is not told: the rollout process is lost in step 3.
        assert {span.step for span in spans} >= set(range(1, STEPS + 1)) - ({3} if lane == rollout else set())
        # One process does one thing at a time, whatever the clocks say.
        assert all(one.end_s <= next_.start_s for one, next_ in zip(spans, spans[1:], strict=False)), spans
    marks = [(mark.name, mark.lane) for mark in found.marks]
    assert marks.count((WORKER_LOST, rollout)) == 1 and marks.count((WORKER_LOST, actor)) == 1
    assert marks.index((WORKER_LOST, rollout)) < marks.index((WORKER_BACK, rollout)) < marks.index((WORKER_LOST, actor))
    assert [name for name, _ in marks if "attempt" in name] == ["attempt 1 begins", "attempt lost", "attempt 2 begins"]
    live = read_live(config.run.dir)
    assert live is not None and live.is_over and {one.lane for one in live.processes} == set(found.lanes)
    assert all(one.memory_bytes > 0 and one.num_calls > 0 for one in live.processes if one.roles)
    assert all(one.log for one in live.processes if one.roles)


@pytest.mark.slow
def test_a_receiver_that_dies_in_a_weight_update_leaves_the_others_with_the_new_weights(
    node: None, undisturbed: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = on_cluster(undisturbed.run.dir.parent, "{rollout: 0-1, actor: 2}", slots=3, name="pushed")
    saboteur = Saboteur(monkeypatch, worker=0, before=3, owner=WeightSync, method="push")
    assert train(config, quiet=True)["steps"] == STEPS and len(saboteur.teams) == 1
    assert "rollout-0 on node 0 is lost" in caplog.text
    check_whole(config, undisturbed)


@pytest.mark.slow
def test_a_stopped_rollout_process_tells_its_stacks_and_others_do_its_part(
    node: None, undisturbed: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = on_cluster(undisturbed.run.dir.parent, "{rollout: 0-1, actor: 2}", slots=3, name="stopped")
    saboteur = Saboteur(monkeypatch, worker=0, before=2 * PROMPTS + 3, signum=signal.SIGSTOP)
    assert train(config, quiet=True)["steps"] == STEPS and len(saboteur.teams) == 1
    told = caplog.text
    assert "its process is stopped" in told and "MainThread" in told
    check_whole(config, undisturbed)


@pytest.mark.slow  # with one actor, above
def test_a_lost_actor_ends_the_attempt_and_the_next_one_goes_on(
    node: None, undisturbed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_cluster(undisturbed.run.dir.parent, "{'actor,rollout': all}", slots=2, name="together")
    saboteur = Saboteur(monkeypatch, worker=1, before=3 * PROMPTS + 3)
    summary = train(config, quiet=True)
    assert summary["steps"] == STEPS and len(saboteur.teams) == 2
    pids = {meta["pid"] for meta in saboteur.teams[0].group.worker_metadata}
    assert not any(look(pid).is_alive for pid in pids), "the survivors were ended too"
    check_whole(config, undisturbed)
