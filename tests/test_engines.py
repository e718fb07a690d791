"""The engines of several processes as one: the contract of an engine, with native cores in threads in place of processes."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("generate_contract")

from generate_contract import *  # noqa: F403
from generate_contract import House, group_of, in_a_loop, is_of, started
from learners import count_fills
from tiny import make_model, make_tokenizer, random_prompts

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks' stand-ins

from benchmarks.standins import ThreadGroup
from rollcall.base.errors import WorkerDiedError
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.protocol import Engine, Request
from rollcall.engine.ticker import Exchanged, exchange
from rollcall.model.decoder import fuse_parameters
from rollcall.plan.placement import Role
from rollcall.run.engines import Engines
from rollcall.run.team import Team

NUM_ROLLOUTS, ROOM = 2, 4


class Process:
    """A process with a core that reads the model of the test, which its learner trains."""

    def __init__(self, model: Any, one: threading.Lock) -> None:
        self.model = model
        self.core = NativeEngine(model, make_tokenizer(), max_running=ROOM, kv_tokens=None)
        self.asked: list[list[str]] = []  # the new requests of each call
        self.is_dead = False
        self._one = one  # decodes at a time: they share the model

    def is_alive(self) -> bool:
        return not self.is_dead

    def exchange(
        self, new: Sequence[Request], cancelled: Sequence[str], ended_sessions: Sequence[str], look_s: float
    ) -> Exchanged:
        if new:
            self.asked.append([request.id for request in new])
        with self._one:
            answer = exchange(self.core, new, cancelled, ended_sessions, look_s=look_s)
        if self.is_dead:
            raise WorkerDiedError("rank 0 is dead", role="rollout", ranks=[0], node_ranks=[0])
        return answer

    def invite(self, receivers: Mapping[str, bool], host: str) -> dict[str, Any]:
        return dict.fromkeys(receivers)

    def send_weights(self, version: int) -> None:
        """The model is shared."""

    def use_weights(self, version: int, name: str, invitations: Any) -> None:
        self.core.update_weights(version)


@pytest.fixture
def processes() -> list[Process]:
    model, one = make_model(), threading.Lock()
    fuse_parameters(model)
    return [Process(model, one) for _ in range(NUM_ROLLOUTS + 1)]  # the last is the actor


def engines_of(processes: list[Process], **options: Any) -> Engines:
    group: Any = ThreadGroup(processes, node_ranks=[0] * len(processes))  # type: ignore[arg-type]
    team = Team(group=group, members={Role.ROLLOUT: list(range(NUM_ROLLOUTS)), Role.ACTOR: [NUM_ROLLOUTS]})
    return Engines(team, room=ROOM, node_weights=None, **options)


@pytest.fixture
def house(processes: list[Process]) -> House:
    cores = [process.core for process in processes[:NUM_ROLLOUTS]]
    return House(make=lambda: engines_of(processes), model=processes[0].model, cores=cores)


def test_a_group_goes_to_one_process_in_one_call_which_computes_its_prompt_once(
    house: House, processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, filled = random_prompts(2, lengths=(70, 80)), count_fills(monkeypatch)

    async def work(engine: Engine) -> None:
        requests = [each for number, prompt in enumerate(prompts) for each in group_of(prompt, name=f"g{number}")]
        await asyncio.gather(*map(engine.generate, requests))

    in_a_loop(house, work)
    asked = [call for process in processes for call in process.asked]
    assert sorted(asked) == [[f"g{number}/{place}" for place in range(3)] for number in range(2)]
    assert sum(filled) == sum(len(prompt) - 1 for prompt in prompts)


def test_what_a_lost_process_had_finished_is_not_generated_again(processes: list[Process]) -> None:
    never = threading.Event()
    (prompt,) = random_prompts(1)
    short = group_of(prompt, count=2, max_tokens=4, stop_token_ids=())
    long = group_of(prompt, name="g", count=4, max_tokens=240, stop_token_ids=())[2:]
    house = House(
        make=lambda: engines_of(processes, replaceable=[0, 1], replace=lambda worker: never.wait() and None),
        model=processes[0].model,
        cores=[process.core for process in processes[:NUM_ROLLOUTS]],
    )

    async def work(engine: Engine) -> None:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in (*short, *long)]
        made = await asyncio.gather(*tasks[:2])
        (lost,) = [process for process in processes if process.asked]
        (other,) = [process for process in processes[:NUM_ROLLOUTS] if process is not lost]
        lost.is_dead = True
        made += await asyncio.gather(*tasks[2:])
        assert lost.asked == [[request.id for request in (*short, *long)]]
        assert other.asked == [[request.id for request in long]]
        for request, one in zip((*short, *long), made, strict=True):
            assert one.completion.seed == request.seed and is_of(house.model, request, one.completion)
        assert [one.worker for one in made] == ["rollout-0 on node 0"] * 2 + ["rollout-1 on node 0"] * 2

    in_a_loop(house, work)
    never.set()


def test_what_is_cancelled_before_it_went_out_never_starts(house: House, processes: list[Process]) -> None:
    """A process aborts before it submits, so one call must not bring a request and its end."""
    prompts = random_prompts(3)

    async def work(engine: Engine) -> None:
        with processes[0]._one:  # two calls to each process are under way, and no other can go out
            tasks = []
            for name, prompt in zip("abc", prompts, strict=True):
                length = dict(max_tokens=240 if name == "c" else 4, stop_token_ids=())
                asked = group_of(prompt, name=name, count=2, **length)
                tasks += [asyncio.ensure_future(engine.generate(request)) for request in asked]
                await asyncio.sleep(0.01)
            for task in tasks[4:]:
                task.cancel()
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks[:4])
        await engine.pause(drain=True)
        assert not any(core.num_unfinished for core in house.cores)
        assert sorted(sum((call for process in processes for call in process.asked), [])) == [
            "a/0",
            "a/1",
            "b/0",
            "b/1",
        ]

    in_a_loop(house, work)


def test_what_a_busy_process_has_not_begun_goes_to_an_idle_one(house: House, processes: list[Process]) -> None:
    prompts = random_prompts(3)

    async def work(engine: Engine) -> None:
        first = [
            each
            for number in (0, 1)
            for each in group_of(prompts[number], name=str(number), count=4, max_tokens=240, stop_token_ids=())
        ]
        tasks = await started(engine, house, first)
        waiting = group_of(prompts[2], name="2", count=4, max_tokens=4, stop_token_ids=())
        tasks += [asyncio.ensure_future(engine.generate(request)) for request in waiting]
        await asyncio.sleep(0.01)
        for task in tasks[4:8]:  # one of the processes is idle now
            task.cancel()
        made = await asyncio.gather(*tasks, return_exceptions=True)
        for request, one in zip(waiting, made[8:], strict=True):
            assert not isinstance(one, BaseException) and is_of(house.model, request, one.completion)
        await engine.pause(drain=True)
        assert not any(core.num_unfinished for core in house.cores)
        asked = [each for process in processes for call in process.asked for each in call]
        assert all(asked.count(request.id) == 1 for request in first), "what is being decoded was taken back"

    in_a_loop(house, work)
