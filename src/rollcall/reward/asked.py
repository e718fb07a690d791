"""What is asked of a service that scores, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollcall.redact import redact
from rollcall.reward.worker import RewardResult
from rollcall.words import visible

MAX_NOTE = 4000  # characters that are kept of what a service said


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one completion. ``note`` is what the service said, for people to read."""

    result: RewardResult
    note: str = ""

    @property
    def kept_note(self) -> str:
        """It goes to the journal, and must not be long, hold a secret or control a terminal."""
        note = redact(visible(self.note))
        return note if len(note) <= MAX_NOTE else f"{note[: MAX_NOTE // 2]}\n[...]\n{note[-MAX_NOTE // 2 :]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request, on the ``count`` completions from place ``first`` on. ``read`` makes verdicts of the answer's body."""

    first: int
    count: int
    body: bytes
    read: Callable[[bytes], list[Verdict]]


def failed_verdict(why: str, *, note: str = "") -> Verdict:
    return Verdict(RewardResult(0.0, "raised", visible(why)), note=note)


def read_json(said: bytes) -> Any:
    """ValueError: it is not JSON; the message shows how it begins."""
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        begin = " ".join(said[:200].decode(errors="replace").split())
        raise ValueError(f"it is not JSON: {begin[:80]!r}" if begin else "it is empty") from None


def whole_characters(text: str) -> str:
    """A completion cut inside a character may hold half a surrogate pair, which many readers of JSON refuse."""
    return text.encode(errors="replace").decode()
