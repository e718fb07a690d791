"""Evaluation: samples answers to held-out prompts with the same engine and rewards, and computes accuracy, pass@k and lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from rollcall.base.types import Group, Prompt
from rollcall.config import EvalSection
from rollcall.engine.protocol import Sampling
from rollcall.loop.rollout import sampling_seeds
from rollcall.observe.headline import GRADED, is_graded
from rollcall.reward.scorer import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    accuracy: float  # mean over prompts and completions
    pass_at: dict[int, float]  # k -> share of prompts solved within k attempts (unbiased estimate)
    reward_mean: float
    response_length_mean: float
    truncated_fraction: float
    graded_fraction: float  # share of completions with a reward other than 0 or 1
    num_unscored: int  # number of completions that a reward failed to score; they count as 0
    groups: list[Group]

    def metrics(self) -> dict[str, float]:
        return {
            "eval/accuracy": self.accuracy,
            "eval/pass_at_k": self.pass_at[max(self.pass_at)],
            "eval/reward_mean": self.reward_mean,
            "eval/response_length_mean": self.response_length_mean,
            "eval/truncated_fraction": self.truncated_fraction,
            GRADED: self.graded_fraction,
            "eval/completions": float(sum(len(group.completions) for group in self.groups)),
            "eval/reward_errors": float(self.num_unscored),
        }


async def evaluate(
    prompts: Sequence[Prompt],
    *,
    section: EvalSection,
    make_group: Callable[..., Awaitable[Group]],
    scorer: Scorer,
    sampling: Sampling,
    seed: int,
    step: int,
) -> Evaluation:
    """Attempt every prompt ``section.samples_per_prompt`` times with ``Rollouts.group``. Seeds do not depend on the step, so that
    evaluations at different steps can be compared."""

    async def one(index: int, prompt: Prompt) -> Group:
        seeds = sampling_seeds(seed, -1, prompt.id, section.samples_per_prompt)
        return await make_group(prompt, step=step, draw=index, seeds=seeds, sampling=sampling, scorer=scorer)

    groups = list(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts))))
    return summarize(groups, first_reward=scorer.names[0], threshold=section.threshold)


def summarize(groups: list[Group], *, first_reward: str, threshold: float) -> Evaluation:
    correct_by_prompt = [[score.parts[first_reward] >= threshold for score in group.scores] for group in groups]
    completions = [completion for group in groups for completion in group.completions]
    attempts = len(correct_by_prompt[0])
    return Evaluation(
        accuracy=float(np.mean([np.mean(correct) for correct in correct_by_prompt])),
        pass_at={
            k: float(np.mean([pass_at_k(attempts, sum(correct), k) for correct in correct_by_prompt]))
            for k in sorted({attempts, *(1 << power for power in range(attempts.bit_length()))})
        },
        reward_mean=float(np.mean([score.value for group in groups for score in group.scores])),
        response_length_mean=float(np.mean([completion.num_sampled for completion in completions])),
        truncated_fraction=float(np.mean([completion.is_cut for completion in completions])),
        graded_fraction=float(np.mean([is_graded(score) for group in groups for score in group.scores])),
        num_unscored=sum(bool(score.errors) for group in groups for score in group.scores),
        groups=groups,
    )


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """Return the probability that at least one of k attempts, drawn without replacement, is correct (arXiv:2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - comb(attempts - correct, k) / comb(attempts, k)
