"""What every ``Engine`` must do, as tests. A test module imports all of it and gives one fixture, ``house``.

    pytest.register_assert_rewrite("generate_contract")
    from generate_contract import *

    @pytest.fixture
    def house(...) -> House: ...

Each test has one event loop. The cores are real and their models tiny.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from engine_contract import EOS, TOLERANCE, perturb, sampling
from tiny import random_prompts, reference_logprobs

from rollcall.base.types import Completion
from rollcall.engine.protocol import Engine, Made, Refused, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    make: Callable[[], Engine]  # in the event loop of the test
    model: Any  # that it samples from, once ``serve`` was called
    cores: Sequence[Any]


def ask(prompt: np.ndarray, *, name: str = "r", seed: int = 1, session: str | None = None, **changes: Any) -> Request:
    group = None if session else name.partition("/")[0]
    return Request(id=name, prompt_ids=prompt, seed=seed, sampling=sampling(**changes), group=group, session=session)


def group_of(prompt: np.ndarray, *, name: str = "g", count: int = 3, **changes: Any) -> list[Request]:
    return [ask(prompt, name=f"{name}/{place}", seed=100 + place, **changes) for place in range(count)]


def in_a_loop(house: House, work: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        engine = house.make()
        try:
            async with asyncio.timeout(600):
                await engine.serve(0)
                await work(engine)
        finally:
            await engine.close()

    asyncio.run(main())


async def started(engine: Engine, house: House, requests: Sequence[Request]) -> list[asyncio.Task[Made]]:
    """Tasks that wait for these, once each of them is being decoded."""
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    while sum(core.num_unfinished - core.num_waiting for core in house.cores) < len(requests):
        await asyncio.sleep(0.001)
    return tasks


def is_of(model: Any, request: Request, completion: Completion, *, start: int = 0, end: int | None = None) -> bool:
    """Whether the log-probs of these tokens are transformers' own."""
    expected = reference_logprobs(model, request.prompt_ids, completion.token_ids).numpy()
    return bool(np.abs(expected - completion.logprobs)[start:end].max() < TOLERANCE)


LONG: dict[str, Any] = dict(max_tokens=200, stop_token_ids=())


def test_each_who_asks_gets_the_completion_of_its_seed(house: House) -> None:
    async def work(engine: Engine) -> None:
        requests = [
            each for number, prompt in enumerate(random_prompts(3)) for each in group_of(prompt, name=str(number))
        ]
        together = await asyncio.gather(*map(engine.generate, requests))
        for request, made in zip(requests, together, strict=True):
            assert made.completion.seed == request.seed and is_of(house.model, request, made.completion) and made.worker
            alone = await engine.generate(request)
            assert alone.completion.token_ids.tolist() == made.completion.token_ids.tolist()
            assert made.completion.token_ids[-1] == EOS or len(made.completion.token_ids) == 20

    in_a_loop(house, work)


def test_to_cancel_is_to_abort(house: House) -> None:
    async def work(engine: Engine) -> None:
        requests = group_of(random_prompts(1)[0], **LONG)
        first, second, third = await started(engine, house, requests)
        first.cancel()
        second.cancel()
        done = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(one) for one in done] == [asyncio.CancelledError] * 2
        assert is_of(house.model, requests[2], (await third).completion)
        again = await engine.generate(requests[0])
        assert len(again.completion.token_ids) == 200, "the id is free again"
        assert not any(core.num_unfinished for core in house.cores)

    in_a_loop(house, work)


def test_a_request_that_cannot_be_computed_is_refused_by_itself(house: House) -> None:
    async def work(engine: Engine) -> None:
        (prompt,) = random_prompts(1)
        bad = [
            ask(prompt, name="long", max_tokens=5000),
            ask(np.array([5, 4000], dtype=np.int32), name="unknown"),
            ask(prompt[:0], name="empty"),
        ]
        good = group_of(prompt)
        found = await asyncio.gather(*map(engine.generate, [bad[0], *good, *bad[1:]]), return_exceptions=True)
        for made, request in zip(found[1:4], good, strict=True):
            assert isinstance(made, Made) and is_of(house.model, request, made.completion)
        refused = [found[0], *found[4:]]
        assert [type(one) for one in refused] == [Refused] * 3
        for one, why in zip(refused, ("5000 new", "has token 4000", "an empty prompt"), strict=True):
            assert why in str(one)

    in_a_loop(house, work)


