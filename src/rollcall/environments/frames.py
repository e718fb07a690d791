"""What environments answer, on its way to the controller: a length and JSON, of a bounded size, checked field by field.

A child answers its parent so (children.py), and a host the controller (host.py, hosted.py).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter

from rollcall.environments.child import MAX_ANSWER_BYTES
from rollcall.environments.protocol import Ended, EnvironmentFailed, StepResult
from rollcall.process.framing import LENGTH


@dataclass(frozen=True, slots=True)
class Failed:
    failed: str


@dataclass(frozen=True, slots=True)
class Opened:
    text: str | None


@dataclass(frozen=True, slots=True)
class Worth:
    worth: float | None


@dataclass(frozen=True, slots=True)
class Left:
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Running:
    """Said again and again while a program runs."""

    runs_s: float


Answer = Failed | Opened | Worth | Left | StepResult | Running | Ended
_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer, config=_CONFIG)
_T = TypeVar("_T")


async def send(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(LENGTH.pack(len(body)) + body)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> bytes:
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if size > MAX_ANSWER_BYTES:
        raise EnvironmentFailed(f"its process answers with {size:,} bytes; at most {MAX_ANSWER_BYTES:,} are read")
    return await reader.readexactly(size)


def request_bytes(request: dict[str, Any]) -> bytes:
    return json.dumps(request, default=_plain).encode()


def answer_bytes(answer: Answer) -> bytes:
    return _ANSWER.dump_json(answer)


def read_answer(body: bytes, *wanted: type[_T]) -> _T | Failed:
    """One of what was asked for, or why there is none."""
    try:
        return adapter(wanted).validate_json(body)
    except ValueError:
        raise EnvironmentFailed("its process answered rubbish, or something else than it was asked for") from None


@cache
def adapter(wanted: tuple[type, ...]) -> TypeAdapter[Any]:
    """Of a few types alone: pydantic tries all that there are."""
    kinds: Any = reduce(or_, wanted, Failed)
    return TypeAdapter(kinds, config=_CONFIG)


def _plain(value: Any) -> Any:
    """A column's value that JSON does not have: an array as a list, a date as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
