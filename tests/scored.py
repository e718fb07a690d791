"""Prompts, completions and groups as a rollout hands them on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollcall.base.types import Completion, FinishReason, Group, Prompt, Score, Segment


def make_group(
    draw: int, *, step: int = 1, num_completions: int = 2, num_tokens: int = 5, metadata: dict | None = None
) -> Group:
    rng = np.random.default_rng(draw)

    def completion(index: int) -> Completion:
        return Completion(
            token_ids=rng.integers(0, 50_000, num_tokens, dtype=np.int32),
            logprobs=-rng.random(num_tokens, dtype=np.float32),
            mask=rng.random(num_tokens) < 0.8,
            segments=(Segment(version=3, num_tokens=2), Segment(version=4, num_tokens=num_tokens - 2)),
            finish=FinishReason.LENGTH if index else FinishReason.STOP,
            seed=2**63 + draw * 100 + index,
            text=f"answer {index} é\ud800\n",
            episode=None,
        )

    return Group(
        step=step,
        draw=draw,
        prompt=Prompt(
            id=f"row-{draw}",
            token_ids=np.arange(draw + 1, dtype=np.int32),
            text="2+3=",
            answer="5",
            metadata={"level": 2, "tags": ["a"]} if metadata is None else metadata,
        ),
        completions=tuple(completion(index) for index in range(num_completions)),
        scores=tuple(
            Score(value=0.1 + index, parts={"exact": 1 / 3}, errors={"regex": "timed out"})
            for index in range(num_completions)
        ),
        started_s=1700000000.123456789,
        finished_s=1700000001.5,
        worker="rollout-0",
    )


def a_prompt(*, answer: str = "46", text: str = "12+34=", metadata: dict[str, Any] | None = None) -> Prompt:
    ids = np.array([1, 2, 3], dtype=np.int32)
    return Prompt(id="sums:7", token_ids=ids, text=text, answer=answer, metadata=metadata or {})


def completions_of(*texts: str) -> tuple[Completion, ...]:
    return tuple(Completion.given(np.array([5], dtype=np.int32), text=text) for text in texts)


def made_of(seed: int, *, num_tokens: int = 2) -> Completion:
    """A completion that tells its seed."""
    return replace(Completion.given(np.full(num_tokens, 9, dtype=np.int32), text=str(seed)), seed=seed)


def in_a_directory_with(module: str, *, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / "my_rewards.py").write_text(module)
    monkeypatch.chdir(path)
