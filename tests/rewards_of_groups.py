"""Rewards of every shape, for test_reward_kinds.py; imported by the reward's processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

_under_way = 0


def plain(completion: str, answer: str) -> float:
    return float(completion == answer)


def ranked(completions: Sequence[str], answer: str, metadata: dict[str, Any]) -> list[float]:
    """The longest gets 1, the others their share of it: something that one completion alone does not tell."""
    longest = max(map(len, completions))
    return [len(completion) / longest + len(metadata) for completion in completions]


def too_few(completions: list[str]) -> list[float]:
    return [1.0] * (len(completions) - 1)


def some_bad(completions: list[str]) -> list[Any]:
    return [float("nan") if completion == "bad" else 1 for completion in completions]


def group_raises(completions: list[str]) -> list[float]:
    raise KeyError(completions[0])


def group_hangs(completions: list[str]) -> list[float]:
    time.sleep(1000)
    return []


async def waits_together(completion: str) -> float:
    """How many calls were under way at once."""
    global _under_way
    _under_way += 1
    try:
        await asyncio.sleep(0.05)
        return float(_under_way)
    finally:
        await asyncio.sleep(0.05)
        _under_way -= 1


async def one_fails_one_hangs(completion: str, prompt: str) -> float:
    if completion == "raise":
        raise TimeoutError("the server said so")
    if completion == "hang":
        await asyncio.sleep(1000)
    return 1.0


async def blocks(completion: str) -> float:
    time.sleep(1000)
    return 1.0


async def async_batched(completions: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(completion)) for completion in completions]
