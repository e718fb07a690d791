"""Rollout ahead of training: how old tokens may be, which groups a step gets, and that nothing is skipped or used twice.

Workers are stand-ins that sleep, behind the real controller, router and remote handles; kills are of whole local runs.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from branching import make_branch, make_episode, make_turn
from branching import make_group as episode_group
from runs import IN_JOURNAL, IN_SAVE_WRITE, IN_UPDATE, Kill, finish, letter_rows, make_run, run_and_be_killed, weights

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks' stand-ins

from benchmarks.standin_worker import Pace, StandIn
from benchmarks.standins import make_workers, run_steps, stop, team_of
from rollcall.base.journal import Journal
from rollcall.base.types import Group, Prompt, Segment
from rollcall.config import Config, parse_config
from rollcall.loop.supply import AsCompleted, Begun, Cursor, Demand, InOrder, StepBatch, SuppliedGroup, choose
from rollcall.loop.tasks import in_thread

STEPS, PROMPTS = 8, 6
ORDERS = ("in_order", "as_completed")


# Calls beside the loop


def test_a_call_in_a_thread_leaves_the_loop_free_and_brings_its_result_or_error() -> None:
    async def work() -> tuple[str, int]:
        ticks, enough = 0, threading.Event()
        call = asyncio.ensure_future(in_thread(lambda: "done" if enough.wait() else ""))
        while not call.done():
            await asyncio.sleep(0.001)
            ticks += 1
            if ticks == 5:
                enough.set()
        with pytest.raises(KeyError, match="missing"):
            await in_thread({}.__getitem__, "missing")
        return await call, ticks

    result, ticks = asyncio.run(work())
    assert result == "done" and ticks >= 5


def test_a_cancelled_call_does_not_hold_up_the_end() -> None:
    asked, answered = [], []

    def slow() -> None:
        asked.append(1)
        time.sleep(30)
        answered.append(1)

    async def work() -> None:
        call = asyncio.ensure_future(in_thread(slow))
        while not asked:
            await asyncio.sleep(0.001)
        call.cancel()

    asyncio.run(work())
    assert not answered


# Which groups a step gets


def make_group(step: int, draw: int) -> Group:
    prompt = Prompt(id=str(draw), token_ids=np.array([1], dtype=np.int32), text="", answer="", metadata={})
    return Group(
        step=step, draw=draw, prompt=prompt, completions=(), scores=(), started_s=0, finished_s=0, worker="nobody"
    )


class Clumsy:
    """Makes groups in an order of its own; some have no signal."""

    def __init__(self, seed: int, *, without_signal: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.begun: list[int] = []
        self.without_signal = without_signal

    async def make(self, step: int, draw: int) -> SuppliedGroup:
        self.begun.append(draw)
        for _ in range(self.random.randrange(40)):
            await asyncio.sleep(0)
        return SuppliedGroup(group=make_group(step, draw), from_journal=False)

    def has_signal(self, group: Group) -> bool:
        return random.Random(group.draw).random() >= self.without_signal


def needs_of(clumsy: Clumsy, *, staleness: int, start_step: int = 0, max_refills: int | None = None) -> Demand:
    return Demand(
        start_step=start_step,
        steps=STEPS,
        wanted=PROMPTS,
        staleness=staleness,
        max_refills=max_refills,
        make=clumsy.make,
        has_signal=clumsy.has_signal,
    )


async def train_on(supply: InOrder | AsCompleted, *, start_step: int = 0, until: int = STEPS) -> list[StepBatch]:
    batches: list[StepBatch] = []
    feeding = asyncio.create_task(supply.run())
    for step in range(start_step + 1, until + 1):
        batches.append(await supply.batch(step))
        await supply.announce(step)
    feeding.cancel()
    return batches


def draws_of(batches: list[StepBatch]) -> list[int]:
    return [group.draw for batch in batches for group in batch.groups]


NOTHING_YET = Cursor(pending=(), next_draw=0)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_groups_as_they_finish_are_each_in_one_step_and_none_too_late(staleness: int, seed: int) -> None:
    clumsy = Clumsy(seed)
    begun_at: dict[int, int] = {}

    class Announced(AsCompleted):
        version = 0

        async def announce(self, version: int) -> None:
            self.version = version
            await super().announce(version)

    async def work() -> list[StepBatch]:
        async def noted(step: int, draw: int) -> SuppliedGroup:
            begun_at[draw] = supply.version
            return await clumsy.make(step, draw)

        needs = replace(needs_of(clumsy, staleness=staleness), make=noted)
        supply = Announced(needs, cursor=NOTHING_YET, recorded={})
        return await train_on(supply)

    batches = asyncio.run(work())
    assert sorted(draws_of(batches)) == list(range(STEPS * PROMPTS))
    for batch in batches:
        assert all(batch.step - 1 - begun_at[group.draw] <= staleness for group in batch.groups)
    in_order = [sorted(range(step * PROMPTS, (step + 1) * PROMPTS)) for step in range(STEPS)]
    if staleness == 0:
        assert [[group.draw for group in batch.groups] for batch in batches] == in_order


def test_with_room_to_choose_a_step_takes_who_finished_first() -> None:
    async def work() -> list[StepBatch]:
        clumsy = Clumsy(3)
        return await train_on(AsCompleted(needs_of(clumsy, staleness=3), cursor=NOTHING_YET, recorded={}))

    assert draws_of(asyncio.run(work())) != list(range(STEPS * PROMPTS))


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("stop", range(1, STEPS))
def test_what_a_step_leaves_behind_is_where_the_next_process_begins(staleness: int, stop: int) -> None:
    async def work() -> tuple[list[StepBatch], list[StepBatch]]:
        first = AsCompleted(needs_of(Clumsy(stop), staleness=staleness), cursor=NOTHING_YET, recorded={})
        before = await train_on(first, until=stop)
        needs = needs_of(Clumsy(99), staleness=staleness, start_step=stop)
        again = AsCompleted(needs, cursor=before[-1].cursor, recorded={})
        return before, await train_on(again, start_step=stop)

    before, after = asyncio.run(work())
    assert sorted(draws_of(before + after)) == list(range(STEPS * PROMPTS))


def test_recorded_steps_are_repeated_whatever_finishes_first_now() -> None:
    async def work() -> tuple[list[StepBatch], list[StepBatch]]:
        first = await train_on(AsCompleted(needs_of(Clumsy(1), staleness=3), cursor=NOTHING_YET, recorded={}), until=5)
        recorded = {batch.step: [group.draw for group in batch.groups] for batch in first}
        # From the checkpoint of step 2, with less room to choose than the first process had.
        needs = needs_of(Clumsy(2), staleness=1, start_step=2)
        again = AsCompleted(needs, cursor=first[1].cursor, recorded=recorded)
        return first, await train_on(again, start_step=2)

    first, again = asyncio.run(work())
    assert [draws_of([batch]) for batch in again[:3]] == [draws_of([batch]) for batch in first[2:]]
    assert sorted(draws_of(first[:2] + again)) == list(range(STEPS * PROMPTS))


def test_groups_without_signal_are_replaced_as_long_as_refills_last() -> None:
    async def work(max_refills: int) -> list[StepBatch]:
        clumsy = Clumsy(4, without_signal=0.4)
        needs = needs_of(clumsy, staleness=2, max_refills=max_refills)
        return await train_on(AsCompleted(needs, cursor=NOTHING_YET, recorded={}))

    has_signal = Clumsy(0, without_signal=0.4).has_signal
    batches = asyncio.run(work(20))
    assert all(has_signal(group) for batch in batches for group in batch.groups)
    assert sum(batch.num_refills for batch in batches) > 0
    assert all(len(batch.groups) == PROMPTS for batch in batches)
    draws = draws_of(asyncio.run(work(0)))
    assert sorted(draws) == list(range(STEPS * PROMPTS)), "without refills everything is trained on"


def test_a_group_is_as_old_as_its_oldest_row() -> None:
    branch = make_branch([4, 9], [True], seed=9)  # of version 0
    completion = make_episode([make_turn(2, 0)], seed=0, branches=[branch])
    newer = replace(completion, segments=(Segment(version=3, num_tokens=2),))

    async def work() -> int:
        supply = AsCompleted(needs_of(Clumsy(0), staleness=3), cursor=NOTHING_YET, recorded={})
        begun = Begun(draw=0, version=3)
        supply._note(begun, SuppliedGroup(group=episode_group([newer], [1.0]), from_journal=False))
        return begun.version

    assert asyncio.run(work()) == 0


def test_an_error_in_a_group_ends_the_supply() -> None:
    async def broken(step: int, draw: int) -> SuppliedGroup:
        raise ValueError(f"draw {draw} is broken")

    async def work() -> None:
        needs = needs_of(Clumsy(0), staleness=2)
        object.__setattr__(needs, "make", broken)
        await AsCompleted(needs, cursor=NOTHING_YET, recorded={}).run()

    with pytest.raises(ValueError, match="is broken"):
        asyncio.run(work())


def test_in_order_uses_what_was_left_pending_first() -> None:
    async def work() -> list[StepBatch]:
        cursor = Cursor(pending=(3, 7), next_draw=2 * PROMPTS)
        needs = needs_of(Clumsy(0), staleness=1, start_step=1)
        return await train_on(InOrder(needs, cursor=cursor), start_step=1, until=3)

    first, second = asyncio.run(work())
    assert [group.draw for group in first.groups] == [3, 7, 12, 13, 14, 15]
    assert [group.draw for group in second.groups] == list(range(16, 22))
    assert first.cursor == Cursor(pending=(), next_draw=16), "a step's cursor knows nothing of the steps ahead"


def test_a_group_that_could_not_come_later_is_waited_for() -> None:
    late, *others = (Begun(draw=draw, version=0) for draw in range(4))
    for place, item in enumerate(others):
        item.made, item.place = SuppliedGroup(group=make_group(1, item.draw), from_journal=False), place
    assert choose([late, *others], step=1, wanted=2, staleness=1) == [1, 2]
    assert choose([late, others[-1]], step=2, wanted=2, staleness=1) is None, "draw 0 is due in step 2"
    assert choose([late, others[-1]], step=2, wanted=1, staleness=2) == [3]


# Whole runs on stand-ins


def config_of(folder: Path, *, steps: int = STEPS, cluster: dict[str, Any] | None = None, **trainer: Any) -> Config:
    raw = {
        "run": {"dir": str(folder / "run"), "seed": 5},
        "data": {"val": None, "prompts_per_step": PROMPTS},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 8},
        "reward": [{"type": "exact"}],
        "trainer": {"steps": steps, "save_every": 2, "eval_every": 0, "loggers": [], **trainer},
    }
    return parse_config(raw | ({"cluster": cluster} if cluster else {}))


ROLLOUT = Pace(request_s=0.06, places=2, spread=2.0)
ACTOR = Pace(update_s=0.05)


def run(
    config: Config, *, rollouts: int = 3, rollout: Pace = ROLLOUT, actor: Pace = ACTOR, shared: bool = False
) -> Any:
    """A run on one node per rollout process and one for the actor, or with both roles in every process."""
    if shared:
        both = Pace(**{**_fields(rollout), "update_s": actor.update_s, "shares_policy": True})
        team = team_of([both] * rollouts, node_ranks=range(rollouts), actors=range(rollouts))
    else:
        paces = [rollout] * rollouts + [actor]
        team = team_of(paces, node_ranks=range(rollouts + 1), actors=[rollouts])
    workers = make_workers(config, team, prompts=10_000, room=4)
    run_steps(config, workers)
    stop(team)
    return workers


def _fields(pace: Pace) -> dict[str, Any]:
    return {name: getattr(pace, name) for name in pace.__slots__}


def trained_groups(config: Config) -> Iterator[tuple[int, Group]]:
    """What the journal says each step was trained on."""
    with Journal(config.run.dir / "journal") as journal:
        found = {group.draw: group for step in journal.steps() for group in journal.read(step)}
        for step, entry in sorted(journal.trained().items()):
            for draw in entry.draws:
                yield step, found[draw]


QUICK = [(ORDERS[0], True, 1, True), (ORDERS[1], False, 1, False)]


@pytest.mark.parametrize(
    ("order", "in_flight", "staleness", "shared"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(ORDERS, (True, False), (0, 1, 2), (True, False))
    ],
)
def test_no_token_is_trained_that_is_older_than_staleness_says(
    tmp_path: Path, order: str, in_flight: bool, staleness: int, shared: bool
) -> None:
    config = config_of(tmp_path, order=order, in_flight=in_flight, staleness=staleness)
    run(config, shared=shared)
    seen = list(trained_groups(config))
    assert sorted(group.draw for _, group in seen) == list(range(STEPS * PROMPTS)), "each draw once"
    lags: set[int] = set()
    num_segments: set[int] = set()
    for step, group in seen:
        for completion in group.completions:
            lags |= {step - 1 - segment.version for segment in completion.segments}
            num_segments.add(len(completion.segments))
    assert min(lags) >= 0 and max(lags) <= staleness
    if staleness:
        assert max(lags) >= 1, "rollout never ran ahead"
    if not in_flight or staleness == 0:
        assert num_segments == {1}, "a completion is of one version"
    elif not shared:
        assert max(num_segments) > 1, "no completion was carried over an update"


def test_rollout_goes_on_while_the_actor_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    update, append = StandIn.update, Journal.append

    def noted_update(self: StandIn, samples: Any) -> Any:
        events.append("update begins")
        result = update(self, samples)
        events.append("update ends")
        return result

    def noted_append(self: Journal, group: Group) -> None:
        events.append(f"group of step {group.step}")
        append(self, group)

    monkeypatch.setattr(StandIn, "update", noted_update)
    monkeypatch.setattr(Journal, "append", noted_append)
    run(config_of(tmp_path, staleness=1, steps=3), actor=Pace(update_s=0.5))
    first = events[events.index("update begins") : events.index("update ends")]
    assert "group of step 2" in first


def test_groups_name_their_maker_and_node_weights_say_how_many_it_makes(tmp_path: Path) -> None:
    config = config_of(tmp_path, cluster={"num_nodes": 4, "node_weights": [2, 1, 1, 5], "accelerator": "cpu"})
    run(config)
    made = Counter(group.worker for _, group in trained_groups(config))
    total = STEPS * PROMPTS
    assert made == {
        "rollout-0 on node 0": total // 2,
        "rollout-1 on node 1": total // 4,
        "rollout-2 on node 2": total // 4,
    }, "the actor's node has no rollout, so its weight counts for nothing"


@pytest.mark.slow
def test_seeds_do_not_depend_on_who_makes_a_group(tmp_path: Path) -> None:
    seeds = []
    for rollouts in (1, 4):
        config = config_of(tmp_path / str(rollouts), staleness=1)
        run(config, rollouts=rollouts)
        seeds.append({group.draw: [each.seed for each in group.completions] for _, group in trained_groups(config)})
    assert seeds[0] == seeds[1]


def test_a_straggler_counts_for_a_later_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker takes very long for everything: as they finish, its first group is not in the first step."""
    config = config_of(tmp_path, order="as_completed", staleness=2, steps=4)
    team = team_of([Pace(request_s=0.3), ROLLOUT, ROLLOUT, ACTOR], node_ranks=range(4), actors=[3])
    run_steps(config, make_workers(config, team, prompts=1000, room=4))
    stop(team)
    slow = [(step, group) for step, group in trained_groups(config) if group.worker == "rollout-0 on node 0"]
    assert any(step > group.draw // PROMPTS + 1 for step, group in slow)
    assert sorted(group.draw for _, group in trained_groups(config)) == list(range(4 * PROMPTS))


def test_an_error_of_the_actor_ends_the_run_while_rollouts_are_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: StandIn, samples: Any) -> Any:
        raise RuntimeError("the card fell off")

    monkeypatch.setattr(StandIn, "update", broken)
    with pytest.raises(RuntimeError, match="the card fell off"):
        run(config_of(tmp_path, staleness=2), rollout=Pace(request_s=0.05, places=1))


