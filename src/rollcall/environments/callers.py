"""Who may use the endpoint, and under which rules: each key belongs to one caller, which has its own histories.

``Open`` are the rules of `rollcall serve`: a request says how it is sampled. An episode has its own (``agent.py``).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollcall.base.types import Ints
from rollcall.engine.protocol import Sampling
from rollcall.environments.histories import Histories
from rollcall.environments.protocol import SampleTurn
from rollcall.environments.wire import Refused, Wanted


class Rules(Protocol):
    """Decides on the requests of a caller. Each method refuses by raising ``Refused``."""

    def model(self, name: str | None) -> None: ...

    def sampling(self, wanted: Wanted, *, num_prompt: int, num_added: int) -> Sampling:
        """``num_added``: tokens of the prompt behind the answer that it extends."""
        ...

    def admit(self, num_choices: int) -> None:
        """A request begins."""
        ...

    def seed(self, wanted: Wanted, place: int) -> int: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Caller:
    name: str
    rules: Rules
    histories: Histories
    sample: SampleTurn
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # its requests on their way
    num_requests: int = 0
    num_refused: int = 0
    reward: float | None = None  # what it reported
    metrics: dict[str, float] = field(default_factory=dict)
    takes_reward: bool = False
    last_refusal: str = ""
    is_ended: bool = False

    async def end_requests(self) -> None:
        """Its key is gone: those on their way are answered with that."""
        self.is_ended = True
        for task in (tasks := list(self.tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class Callers:
    def __init__(self) -> None:
        self._by_key: dict[bytes, Caller] = {}  # by digest: a lookup's time says nothing about a key

    def add(self, caller: Caller, *, key: str | None = None) -> str:
        """Its key, a new one unless given."""
        key = key or secrets.token_urlsafe(32)
        self._by_key[_digest(key)] = caller
        return key

    def remove(self, key: str) -> None:
        self._by_key.pop(_digest(key), None)

    def of(self, key: str) -> Caller | None:
        return self._by_key.get(_digest(key))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(slots=True, kw_only=True)
class Served:
    name: str
    max_model_len: int
    vocabulary: int


def too_long(served: Served, what: str) -> Refused:
    text = f"This model's maximum context length is {served.max_model_len} tokens, and {what}; send fewer"
    return Refused(400, text, code="context_length_exceeded", param="messages")


def room_for(num_prompt: int, served: Served) -> int:
    """How many tokens can follow a prompt; refuses one that leaves no room."""
    if num_prompt >= served.max_model_len:
        raise too_long(served, f"the request has {num_prompt} before the first new one")
    return served.max_model_len - num_prompt


def check_ids(ids: Ints, served: Served) -> None:
    if len(ids) and int(ids.max()) >= served.vocabulary:
        raise Refused(
            400,
            f"token id {int(ids.max())} is unknown: the model has {served.vocabulary} tokens; give ids of its own tokenizer",
            code="invalid_value",
            param="prompt",
        )


@dataclass(slots=True, kw_only=True)
class Open:
    """The request decides; what it leaves out is ``default``."""

    served: Served
    default: Sampling
    is_stopping: bool = False

    def model(self, name: str | None) -> None:
        if name is not None and name != self.served.name:
            raise Refused(
                404,
                f"the model {name[:200]!r} does not exist here; this endpoint serves {self.served.name!r}",
                code="model_not_found",
                param="model",
            )

    def sampling(self, wanted: Wanted, *, num_prompt: int, num_added: int) -> Sampling:
        room = room_for(num_prompt, self.served)
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
