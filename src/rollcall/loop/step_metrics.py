"""The metrics of the groups that a step trained on."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rollcall.loop.rollout import Clock
from rollcall.loop.supply import StepBatch
from rollcall.types import FinishReason, Sample


def batch_metrics(
    batch: StepBatch, samples: list[Sample], *, clock: Clock, threshold: float, first_reward: str
) -> dict[str, float]:
    scores = [score for group in batch.groups for score in group.scores]
    completions = [completion for group in batch.groups for completion in group.completions]
    rewards = np.array([score.value for score in scores])
    lengths = [len(completion.token_ids) for completion in completions]
    lags = _staleness(batch)
    loss_tokens = np.concatenate([sample.advantages[sample.mask] for sample in samples])
    metrics = {
        "train/reward_mean": float(rewards.mean()),
        "train/reward_std": float(rewards.std()),
        "train/accuracy": float(np.mean([score.parts[first_reward] >= threshold for score in scores])),
        "train/advantage_abs_mean": float(np.abs(loss_tokens).mean()) if len(loss_tokens) else 0.0,
        "train/completions": float(len(scores)),
        "train/reward_errors": float(sum(bool(score.errors) for score in scores)),
        "train/zero_variance_groups": batch.zero_variance,
        "train/refills": float(batch.num_refills),
        "rollout/staleness_mean": sum(lag * count for lag, count in lags.items()) / max(lags.total(), 1),
        "rollout/staleness_max": float(max(lags, default=0)),
        "rollout/tokens": float(sum(group.num_tokens for group in batch.groups)),
        "rollout/response_length_mean": float(np.mean(lengths)),
        "rollout/truncated_fraction": float(
            np.mean([completion.finish is FinishReason.LENGTH for completion in completions])
        ),
        "rollout/groups_from_journal": float(batch.num_from_journal),
        "time/rollout_s": batch.wall_s,
        "time/reward_s": clock.reward_s,
    }
    if clock.engine_s > 0 and clock.engine_tokens:
        metrics["rollout/tokens_per_s"] = clock.engine_tokens / clock.engine_s
    for name in scores[0].parts:
        metrics[f"reward/{name}"] = float(np.mean([score.parts[name] for score in scores]))
        errors = sum(name in score.errors for score in scores)
        if errors:
            metrics[f"reward_errors/{name}"] = float(errors)
    return metrics


def _staleness(batch: StepBatch) -> Counter[int]:
    """Number of tokens by how many versions older they are than the policy that they train."""
    lags: Counter[int] = Counter()
    for completion in (completion for group in batch.groups for completion in group.completions):
        for segment in completion.segments:
            lags[batch.step - 1 - segment.version] += segment.num_tokens
    return lags