def test_an_id_under_way_is_refused(house: House) -> None:
    async def work(engine: Engine) -> None:
        request = ask(random_prompts(1)[0], **LONG)
        (first,) = await started(engine, house, [request])
        with pytest.raises(Refused, match="'r' is already running"):
            await engine.generate(request)
        assert is_of(house.model, request, (await first).completion)

    in_a_loop(house, work)


def test_a_drain_waits_for_what_was_asked_for_and_holds_back_what_comes_later(house: House) -> None:
    async def work(engine: Engine) -> None:
        prompt, other = random_prompts(2)
        before = await started(engine, house, group_of(prompt, **LONG))
        pausing = asyncio.create_task(engine.pause(drain=True))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(engine.generate(ask(other, name="later", stop_token_ids=())))
        await pausing
        assert all(task.done() for task in before) and not later.done()
        assert not any(core.num_unfinished for core in house.cores)
        perturb(house.model, seed=3)
        await engine.serve(1)
        made = await later
        assert [segment.version for segment in made.completion.segments] == [1] and engine.version == 1
        assert is_of(house.model, ask(other), made.completion)
        assert {segment.version for task in before for segment in task.result().completion.segments} == {0}

    in_a_loop(house, work)


def test_nothing_decodes_between_a_pause_and_serve(house: House) -> None:
    """A completion goes on with the new weights, and says from where on."""

    async def work(engine: Engine) -> None:
        requests = group_of(random_prompts(1)[0], **LONG)
        tasks = await started(engine, house, requests)
        await engine.pause(drain=False)
        old = copy.deepcopy(house.model)
        steps: list[int] = []
        for core in house.cores:
            core.step = lambda step=core.step: steps.append(engine.version) or step()
        perturb(house.model, seed=4)
        await engine.pause(drain=False)
        late = asyncio.ensure_future(engine.generate(ask(random_prompts(1)[0], name="late")))
        await asyncio.sleep(0.1)
        assert not steps and not late.done() and not any(task.done() for task in tasks)
        await engine.serve(7)
        for request, made in zip(requests, await asyncio.gather(*tasks), strict=True):
            first, second = made.completion.segments
            assert (first.version, second.version) == (0, 7) and first.num_tokens + second.num_tokens == 200
            assert is_of(old, request, made.completion, end=first.num_tokens)
            assert is_of(house.model, request, made.completion, start=first.num_tokens)
        assert {segment.version for segment in (await late).completion.segments} == {7} and steps

    in_a_loop(house, work)


def test_turns_of_a_session_are_as_without(house: House) -> None:
    async def work(engine: Engine) -> None:
        async def talk(prompt: np.ndarray, session: str | None, number: int) -> list[list[int]]:
            turns: list[list[int]] = []
            if session:
                engine.begin_session(session)
            for turn in range(3):
                request = ask(prompt, name=f"{session}{number}-{turn}", seed=turn, session=session, stop_token_ids=())
                completion = (await engine.generate(request)).completion
                assert is_of(house.model, request, completion)
                turns.append(completion.token_ids.tolist())
                prompt = np.concatenate((prompt, completion.token_ids, prompt[:3]))
            if session:
                engine.end_session(session)
                engine.end_session(session)
            return turns

        prompts = random_prompts(4)
        kept = await asyncio.gather(*(talk(prompt, f"s{number}", number) for number, prompt in enumerate(prompts)))
        plain = await asyncio.gather(*(talk(prompt, None, number) for number, prompt in enumerate(prompts)))
        assert kept == plain

    in_a_loop(house, work)


def test_stats_are_those_since_they_were_taken(house: House) -> None:
    async def work(engine: Engine) -> None:
        engine.take_stats()
        await asyncio.gather(*map(engine.generate, group_of(random_prompts(1)[0], **LONG)))
        stats = engine.take_stats()
        assert stats.num_tokens == 600 and stats.busy_s > 0 and stats.num_preemptions == 0
        again = engine.take_stats()
        assert (again.num_tokens, again.busy_s) == (0, 0)

    in_a_loop(house, work)


def test_an_error_of_the_engine_reaches_all_who_wait_and_who_asks_later(house: House) -> None:
    async def work(engine: Engine) -> None:
        def broken() -> Any:
            raise RuntimeError("the card fell off")

        for core in house.cores:
            core.step = broken
        requests = group_of(random_prompts(1)[0])
        found = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        assert [str(one) for one in found] == ["the card fell off"] * 3
        with pytest.raises(RuntimeError, match="the card fell off"):
            await engine.generate(ask(random_prompts(1)[0], name="later"))

    in_a_loop(house, work)
