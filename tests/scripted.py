"""An environment in this process whose answers a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import make_run
from tiny import make_model, make_tokenizer

from rollcall.base.types import Completion, Prompt
from rollcall.config import ClassEnvironment, Config, StepEnvironment
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.protocol import Sampling
from rollcall.engine.ticker import Ticker
from rollcall.environments.conversation import Conversations
from rollcall.environments.episode import Player
from rollcall.environments.protocol import Environment, Message, StepResult
from rollcall.loop.rollout import Rewards, Rollouts
from rollcall.model.decoder import fuse_parameters


def says(text: str, *, role: str = "user", **fields: Any) -> StepResult:
    """The environment goes on with this."""
    return StepResult(**{"messages": (Message(role=role, content=text),), **_QUIET, "done": False, **fields})


def ends(**fields: Any) -> StepResult:
    return StepResult(**{"messages": (), **_QUIET, "done": True, **fields})


_QUIET: dict[str, Any] = {"reward": None, "metrics": {}, "calls": ()}


class Scripted:
    """``answer(row, texts)`` gets what the model has written so far, turn by turn."""

    def __init__(
        self,
        answer: Callable[[Mapping[str, Any], list[str]], Any],
        *,
        opening: str | None = None,
        reward: Callable[[list[str]], float | None] = lambda texts: None,
    ) -> None:
        self.answer, self.opening, self.of = answer, opening, reward
        self.num_started = 0
        self.closed: list[bool] = []
        self.given: list[Sequence[int]] = []
        self.is_closed = False

    async def find_host(self) -> Scripted:
        return self

    async def start(self, kind: str) -> One:
        self.num_started += 1
        return One(self)

    def tools_of(self, kind: str) -> tuple[dict[str, Any], ...]:
        return ()

    async def aclose(self) -> None:
        self.is_closed = True


class One(Environment):
    def __init__(self, script: Scripted) -> None:
        self._script = script
        self._texts: list[str] = []
        self._row: Mapping[str, Any] = {}

    async def call(self, method: str, *args: Any) -> Any:
        raise AssertionError(f"there is no process to call for {method}")

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        self._row, self._texts = row, []
        return self._script.opening

    async def step(self, text: str, token_ids: Sequence[int]) -> StepResult:
        self._texts.append(text)
        self._script.given.append(token_ids)
        answer = self._script.answer(self._row, self._texts)
        return await answer if hasattr(answer, "__await__") else answer

    async def reward(self) -> float | None:
        return self._script.of(self._texts)

    async def attributes(self) -> dict[str, Any]:
        return {}

    async def close(self, *, broken: bool) -> None:
        self._script.closed.append(broken)


SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=40, stop_token_ids=(0,), stop_strings=())


def a_model() -> Any:
    model = make_model()
    fuse_parameters(model)
    return model


def a_prompt(text: str = "3a=") -> Prompt:
    ids = np.array(make_tokenizer()(text)["input_ids"], dtype=np.int32)
    return Prompt(id="row", token_ids=ids, text=text, answer="a", metadata={"level": 2})


def play(
    environments: Any,
    *,
    prompt: Prompt | None = None,
    sampling: Sampling = SAMPLING,
    seed: int = 5,
    model: Any = None,
    max_prompt_tokens: int = 64,
    **section: Any,
) -> Completion:
    """One episode on a tiny model."""
    section = {"path": "x:X", "max_turn_tokens": 6, **section}
    kind = StepEnvironment if section.get("type") == "step" else ClassEnvironment

    player = Player(
        section=kind(**section),
        environments=environments,
        conversations=Conversations(make_tokenizer()),
        max_prompt_tokens=max_prompt_tokens,
    )
    core = NativeEngine(model or a_model(), make_tokenizer(), max_running=8, kv_tokens=None)
    return asyncio.run(episode_of(core, player, prompt or a_prompt(), seed=seed, sampling=sampling))


def rollouts_of(core: Any, player: Player, *, running: int = 8) -> Rollouts:
    return Rollouts(engine=Ticker(core, max_running=running), rewards=Rewards(), player=player)


async def episode_of(
    core: Any,
    player: Player,
    prompt: Prompt,
    *,
    seed: int,
    sampling: Sampling = SAMPLING,
    rollouts: Rollouts | None = None,
) -> Completion:
    rollouts = rollouts or rollouts_of(core, player)
    return (await rollouts._play(prompt, seed=seed, sampling=sampling, order=(0, seed, 0))).completion


def game(folder: Path, *overrides: str, name: str = "run", reward: Any = ({"type": "exact"},)) -> Config:
    changes = ("rollout.max_response_tokens=12", "trainer.steps=3", "environment.type=class", "environment.path=x:Game")
    return make_run(folder, *changes, "environment.max_turn_tokens=3", *overrides, name=name, reward=reward)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scripted], Scripted]:
    def use(script: Scripted) -> Scripted:
        monkeypatch.setattr("rollcall.run.local.build_environments", lambda *_: script)
        return script

    return use