@pytest.mark.slow
def test_a_run_on_stand_ins_resumes_where_it_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, order="as_completed", staleness=2)
    update, num_updates = StandIn.update, 0

    def fails_once(self: StandIn, samples: Any) -> Any:
        nonlocal num_updates
        num_updates += 1
        if num_updates == 6:
            raise RuntimeError("the card fell off")
        return update(self, samples)

    monkeypatch.setattr(StandIn, "update", fails_once)
    with pytest.raises(RuntimeError, match="the card fell off"):
        run(config)
    before = {(step, group.draw) for step, group in trained_groups(config)}
    assert {step for step, _ in before} == {1, 2, 3, 4, 5}
    run(config)
    after = [(step, group.draw) for step, group in trained_groups(config)]
    assert before <= set(after) and sorted(draw for _, draw in after) == list(range(STEPS * PROMPTS))


# Whole local runs


def local(folder: Path, *overrides: str, name: str) -> Config:
    return make_run(folder, "trainer.steps=4", *overrides, name=name, rows=letter_rows(20))


def test_with_staleness_0_all_ways_are_the_synchronous_run(tmp_path: Path) -> None:
    plain = local(tmp_path, name="plain")
    finish(plain)
    for name, overrides in {
        "as-completed": ["trainer.order=as_completed"],
        "not-in-flight": ["trainer.in_flight=false"],
    }.items():
        other = local(tmp_path, *overrides, name=name)
        finish(other)
        for key, tensor in weights(plain).items():
            assert tensor.tobytes() == weights(other)[key].tobytes(), (name, key)


