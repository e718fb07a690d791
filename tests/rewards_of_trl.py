"""Reward functions with the signatures of TRL 1.16's own and of its examples, for test_reward_trl.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]


def format_of_messages(completions: list[Messages], **kwargs: Any) -> list[float]:
    """As ``think_format_reward``."""
    return [float(completion[0]["content"].startswith("<think>")) for completion in completions]


def accuracy(
    completions: list[Messages],
    solution: list[str],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """As ``accuracy_reward``."""
    if log_extra is not None:
        log_extra("solution", list(solution))
    pairs = zip(completions, solution, strict=True)
    return [None if right == "unknown" else float(right in one[0]["content"]) for one, right in pairs]


class Overlong:
    """As what ``get_soft_overlong_punishment`` returns."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [-float(len(ids) > self.most) for ids in completion_ids]


overlong = Overlong(2)


def of_prompts(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """As ``f(prompts, completions, **kwargs)`` in TRL's documentation."""
    return [float(completion in prompt) for prompt, completion in zip(prompts, completions, strict=True)]


def of_answers(completions: list[str], answer: list[Any], **kwargs: Any) -> list[float]:
    return [float(completion == str(right)) for completion, right in zip(completions, answer, strict=True)]


async def later(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(bool(completion)) for completion in completions]


def logs(
    completions: list[str], ground_truth: list[int], log_extra: Any, log_metric: Any, **kwargs: Any
) -> list[float]:
    log_extra("truth", ground_truth)
    log_metric("accuracy", 1.0)
    return [float(truth) for truth in ground_truth]


def tools_called(completions: list[Messages], answer: list[str], **kwargs: Any) -> list[float]:
    """As ``grpo_agent.py``'s: calls and their results."""
    return [
        float(sum(len(turn.get("tool_calls") or ()) for turn in one) + sum(turn["role"] == "tool" for turn in one))
        for one in completions
    ]


def score_left(environments: list[Any], **kwargs: Any) -> list[float]:
    """As ``grpo_2048.py``'s."""
    return [environment.score for environment in environments]


def asks_for_methods(environments: list[Any], **kwargs: Any) -> list[float]:
    return [environment.get_reward() for environment in environments]


def everything(**kwargs: Any) -> list[float]:
    return [float(len(kwargs))] * len(kwargs["completions"])


def declines(completions: list[str], trainer_state: Any = 0, **kwargs: Any) -> list[float | None]:
    assert trainer_state is None
    return [None if completion == "?" else float(completion) for completion in completions]


def declines_too(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None if completion in ("?", "1") else 5.0 for completion in completions]


def declines_all(completions: list[str], **kwargs: Any) -> list[None]:
    return [None for _ in completions]


def by_place(prompts: list[str], completions: list[str], /, **kwargs: Any) -> list[float]:
    return []


def only_prompts(prompts: list[str], completions: list[str]) -> list[float]:
    return []


def two_meanings(completions: list[str], metadata: Any, **kwargs: Any) -> list[float]:
    return []


def progress(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
    return []


class Game:
    """As ``grpo_2048.py``'s class: a state that a reward reads, and no ``get_reward``."""

    def reset(self, **row: Any) -> str:
        self.board = [[0, 2], [4, 8]]
        self.score = len(row["answer"]) / 2
        self._client, self.history = object(), []
        for _ in range(300):  # deeper than can be kept
            self.history = [self.history]
        return "play"

    def move(self, direction: str) -> str:
        """Play one move.

        Args:
            direction: Where to.
        """
        self.score += 1.5
        return f"score={self.score}"

    @property
    def best(self) -> int:
        return max(map(max, self.board))
