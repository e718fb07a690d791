"""The endpoint's callers and their rules. Each key belongs to one caller, and each caller has its own histories.

``Open`` implements the rules of `rollcall serve`, where a request sets its own sampling. The rules for episodes are in agent.py.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollcall.engine.protocol import Sampling
from rollcall.environments.histories import Histories
from rollcall.environments.protocol import SampleTurn
from rollcall.environments.wire import Refused, Wanted


class Rules(Protocol):
    """Decides on a caller's requests. A method refuses a request by raising ``Refused``."""

    model: str | None  # the model name that requests may use; None allows any name

    def sampling(self, wanted: Wanted, *, room: int, num_added: int) -> Sampling:
        """``room``: how many tokens fit after the prompt. ``num_added``: how many prompt tokens follow the answer it extends."""
        ...

    def admit(self, num_choices: int) -> None: ...
    def seed(self, wanted: Wanted, place: int) -> int: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Caller:
    rules: Rules
    histories: Histories
    sample: SampleTurn
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # the open requests
    num_requests: int = 0
    num_refused: int = 0
    reward: float | None = None  # reported by the program
    metrics: dict[str, float] = field(default_factory=dict)
    takes_reward: bool = False
    last_refusal: str = ""
    is_ended: bool = False

    async def end_requests(self) -> None:
        """Answer the open requests with a refusal, because the episode has ended."""
        self.is_ended = True
        for task in (tasks := list(self.tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@dataclass(slots=True, kw_only=True)
class Served:
    name: str
    max_model_len: int
    vocabulary: int


@dataclass(slots=True, kw_only=True)
class Open:
    """Lets the request decide. ``default`` supplies the missing values."""

    model: str | None
    default: Sampling
    is_stopping: bool = False

    def sampling(self, wanted: Wanted, *, room: int, num_added: int) -> Sampling:
        default = self.default
        return Sampling(
            temperature=default.temperature if wanted.temperature is None else wanted.temperature,
            top_p=default.top_p if wanted.top_p is None else wanted.top_p,
            top_k=default.top_k if wanted.top_k is None else wanted.top_k,
            max_tokens=min(wanted.token_limit or room, room),
            stop_token_ids=tuple(dict.fromkeys((*default.stop_token_ids, *wanted.stop_token_ids))),
            stop_strings=(*default.stop_strings, *wanted.stop),
        )

    def admit(self, num_choices: int) -> None:
        if self.is_stopping:
            raise Refused(503, "this server is stopping", code="stopping")

    def seed(self, wanted: Wanted, place: int) -> int:
        if wanted.seed is None:
            return secrets.randbits(64) - (1 << 63)
        return (wanted.seed + place + (1 << 63)) % (1 << 64) - (1 << 63)
