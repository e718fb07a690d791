"""The ticker: the contract of an engine over the native core, and which turns it decodes together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

pytest.register_assert_rewrite("generate_contract")

from generate_contract import *  # noqa: F403
from generate_contract import House, ask
from scored import made_of
from tiny import make_model, make_tokenizer, random_prompts

from rollcall.base.types import Completion
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.protocol import Engine, Request
from rollcall.engine.ticker import Ticker
from rollcall.model.decoder import fuse_parameters


@pytest.fixture
def house() -> House:
    model = make_model()
    fuse_parameters(model)
    core = NativeEngine(model, make_tokenizer(), max_running=16, kv_tokens=None)
    return House(make=lambda: Ticker(core, max_running=16), model=model, cores=[core])


class AllAtOnce:
    """Ends everything that it has with each step."""

    version = num_preemptions = num_waiting = 0

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.batches: list[int] = []

    @property
    def num_unfinished(self) -> int:
        return len(self.requests)

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def step(self) -> dict[str, Completion]:
        time.sleep(0.002)
        self.batches.append(len(self.requests))
        done, self.requests = self.requests, []
        return {one.id: made_of(one.seed) for one in done}

    def abort(self, request_id: str) -> None:
        self.requests = [one for one in self.requests if one.id != request_id]

    def settle(self) -> None:
        pass

    def update_weights(self, version: int) -> None:
        self.version = version

    def end_session(self, session: str) -> None:
        pass

    def close(self) -> None:
        pass


def drive(core: Any, work: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await work(Ticker(core, max_running=8))

    asyncio.run(main())


async def turn(engine: Engine, session: str, number: int = 0) -> None:
    await engine.generate(ask(random_prompts(1)[0], name=f"{session}-{number}", session=session))


@pytest.mark.parametrize("pause", [{"QUIET_S": 2.0}, {"QUIET_S": 0.0, "QUIET_SHARE": 1e3}], ids=["fixed", "share"])
def test_turns_that_environments_bring_back_are_decoded_together(
    monkeypatch: pytest.MonkeyPatch, pause: dict[str, float]
) -> None:
    for name, value in ({"GATHER_SHARE": 1e9} | pause).items():
        monkeypatch.setattr(f"rollcall.engine.ticker.{name}", value)
    core = AllAtOnce()

    async def episode(engine: Engine, number: int) -> None:
        for place in range(3):
            await turn(engine, str(number), place)
            if place < 2:
                await asyncio.sleep(0.005 * number)  # each environment takes its own time

    async def work(engine: Engine) -> None:
        await asyncio.gather(*(episode(engine, number) for number in range(4)))

    drive(core, work)
    assert len(core.batches) <= 3 and sum(core.batches) == 12


def test_episodes_that_begin_one_after_the_other_are_decoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a time in which none of them had anything to sample."""
    monkeypatch.setattr("rollcall.engine.ticker.FIRST_QUIET_S", 2.0)
    monkeypatch.setattr("rollcall.engine.ticker.FIRST_GATHER_S", 0.5)
    core = AllAtOnce()

    async def episode(engine: Engine, number: int) -> None:
        for place in range(2):
            await asyncio.sleep(0.3 * place + 0.01 * number)
            await turn(engine, str(number), place)

    async def work(engine: Engine) -> None:
        await asyncio.gather(*(episode(engine, number) for number in range(4)))

    drive(core, work)
    assert core.batches == [4, 4]


@pytest.mark.parametrize(("num_turns", "are_episodes", "expected"), [(3, True, 3), (8, False, 8)])
def test_first_turns_are_waited_for_until_there_is_one_of_each_episode_or_for_each_row(
    num_turns: int, are_episodes: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.engine.ticker.FIRST_QUIET_S", 60.0)  # so that only their number can end the wait
    monkeypatch.setattr("rollcall.engine.ticker.FIRST_GATHER_S", 60.0)
    core = AllAtOnce()

    async def one(engine: Engine, place: int) -> None:
        if are_episodes:
            engine.begin_session(str(place))
        await asyncio.sleep(0.02 * place)
        await turn(engine, str(place))
        engine.end_session(str(place))

    async def work(engine: Engine) -> None:
        await asyncio.gather(*(one(engine, place) for place in range(num_turns)))

    drive(core, work)
    assert core.batches[0] == expected and sum(core.batches) == num_turns


def test_all_completions_of_a_moment_are_decoded_together_and_an_idle_engine_is_left_alone() -> None:
    core = AllAtOnce()

    async def work(engine: Engine) -> None:
        for count in (7, 1):
            await asyncio.gather(*(engine.generate(ask(random_prompts(1)[0], name=str(n))) for n in range(count)))
            await asyncio.sleep(0.02)

    drive(core, work)
    assert core.batches == [7, 1]


def test_a_ticker_ends_in_the_moment_in_which_a_turn_comes() -> None:
    class Busy(AllAtOnce):
        def step(self) -> dict[str, Completion]:
            return {}

    async def work(engine: Engine) -> None:
        turns = [asyncio.create_task(turn(engine, "s"))]
        for _ in range(3):
            await asyncio.sleep(0)  # it waits for more turns now
        task = engine._task  # type: ignore[attr-defined]
        turns.append(asyncio.create_task(turn(engine, "t")))
        await engine.close()
        done, _ = await asyncio.wait({task}, timeout=10)
        for each in turns:
            each.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        assert done

    drive(Busy(), work)
