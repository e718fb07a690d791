"""Turns groups into training rows with rewards, reference log-probs, values and advantages.

A completion becomes one row, plus one row for each branch of its episode. All rows of an attempt share its reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rollcall.algo.losses import kl_estimate
from rollcall.algo.recipe import TokenAdvantages, compute_advantages
from rollcall.algo.shaping import compared, shaped_rewards, treatments_of, turn_rewards
from rollcall.base.types import Floats, Group, Sample, rows_of
from rollcall.config import Algorithm, EnvironmentBase
from rollcall.learner.learner import TokenScores

ScoreSamples = Callable[[Sequence[Sample]], list[TokenScores]]


def make_samples(
    groups: Sequence[Group],
    *,
    algorithm: Algorithm,
    max_response_tokens: int,
    reference: ScoreSamples | None,
    values: Callable[[Sequence[Sample]], list[Floats]] | None,
    environment: EnvironmentBase | None,
    environment_weight: float,
) -> list[Sample]:
    """Build all rows for a step, group by group. ``reference`` and ``values`` are called once for all rows.

    ``environment`` says which episodes are masked or dropped; ``environment_weight`` is the weight of the environment's rewards in the
    score.
    """
    samples = [sample for group in groups for sample in _rows(group, environment)]
    if reference is not None and samples:
        scores = reference(samples)
        samples = [sample.with_(reference_logprobs=row.logprobs) for sample, row in zip(samples, scores, strict=True)]
    if values is not None and samples:
        samples = [sample.with_(values=row) for sample, row in zip(samples, values(samples), strict=True)]
    groups = [compared(group, environment) for group in groups]
    rows = iter(samples)
    by_group = [
        [[next(rows) for _ in rows_of(completion)] for completion in group.completions] for group in groups
    ]  # group, attempt, row

    def per_attempt(value_of: Callable[[Sample], np.ndarray]) -> list[list[np.ndarray]]:
        return [[np.concatenate([value_of(row) for row in attempt]) for attempt in group] for group in by_group]

    kl_in_reward = algorithm.kl_in == "reward" and algorithm.kl_coef > 0
    advantages = compute_advantages(
        algorithm,
        rewards=[shaped_rewards(group, algorithm, max_response_tokens) for group in groups],
        masks=per_attempt(lambda row: row.mask),
        kl=per_attempt(lambda row: _token_kl(row, algorithm)) if kl_in_reward else None,
        values=per_attempt(lambda row: _required(row.values)) if algorithm.name == "ppo" else None,
        turns=[[turn_rewards(one, weight=environment_weight) for one in group.completions] for group in groups],
    )
    return [
        sample
        for group, of_group in zip(by_group, advantages, strict=True)
        for attempt, tokens in zip(group, of_group, strict=True)
        for sample in _divided(attempt, tokens)
    ]


def _rows(group: Group, environment: EnvironmentBase | None) -> list[Sample]:
    samples: list[Sample] = []
    treatments = treatments_of(group, environment)
    for attempt, (completion, treatment) in enumerate(zip(group.completions, treatments, strict=True)):
        if treatment == "drop":
            continue
        for row in rows_of(completion):
            sample = Sample.of(row, draw=group.draw, attempt=attempt, prompt_ids=group.prompt.token_ids)
            samples.append(sample.with_(mask=np.zeros_like(row.mask)) if treatment == "mask" else sample)
    return samples


def _divided(attempt: list[Sample], tokens: TokenAdvantages) -> list[Sample]:
    """Assign to each row its part of the advantages and returns that were computed for the whole attempt."""
    ends = np.cumsum([len(row.response_ids) for row in attempt])[:-1]
    advantages = np.split(tokens.advantages, ends)
    returns = [None] * len(attempt) if tokens.returns is None else np.split(tokens.returns, ends)
    return [
        row.with_(advantages=own, returns=target) for row, own, target in zip(attempt, advantages, returns, strict=True)
    ]


def _token_kl(sample: Sample, algorithm: Algorithm) -> Floats:
    policy = torch.from_numpy(sample.behaviour_logprobs)
    reference = torch.from_numpy(_required(sample.reference_logprobs))
    return kl_estimate(policy, reference, estimator=algorithm.kl_estimator).numpy()


def _required(array: Floats | None) -> Floats:
    assert array is not None, "an earlier stage did not compute this array"
    return array