@pytest.mark.parametrize(
    "kill", [IN_JOURNAL, *(pytest.param(kill, marks=pytest.mark.slow) for kill in (IN_UPDATE, IN_SAVE_WRITE))]
)
def test_a_killed_run_that_trains_groups_as_they_finish_skips_none_and_repeats_none(tmp_path: Path, kill: str) -> None:
    config = local(tmp_path, "trainer.order=as_completed", "trainer.staleness=2", name="killed")
    when = {IN_UPDATE: Kill(call=kill, number=3), IN_JOURNAL: Kill(call=kill, number=20, when="torn")}
    run_and_be_killed(config, when.get(kill, Kill(call=kill, number=1, when="torn")))
    before = [(step, group.draw) for step, group in trained_groups(config)]
    finish(config)
    after = [(step, group.draw) for step, group in trained_groups(config)]
    assert set(before) <= set(after), "what was trained is trained on again as it was"
    assert sorted(draw for _, draw in after) == list(range(4 * 8))
    with Journal(config.run.dir / "journal") as journal:
        recorded = [group.draw for step in journal.steps() for group in journal.read(step)]
    assert sorted(recorded) == list(range(4 * 8)), "a finished group is not made again"


@pytest.mark.slow
def test_dynamic_sampling_works_with_groups_as_they_finish(tmp_path: Path) -> None:
    overrides = ("algorithm.name=dapo", "rollout.samples_per_prompt=2", "trainer.order=as_completed")
    config = local(tmp_path, *overrides, "trainer.staleness=2", name="dapo")
    finish(config)
    steps = Counter(step for step, _ in trained_groups(config))
    assert steps == dict.fromkeys(range(1, 5), 8)
    draws = [group.draw for _, group in trained_groups(config)]
    assert len(set(draws)) == len(draws)
