"""Rollouts: seeds as a pure function, and attempts driven through a fake engine and a fake scorer."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from rollcall.engine.protocol import Ended, Finished, Request, Sampling
from rollcall.loop.rollout import Rollouts, sampling_seeds
from rollcall.types import Completion, FinishReason, Group, Prompt, Score, Segment

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, stop_token_ids=(0,), stop_strings=())


def test_seeds_are_a_pure_function_of_run_step_prompt_and_attempt() -> None:
    assert sampling_seeds(0, 1, "p", 4) == sampling_seeds(0, 1, "p", 4)
    assert sampling_seeds(0, 1, "p", 2) == sampling_seeds(0, 1, "p", 4)[:2], (
        "a larger group has the same first attempts"
    )
    others = [sampling_seeds(1, 1, "p", 4), sampling_seeds(0, 2, "p", 4), sampling_seeds(0, 1, "q", 4)]
    assert len({seed for seeds in (sampling_seeds(0, 1, "p", 4), *others) for seed in seeds}) == 16


def test_seeds_are_the_same_in_another_process() -> None:
    code = "from rollcall.loop.rollout import sampling_seeds; print(sampling_seeds(3, 14, 'row-15', 3))"
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "92"}
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert result.stdout.strip() == str(sampling_seeds(3, 14, "row-15", 3))


def test_seeds_are_signed_64_bit_numbers() -> None:
    seeds = sampling_seeds(0, 0, "p", 500)
    assert min(seeds) < 0 < max(seeds) and all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == 500


def make_prompt(name: str) -> Prompt:
    return Prompt(id=name, token_ids=np.array([5, 6], dtype=np.int32), text=name, answer="7", metadata={})


def make_completion(seed: int, *, num_tokens: int = 2) -> Completion:
    return Completion(
        token_ids=np.full(num_tokens, 9, dtype=np.int32),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        mask=np.ones(num_tokens, dtype=np.bool_),
        segments=(Segment(version=0, num_tokens=num_tokens),),
        finish=FinishReason.STOP,
        seed=seed,
        text=str(seed),
        episode=None,
    )


def attempt(rollouts: Rollouts, name: str, *, seeds: tuple[int, ...], scorer: Any) -> Awaitable[Group]:
    return rollouts.attempt(make_prompt(name), step=1, draw=0, seeds=seeds, sampling=SAMPLING, scorer=scorer)


class FakeEngine:
    """Finishes one request per poll, the newest first."""

    version = 0

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.num_polls = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.requests)

    def submit(self, request: Request) -> None:
        if len(request.seeds) > 3:
            raise ValueError("too many seeds")
        self.requests.append(request)

    def poll(self) -> list[Finished]:
        assert self.requests, "polled with nothing to do"
        self.num_polls += 1
        request = self.requests.pop()
        completions = tuple(make_completion(seed) for seed in request.seeds)
        return [Finished(request_id=request.id, completions=completions)]

    def take_ended(self) -> list[Ended]:
        return []

    def abort(self, request_id: str) -> None:
        raise AssertionError("nobody aborts")

    def update_weights(self, version: int) -> None:
        raise AssertionError("nobody updates")

    def end_session(self, session: str) -> None:
        raise AssertionError("there are no sessions")


class FakeScorer:
    """Scores a completion by its seed, some turns of the event loop after it was asked."""

    asks_models = False

    def __init__(self, *, delay: int = 3, sign: int = 1) -> None:
        self.delay, self.sign = delay, sign

    async def score(self, prompt: Prompt, completions: tuple[Completion, ...], **_: Any) -> tuple[Score, ...]:
        for _turn in range(self.delay):
            await asyncio.sleep(0)
        return tuple(self._score(completion) for completion in completions)

    def _score(self, completion: Completion) -> Score:
        value = float(self.sign * completion.seed)
        return Score(value=value, parts={"fake": value}, errors={})


def drive(work: Callable[[Rollouts], Awaitable[Any]], engine: Any) -> Any:
    """Run ``work`` beside the pump; a pump that ends or raises fails the test."""

    async def main() -> Any:
        rollouts = Rollouts(engine, max_running=8)
        pump = asyncio.create_task(rollouts.pump())
        task = asyncio.ensure_future(work(rollouts))
        done, _ = await asyncio.wait({pump, task}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if pump in done:
            pump.result()
        assert task in done, "the attempts did not end"
        pump.cancel()
        return task.result()

    return asyncio.run(main())


def test_an_attempt_brings_the_completions_and_their_scores() -> None:
    async def work(rollouts: Rollouts) -> Group:
        return await attempt(rollouts, "p", seeds=(4, 5), scorer=FakeScorer())

    group = drive(work, FakeEngine())
    assert [completion.seed for completion in group.completions] == [4, 5]
    assert [score.value for score in group.scores] == [4.0, 5.0]
    assert group.started_s <= group.finished_s


class OneByOne(FakeEngine):
    """Ends one completion of its oldest request with each poll."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[Ended] = []
        self.made: list[Completion] = []
        self.asked: list[tuple[int, ...]] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.asked.append(request.seeds)

    def poll(self) -> list[Finished]:
        (request,) = self.requests
        place = len(self.made)
        self.made.append(make_completion(request.seeds[place]))
        if len(self.made) == len(request.seeds):
            self.requests = []
            return [Finished(request_id=request.id, completions=tuple(self.made))]
        self.ended.append(Ended(request_id=request.id, place=place, completion=self.made[-1]))
        time.sleep(0.005)
        return []

    def take_ended(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended


def test_what_has_ended_is_kept_while_the_group_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.loop.rollout.KEEP_EVERY_S", 0.001)
    kept: dict[int, Group] = {}

    async def keep(place: int, group: Group) -> None:
        assert place not in kept
        kept[place] = group

    scorer: Any = FakeScorer()

    async def work(rollouts: Rollouts, seeds: tuple[int, ...], earlier: dict[int, Completion]) -> Group:
        return await rollouts.attempt(
            make_prompt("p"),
            step=1,
            draw=7,
            seeds=seeds,
            sampling=SAMPLING,
            scorer=scorer,
            earlier=earlier,
            keep=keep,
        )

    engine = OneByOne()
    earlier = {1: make_completion(5)}
    group = drive(lambda rollouts: work(rollouts, (4, 5, 6, 7, 8, 9), earlier), engine)
    assert engine.asked == [(4, 6, 7, 8, 9)], "what an earlier process has made is not asked for again"
    assert [completion.seed for completion in group.completions] == [4, 5, 6, 7, 8, 9]
    assert 0 in kept and 1 not in kept and 5 not in kept
    assert all(one.draw == 7 and one.completions[0].seed == 4 + place for place, one in kept.items())
    nothing = OneByOne()
    everything = {place: make_completion(seed) for place, seed in enumerate((4, 5))}
    group = drive(lambda rollouts: work(rollouts, (4, 5), everything), nothing)
    assert nothing.asked == [] and [score.value for score in group.scores] == [4.0, 5.0]


def test_attempts_overlap_and_each_gets_its_own() -> None:
    engine, scorer = FakeEngine(), FakeScorer()

    async def work(rollouts: Rollouts) -> list[Group]:
        return await asyncio.gather(
            *(attempt(rollouts, f"p{i}", seeds=(i, i + 100), scorer=scorer) for i in range(1, 8))
        )

    attempts = drive(work, engine)
    assert [[score.value for score in attempt.scores] for attempt in attempts] == [[i, i + 100] for i in range(1, 8)]
    assert engine.num_polls == 7


def test_two_scorers_are_served_at_once() -> None:
    plus, minus = FakeScorer(), FakeScorer(sign=-1, delay=6)

    async def work(rollouts: Rollouts) -> list[Group]:
        return await asyncio.gather(
            *(attempt(rollouts, "p", seeds=(3,), scorer=scorer) for scorer in (plus, minus, plus))
        )

    assert [attempt.scores[0].value for attempt in drive(work, FakeEngine())] == [3.0, -3.0, 3.0]


def test_a_reward_that_fails_fails_its_attempt() -> None:
    class Broken(FakeScorer):
        async def score(self, *_: Any, **__: Any) -> tuple[Score, ...]:
            raise RuntimeError("the judge is gone")

    async def work(rollouts: Rollouts) -> Group:
        return await attempt(rollouts, "p", seeds=(1,), scorer=Broken())

    with pytest.raises(RuntimeError, match="the judge is gone"):
        drive(work, FakeEngine())


def test_a_refused_request_fails_its_attempt_alone() -> None:
    scorer = FakeScorer()

    async def work(rollouts: Rollouts) -> tuple[Any, Any]:
        return tuple(
            await asyncio.gather(
                attempt(rollouts, "bad", seeds=(1, 2, 3, 4), scorer=scorer),
                attempt(rollouts, "good", seeds=(1,), scorer=scorer),
                return_exceptions=True,
            )
        )  # type: ignore[return-value]

    bad, good = drive(work, FakeEngine())
    assert isinstance(bad, ValueError) and "too many seeds" in str(bad)
    assert good.scores[0].value == 1.0


class AllAtOnce(FakeEngine):
    """Ends everything that it has with each poll."""

    def poll(self) -> list[Finished]:
        time.sleep(0.002)
        self.num_polls += 1
        done, self.requests = self.requests, []
        return [Finished(request_id=one.id, completions=(make_completion(one.seeds[0]),)) for one in done]

    def end_session(self, session: str) -> None:
        pass


@pytest.mark.parametrize("pause", [{"QUIET_S": 2.0}, {"QUIET_S": 0.0, "QUIET_SHARE": 1e3}], ids=["fixed", "share"])
def test_turns_that_environments_bring_back_are_decoded_together(
    monkeypatch: pytest.MonkeyPatch, pause: dict[str, float]
) -> None:
    for name, value in ({"GATHER_SHARE": 1e9} | pause).items():
        monkeypatch.setattr(f"rollcall.loop.rollout.{name}", value)
    engine = AllAtOnce()

    async def episode(rollouts: Rollouts, number: int) -> None:
        for turn in range(3):
            await rollouts.sample(make_prompt("p").token_ids, seed=turn, sampling=SAMPLING, session=str(number))
            if turn < 2:
                await asyncio.sleep(0.005 * number)  # each environment takes its own time

    async def work(rollouts: Rollouts) -> None:
        await asyncio.gather(*(episode(rollouts, number) for number in range(4)))
        await attempt(rollouts, "p", seeds=(1,), scorer=FakeScorer(delay=1))

    drive(work, engine)
    assert engine.num_polls <= 3 + 1


def test_episodes_that_begin_one_after_the_other_are_decoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a time in which none of them had anything to sample."""
    monkeypatch.setattr("rollcall.loop.rollout.FIRST_QUIET_S", 2.0)
    monkeypatch.setattr("rollcall.loop.rollout.FIRST_GATHER_S", 0.5)
    engine = AllAtOnce()

    async def episode(rollouts: Rollouts, number: int) -> None:
        for turn in range(2):
            await asyncio.sleep(0.3 * turn + 0.01 * number)
            await rollouts.sample(make_prompt("p").token_ids, seed=turn, sampling=SAMPLING, session=str(number))

    async def work(rollouts: Rollouts) -> None:
        await asyncio.gather(*(episode(rollouts, number) for number in range(4)))

    drive(work, engine)
    assert engine.num_polls == 2


def test_a_refused_turn_fails_its_episode_with_the_engines_words() -> None:
    class Small(FakeEngine):
        def submit(self, request: Request) -> None:
            raise ValueError("needs 1028 positions; the model has 1024")

    async def work(rollouts: Rollouts) -> None:
        await rollouts.sample(make_prompt("p").token_ids, seed=1, sampling=SAMPLING, session="one")

    with pytest.raises(ValueError, match="1028 positions"):
        drive(work, Small())


def test_a_cancelled_attempt_does_not_stop_the_others() -> None:
    scorer = FakeScorer(delay=5)

    async def work(rollouts: Rollouts) -> Group:
        first = asyncio.ensure_future(attempt(rollouts, "gone", seeds=(1,), scorer=scorer))
        await asyncio.sleep(0)
        first.cancel()
        return await attempt(rollouts, "kept", seeds=(2,), scorer=scorer)

    assert drive(work, FakeEngine()).scores[0].value == 2.0


def test_the_pump_sleeps_without_work_and_wakes_again() -> None:
    engine, scorer = FakeEngine(), FakeScorer(delay=1)

    async def work(rollouts: Rollouts) -> list[float]:
        values: list[float] = []
        for seed in (1, 2):
            group = await attempt(rollouts, "p", seeds=(seed,), scorer=scorer)
            values.append(group.scores[0].value)
            await asyncio.sleep(0)
            polls = engine.num_polls
            for _ in range(50):
                await asyncio.sleep(0)
            assert engine.num_polls == polls, "nothing is polled while nothing is under way"
        return values

    assert drive(work, engine) == [1.0, 2.0]


def test_the_clock_counts_tokens_and_starts_over_when_taken() -> None:
    async def work(rollouts: Rollouts) -> tuple[int, int]:
        await attempt(rollouts, "p", seeds=(1, 2, 3), scorer=FakeScorer())
        return rollouts.clock.take().engine_tokens, rollouts.clock.take().engine_tokens

    assert drive(work, FakeEngine()) == (6, 0)


def test_an_error_of_the_engine_reaches_whoever_runs_the_pump() -> None:
    class Broken(FakeEngine):
        def poll(self) -> list[Finished]:
            raise RuntimeError("the card fell off")

    async def work(rollouts: Rollouts) -> Group:
        return await attempt(rollouts, "p", seeds=(1,), scorer=FakeScorer())

    with pytest.raises(RuntimeError, match="the card fell off"):
        drive(work, Broken())


def test_a_pump_ends_also_when_work_comes_in_the_moment_in_which_it_is_cancelled() -> None:
    class Busy(FakeEngine):
        def poll(self) -> list[Finished]:
            return []

    async def main() -> bool:
        rollouts = Rollouts(Busy(), max_running=8)
        pump = asyncio.create_task(rollouts.pump())
        turns = [asyncio.create_task(rollouts.sample(np.ones(3, np.int32), seed=0, sampling=SAMPLING, session="s"))]
        for _ in range(3):
            await asyncio.sleep(0)  # it waits for more turns now
        rollouts._work.set()
        pump.cancel()
        done, _ = await asyncio.wait({pump}, timeout=10)
        for task in (pump, *turns):
            task.cancel()
        return bool(done)

    assert asyncio.run(main())


class Batches(FakeEngine):
    """Finishes all that it has with each poll."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def poll(self) -> list[Finished]:
        self.batches.append(len(self.requests))
        requests, self.requests = self.requests, []
        return [Finished(request_id=one.id, completions=(make_completion(one.seeds[0]),)) for one in requests]


@pytest.mark.parametrize(("num_turns", "are_episodes", "expected"), [(3, True, 3), (8, False, 8)])
def test_first_turns_are_waited_for_until_there_is_one_of_each_episode_or_for_each_row(
    num_turns: int, are_episodes: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.loop.rollout.FIRST_QUIET_S", 60.0)  # so that only their number can end the wait
    monkeypatch.setattr("rollcall.loop.rollout.FIRST_GATHER_S", 60.0)
    engine = Batches()

    async def one(rollouts: Rollouts, place: int) -> None:
        with rollouts.playing() if are_episodes else nullcontext():
            await asyncio.sleep(0.02 * place)
            await rollouts.sample(np.ones(3, np.int32), seed=0, sampling=SAMPLING, session="s")

    async def work(rollouts: Rollouts) -> None:
        await asyncio.gather(*(one(rollouts, place) for place in range(num_turns)))

    drive(work, engine)
    assert engine.batches[0] == expected and sum(engine.batches) == num_turns
    assert gc.get_freeze_count(), "the collector looks at all that is loaded again and again"
