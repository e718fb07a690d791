"""Groups into training rows: rewards, reference log-probs, values, advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rollcall.algo.losses import kl_estimate
from rollcall.algo.recipe import compute_advantages
from rollcall.algo.shaping import shaped_rewards
from rollcall.config import Algorithm
from rollcall.learner.learner import TokenScores
from rollcall.types import Floats, Group, Sample

ScoreSamples = Callable[[Sequence[Sample]], list[TokenScores]]


def make_samples(
    groups: Sequence[Group],
    *,
    algorithm: Algorithm,
    max_response_tokens: int,
    reference: ScoreSamples | None,
    values: Callable[[Sequence[Sample]], list[Floats]] | None,
) -> list[Sample]:
    """All rows of a step, group by group. ``reference`` and ``values`` are asked once for all rows."""
    samples = [
        Sample.of(completion, draw=group.draw, attempt=attempt, prompt_ids=group.prompt.token_ids)
        for group in groups
        for attempt, completion in enumerate(group.completions)
    ]
    if reference is not None:
        scores = reference(samples)
        samples = [sample.with_(reference_logprobs=row.logprobs) for sample, row in zip(samples, scores, strict=True)]
    if values is not None:
        rows = values(samples)
        samples = [sample.with_(values=row) for sample, row in zip(samples, rows, strict=True)]
    return _with_advantages(samples, groups, algorithm, max_response_tokens)


def _with_advantages(
    samples: list[Sample], groups: Sequence[Group], algorithm: Algorithm, max_response_tokens: int
) -> list[Sample]:
    rows = iter(samples)
    by_group = [[next(rows) for _ in group.completions] for group in groups]
    kl_in_reward = algorithm.kl_in == "reward" and algorithm.kl_coef > 0
    kl = [[_token_kl(sample, algorithm) for sample in group] for group in by_group] if kl_in_reward else None
    values: list[list[Floats]] | None = None
    if algorithm.name == "ppo":
        values = [[_required(sample.values) for sample in group] for group in by_group]
    advantages = compute_advantages(
        algorithm,
        rewards=[shaped_rewards(group, algorithm, max_response_tokens) for group in groups],
        masks=[[sample.mask for sample in group] for group in by_group],
        kl=kl,
        values=values,
    )
    return [
        sample.with_(advantages=token.advantages, returns=token.returns)
        for group, tokens in zip(by_group, advantages, strict=True)
        for sample, token in zip(group, tokens, strict=True)
    ]


def _token_kl(sample: Sample, algorithm: Algorithm) -> Floats:
    policy, reference = (
        torch.from_numpy(sample.behaviour_logprobs),
        torch.from_numpy(_required(sample.reference_logprobs)),
    )
    return kl_estimate(policy, reference, estimator=algorithm.kl_estimator).numpy()


def _required(array: Floats | None) -> Floats:
    assert array is not None, "an earlier stage left this out"
    return array
