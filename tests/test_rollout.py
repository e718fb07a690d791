"""Rollouts: seeds as a pure function, groups made by a fake engine and a fake scorer, and what is kept of open groups."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from scored import made_of, make_group

from rollcall.base.types import Completion, Group, Prompt, Score
from rollcall.config import parse_config
from rollcall.engine.protocol import Made, Refused, Request, Sampling, Stats
from rollcall.loop.group_maker import GroupMaker, OpenGroups
from rollcall.loop.phases import Bounds
from rollcall.loop.rollout import Rewards, Rollouts, sampling_seeds
from rollcall.loop.tasks import all_of, in_thread

T = TypeVar("T")
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


class FakeEngine:
    """Ends every completion after a moment, the last that was asked for first."""

    version = 0
    moment_s = 0.02

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.num_running = 0

    async def generate(self, request: Request) -> Made:
        if request.seed == 666:
            raise Refused("this seed is refused")
        self.requests.append(request)
        self.num_running += 1
        try:
            await asyncio.sleep(self.moment_s / len(self.requests))
        finally:
            self.num_running -= 1
        return Made(completion=made_of(request.seed), worker=f"w{request.seed % 2}")

    async def pause(self, *, drain: bool) -> None:
        raise AssertionError("nobody pauses")

    async def serve(self, version: int) -> None:
        raise AssertionError("nobody updates")

    def begin_session(self, session: str) -> None:
        raise AssertionError("there are no sessions")

    def end_session(self, session: str) -> None:
        raise AssertionError("there are no sessions")

    def take_stats(self) -> Stats:
        return Stats(busy_s=0.0, num_tokens=0, num_preemptions=0)

    async def close(self) -> None:
        pass


class FakeScorer:
    """Scores a completion by its seed, some turns of the event loop after it was asked."""

    def __init__(self, *, delay: int = 3, sign: int = 1) -> None:
        self.delay, self.sign = delay, sign

    async def score(
        self, prompt: Prompt, completions: tuple[Completion, ...], *, ask_model: Any = None
    ) -> tuple[Score, ...]:
        for _turn in range(self.delay):
            await asyncio.sleep(0)
        values = [float(self.sign * completion.seed) for completion in completions]
        return tuple(Score(value=value, parts={"fake": value}, errors={}) for value in values)


def group(
    rollouts: Rollouts, name: str, *, seeds: tuple[int, ...], scorer: Any, draw: int = 0, **given: Any
) -> Coroutine[Any, Any, Group]:
    return rollouts.group(make_prompt(name), step=1, draw=draw, seeds=seeds, sampling=SAMPLING, scorer=scorer, **given)


def rollouts_of(engine: Any = None) -> Rollouts:
    return Rollouts(engine=engine or FakeEngine(), rewards=Rewards())


def drive(work: Coroutine[Any, Any, T]) -> T:
    async def main() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(main())


def test_a_group_brings_the_completions_and_their_scores() -> None:
    engine = FakeEngine()
    made = drive(group(rollouts_of(engine), "p", seeds=(4, 6, 5), scorer=FakeScorer(), draw=7))
    assert [completion.seed for completion in made.completions] == [4, 6, 5]
    assert [score.value for score in made.scores] == [4.0, 6.0, 5.0]
    assert made.started_s <= made.finished_s and made.worker == "w0", "who made most of it"
    assert [request.order for request in engine.requests] == [(1, 7, 0), (1, 7, 1), (1, 7, 2)]
    assert len({request.group for request in engine.requests}) == 1
    assert len({request.id for request in engine.requests}) == 3
    assert gc.get_freeze_count(), "the collector looks at all that is loaded again and again"


def test_groups_overlap_and_each_gets_its_own_from_its_own_scorer() -> None:
    plus, minus, engine = FakeScorer(), FakeScorer(sign=-1, delay=6), FakeEngine()

    async def work() -> list[Group]:
        rollouts = rollouts_of(engine)
        return await asyncio.gather(
            *(group(rollouts, f"p{i}", seeds=(i, i + 100), scorer=minus if i % 3 == 0 else plus) for i in range(1, 8))
        )

    made = drive(work())
    expected = [[sign * i, sign * (i + 100)] for i in range(1, 8) for sign in (-1 if i % 3 == 0 else 1,)]
    assert [[score.value for score in one.scores] for one in made] == expected
    assert len({request.group for request in engine.requests}) == 7


def test_what_an_earlier_process_has_made_is_not_asked_for_again() -> None:
    engine, done = FakeEngine(), {1: made_of(5)}
    made = drive(group(rollouts_of(engine), "p", seeds=(4, 5, 6), scorer=FakeScorer(), done=done))
    assert [request.seed for request in engine.requests] == [4, 6]
    assert [request.order[2] for request in engine.requests] == [0, 2]
    assert [completion.seed for completion in made.completions] == [4, 5, 6] and len(done) == 3
    nothing, everything = FakeEngine(), {place: made_of(seed) for place, seed in enumerate((4, 5))}
    made = drive(group(rollouts_of(nothing), "p", seeds=(4, 5), scorer=FakeScorer(), done=everything))
    assert nothing.requests == [] and [score.value for score in made.scores] == [4.0, 5.0]


def test_a_refused_request_fails_its_group_alone_and_ends_the_rest_of_it() -> None:
    engine, scorer = FakeEngine(), FakeScorer()

    async def work() -> Group:
        rollouts = rollouts_of(engine)
        good = asyncio.create_task(group(rollouts, "good", seeds=(1,), scorer=scorer))
        with pytest.raises(Refused, match="this seed is refused"):
            await group(rollouts, "bad", seeds=(1, 2, 666, 3), scorer=scorer)
        await asyncio.sleep(0)
        assert engine.num_running <= 1, "nobody waits for the rest of the group"
        return await good

    assert drive(work()).scores[0].value == 1.0


def test_a_cancelled_group_ends_its_requests_and_no_others() -> None:
    engine, scorer = FakeEngine(), FakeScorer(delay=5)
    engine.moment_s = 3.0

    async def work() -> Group:
        rollouts = rollouts_of(engine)
        gone = asyncio.create_task(group(rollouts, "gone", seeds=(1, 3), scorer=scorer))
        kept = asyncio.create_task(group(rollouts, "kept", seeds=(2,), scorer=scorer))
        await asyncio.sleep(0.001)
        gone.cancel()
        await asyncio.wait({gone})
        await asyncio.sleep(0)
        assert engine.num_running == 1 and gone.cancelled()
        return await kept

    assert drive(work()).scores[0].value == 2.0


def test_the_time_of_the_rewards_is_that_in_which_nothing_is_generated() -> None:
    class Slow(FakeScorer):
        async def score(self, *given: Any, **named: Any) -> tuple[Score, ...]:
            await asyncio.sleep(0.05)
            return await super().score(*given, **named)

    async def work() -> tuple[float, float, float]:
        rewards, scorer, given = Rewards(), Slow(), (make_prompt("p"), (made_of(3),))
        await rewards.score(scorer, *given)  # type: ignore[arg-type]
        alone, nothing = rewards.take_seconds(), rewards.take_seconds()
        with rewards.generating():
            await rewards.score(scorer, *given)  # type: ignore[arg-type]
        return alone, nothing, rewards.take_seconds()

    alone, nothing, meanwhile = drive(work())
    assert alone > 0 and (nothing, meanwhile) == (0, 0)


def test_a_reward_that_fails_fails_its_group() -> None:
    class Broken(FakeScorer):
        async def score(self, *given: Any, **named: Any) -> tuple[Score, ...]:
            raise RuntimeError("the judge is gone")

    with pytest.raises(RuntimeError, match="the judge is gone"):
        drive(group(rollouts_of(), "p", seeds=(1,), scorer=Broken()))


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_model_in_another_process_is_asked_in_a_thread_and_one_here_in_the_event_loop(is_remote: bool) -> None:
    class Asks(FakeScorer):
        async def score(self, prompt: Any, completions: Any, *, ask_model: Any = None) -> tuple[Score, ...]:
            threads.append(await ask_model(threading.current_thread) if ask_model else threading.current_thread())
            return await super().score(prompt, completions)

    threads: list[threading.Thread] = []
    scorer: Any = Asks()
    drive(Rewards(is_remote=is_remote).score(scorer, make_prompt("p"), (made_of(3),)))
    assert (threads[0] is not threading.main_thread()) == is_remote


# Open groups


def test_what_has_ended_of_open_groups_is_written_once_and_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.loop.group_maker.KEEP_EVERY_S", 0.02)
    writes: list[list[tuple[int, Group]]] = []

    async def write(attempts: list[tuple[int, Group]]) -> None:
        writes.append(attempts)

    async def work() -> None:
        open_groups = OpenGroups(write)
        running = asyncio.create_task(open_groups.run())
        dones: list[dict[int, Completion]] = [{0: made_of(4)}, {}, {}]
        for draw, done in enumerate(dones):
            open_groups.open(make_prompt(f"p{draw}"), step=1, draw=draw, done=done)
        await asyncio.sleep(0.05)
        assert writes == [], "what an earlier process has made is written already"
        dones[0][2], dones[1][1], dones[2][0] = made_of(6), made_of(7), made_of(8)
        open_groups.close(step=1, draw=2)
        while not writes:
            await asyncio.sleep(0.01)
        dones[1][0] = broken = made_of(9)
        broken.logprobs[0] = np.nan
        dones[1][2] = made_of(10)
        running.cancel()
        await asyncio.wait({running})

    drive(work())
    found = [[(one.draw, place, one.completions[0].seed) for place, one in attempts] for attempts in writes]
    assert found == [[(0, 2, 6), (1, 1, 7)], [(1, 2, 10)]], (
        "also what ended since the last write, and nothing that is not finite"
    )


def test_groups_that_wait_for_a_slow_disk_when_the_attempt_ends_are_written() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    written: list[int] = []
    kept: list[tuple[int, int]] = []

    class SlowJournal:
        trained = dict
        read = read_attempts = staticmethod(lambda step: {})

        def append(self, group: Group) -> None:
            begun.set()
            assert goes_on.wait(60)
            written.append(group.draw)

        def append_attempts(self, attempts: list[tuple[int, Group]]) -> None:
            kept.extend((group.draw, place) for place, group in attempts)

    async def group(prompt: Prompt, *, step: int, draw: int, seeds: Any, done: Any, **_: Any) -> Group:
        done.update({place: made_of(seed) for place, seed in enumerate(seeds)})
        return replace(make_group(draw, step=step), completions=tuple(done.values()))

    config = parse_config({"rollout": {"samples_per_prompt": 2}, "reward": [{"type": "exact"}]})
    train = SimpleNamespace(prompts=[make_prompt(str(draw)) for draw in range(3)])
    stubs: Any = SimpleNamespace(
        workers=SimpleNamespace(train=train, scorer=None, stop_token_ids=()),
        rollouts=SimpleNamespace(group=group),
        journal=SlowJournal(),
    )

    async def work() -> None:
        maker = GroupMaker(
            config, stubs.workers, bounds=Bounds(), journal=stubs.journal, rollouts=stubs.rollouts, call=in_thread
        )
        keeping = asyncio.create_task(maker.open_groups.run())
        makes = [asyncio.create_task(maker.make(1, draw)) for draw in range(3)]
        await in_thread(begun.wait, 60)
        for task in (*makes, keeping):
            task.cancel()
        await asyncio.wait({*makes, keeping})
        goes_on.set()

    drive(work())
    assert {draw for draw in range(3) if {(draw, 0), (draw, 1)} <= {*kept}} | {*written} == {0, 1, 2}


def test_an_error_while_a_result_is_kept_ends_the_wait() -> None:
    async def result() -> int:
        return 1

    def keep(key: int, result: int) -> None:
        raise KeyError("no place for it")

    with pytest.raises(KeyError, match="no place for it"):
        drive(asyncio.wait_for(all_of({0: result(), 1: result()}, keep), timeout=60))
