"""Groups whose attempts are episodes: several turns, observations between them, rewritten histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollcall.base.types import (
    Branch,
    Completion,
    EndReason,
    Episode,
    FinishReason,
    Floats,
    Group,
    Ints,
    Prompt,
    Sample,
    Score,
    Segment,
    ToolCall,
    Turn,
)


def make_turn(num_sampled: int, num_observed: int, *, reward: float | None = None, calls: int = 0) -> Turn:
    call = ToolCall(name="look", arguments={}, result="", failed=False)
    return Turn(
        num_sampled=num_sampled, num_observed=num_observed, text="t", observation="o", calls=(call,) * calls, reward=reward
    )  # fmt: skip


def make_episode(
    turns: Sequence[Turn],
    *,
    seed: int,
    ended: EndReason = EndReason.DONE,
    branches: Sequence[Branch] = (),
    **fields: Any,
) -> Completion:
    """A completion whose tokens are those of its turns."""
    rng = np.random.default_rng(seed)
    mask = np.concatenate(
        [np.zeros(0, dtype=bool), *([True] * turn.num_sampled + [False] * turn.num_observed for turn in turns)]
    ).astype(np.bool_)
    given: dict[str, Any] = dict(
        prompt_ids=None, reward=None, metrics={}, error="x" if ended is EndReason.ERROR else ""
    )
    return Completion(
        token_ids=rng.integers(2, 40, size=len(mask)).astype(np.int32),
        logprobs=np.where(mask, -rng.random(len(mask)), 0).astype(np.float32),
        mask=mask,
        segments=(Segment(version=0, num_tokens=len(mask)),) if len(mask) else (),
        finish=FinishReason.STOP,
        seed=seed,
        text="x",
        episode=Episode(turns=tuple(turns), branches=tuple(branches), ended=ended, **{**given, **fields}),
    )


def make_branch(prompt: Sequence[int], mask: Sequence[bool], *, seed: int) -> Branch:
    rng = np.random.default_rng(seed)
    chosen = np.array(mask, dtype=np.bool_)
    return Branch(
        prompt_ids=np.array(prompt, dtype=np.int32),
        token_ids=rng.integers(2, 40, size=len(mask)).astype(np.int32),
        logprobs=np.where(chosen, -rng.random(len(mask)), 0).astype(np.float32),
        mask=chosen,
        segments=(Segment(version=0, num_tokens=len(mask)),),
    )


def make_group(completions: Sequence[Completion], rewards: Sequence[float], *, draw: int = 0) -> Group:
    return Group(
        step=1,
        draw=draw,
        prompt=Prompt(
            id=f"p{draw}", token_ids=np.array([4, 5 + draw], dtype=np.int32), text="?", answer="", metadata={}
        ),
        completions=tuple(completions),
        scores=tuple(Score(value=reward, parts={"environment": reward}, errors={}) for reward in rewards),
        started_s=0.0,
        finished_s=0.0,
        worker="local",
    )


def compacted_rows(
    rng: np.random.Generator, *, draw: int, attempt: int, system: Ints, turns: int, every: int, tokens: int
) -> list[Sample]:
    """An attempt that writes ``tokens`` and reads ``tokens`` in each turn. After ``every`` turns its history becomes a summary behind
    the system prompt; half-way through each history it also goes back to an earlier answer and asks something else."""

    def ids(count: int) -> Ints:
        return rng.integers(2, 40, size=count).astype(np.int32)

    rows: list[Sample] = []
    prompt = np.concatenate((system, ids(2)))
    for _ in range(0, turns, every):
        response = ids(2 * tokens * every - tokens)  # sampled, observed, ..., sampled
        rows.append(_row(rng, draw, attempt, prompt, response, tokens))
        back = 2 * tokens * (every // 2)
        rows.append(_row(rng, draw, attempt, np.concatenate((prompt, response[:back], ids(2))), ids(tokens), tokens))
        prompt = np.concatenate((system, ids(3)))
    return rows


def _row(rng: np.random.Generator, draw: int, attempt: int, prompt: Ints, response: Ints, tokens: int) -> Sample:
    mask = np.arange(len(response)) // tokens % 2 == 0

    def floats(scale: float) -> Floats:
        return (scale * rng.standard_normal(len(response))).astype(np.float32)

    return Sample(
        draw=draw, attempt=attempt, prompt_ids=prompt, response_ids=response, mask=mask, behaviour_logprobs=floats(0.1) - 3,
        old_logprobs=floats(0.1) - 3, reference_logprobs=floats(0.1) - 3, advantages=floats(1.0), returns=floats(1.0),
        values=floats(0.1),
    )  # fmt: skip


def compacted_group(
    *, attempts: int = 2, draw: int = 0, turns: int = 20, every: int = 5, tokens: int = 2, seed: int = 0
) -> list[Sample]:
    rng = np.random.default_rng(seed + draw)
    system = rng.integers(2, 40, size=6).astype(np.int32)
    shape: dict[str, Any] = dict(system=system, turns=turns, every=every, tokens=tokens)
    return [row for place in range(attempts) for row in compacted_rows(rng, draw=draw, attempt=place, **shape)]


def same_advantage(samples: list[Sample], *, seed: int = 0) -> list[Sample]:
    """One advantage for all rows of an attempt."""
    rng = np.random.default_rng(seed)
    numbers: dict[tuple[int, int], float] = {}
    return [
        replace(
            sample,
            advantages=np.full(
                len(sample.mask), numbers.setdefault((sample.draw, sample.attempt), rng.normal()), dtype=np.float32
            ),
        )
        for sample in samples
    ]
