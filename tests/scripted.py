"""An environment in this process whose answers a test decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollcall.environments.protocol import Message, Opening, StepResult


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


class One:
    def __init__(self, script: Scripted) -> None:
        self._script = script
        self._texts: list[str] = []
        self._row: Mapping[str, Any] = {}

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        self._row, self._texts = row, []
        return Opening(text=self._script.opening, tools=())

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
