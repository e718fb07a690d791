"""What environments answer, on its way to the controller: JSON, checked field by field.

A child answers its parent so (children.py), and a host the controller (host.py, hosted.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from rollcall.environments.protocol import Ended, StepResult
from rollcall.process.framing import Body


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


Answer = Opened | Worth | Left | StepResult | Ended | None
_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


def reader(*kinds: Any) -> Callable[[bytes], Any]:
    """Reads one of these, or why there is none; ValueError: it is something else."""
    # Of a few types alone: pydantic tries all that there are.
    one: TypeAdapter[Any] = TypeAdapter(reduce(or_, kinds, Failed), config=_CONFIG)
    return one.validate_json


def answer_bytes(answer: Answer) -> bytes:
    return _ANSWER.dump_json(answer)


def _plain(value: Any) -> Any:
    """A column's value that JSON does not have: an array as a list, a date as text. NaN is written: a row may hold it."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


REQUEST = Body(lambda value: json.dumps(value, default=_plain).encode(), json.loads)
