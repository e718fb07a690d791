"""Reward functions as a user would write them, good ones and bad ones; runs name them as ``rewards_bad:NAME``."""

from __future__ import annotations

import time
from typing import Any

# Values of a row's column `bad`, which say which function below fails on it.
HANGS, RAISES, NAN = "hang", "raise", "nan"


def share_of_answer(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Share of the completion's characters that are the answer's character."""
    return completion.count(answer) / max(len(completion), 1)


def share_of_digits(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def short(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    return 1.0 / (1 + len(completion))


def hangs(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    if metadata["bad"] == HANGS and completion[:1].isdigit():  # not all of its completions: each costs the time limit
        time.sleep(1000)
    return share_of_answer(prompt, completion, answer, metadata)


def raises(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    if metadata["bad"] == RAISES:
        raise RuntimeError(f"cannot score {prompt!r}")
    return share_of_answer(prompt, completion, answer, metadata)


def returns_nan(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    return float("nan") if metadata["bad"] == NAN else share_of_answer(prompt, completion, answer, metadata)


def always_equal(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    return 0.5
