"""Metrics for the groups that a step trained on."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from itertools import groupby

import numpy as np

from rollcall.algo.advantages import all_equal
from rollcall.base.types import EndReason, Episode, Sample, rows_of
from rollcall.engine.protocol import Stats
from rollcall.environments.protocol import DROPPED
from rollcall.loop.supply import StepBatch


def peak_memory_gib() -> float:
    """Return this process's peak memory: from CUDA's allocator if a GPU is in use, otherwise resident memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def batch_metrics(
    batch: StepBatch, samples: list[Sample], *, stats: Stats, reward_s: float, threshold: float, first_reward: str
) -> dict[str, float]:
    scores = [score for group in batch.groups for score in group.scores]
    completions = [completion for group in batch.groups for completion in group.completions]
    rewards = np.array([score.value for score in scores])
    lengths = [completion.num_sampled for completion in completions]
    lags = _staleness(batch, samples)
    loss_tokens = np.concatenate([np.zeros(0), *(sample.advantages[sample.mask] for sample in samples)])
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
        "rollout/tokens": float(sum(lengths)),
        "rollout/response_length_mean": float(np.mean(lengths)),
        "rollout/truncated_fraction": float(np.mean([completion.is_cut for completion in completions])),
        "rollout/groups_from_journal": float(batch.num_from_journal),
        "time/rollout_s": batch.wall_s,
        "rollout/preemptions": float(stats.num_preemptions),
        "time/reward_s": reward_s,
    }
    if stats.busy_s > 0 and stats.num_tokens:
        metrics["rollout/tokens_per_s"] = stats.num_tokens / stats.busy_s
    for name in scores[0].parts:
        metrics[f"reward/{name}"] = float(np.mean([score.parts[name] for score in scores]))
    # These counts include failed environments, even if the run has no environment reward.
    for name, count in Counter(name for score in scores for name in score.errors).items():
        metrics[f"reward_errors/{name}"] = float(count)
    return (
        metrics
        | _critic_metrics(samples)
        | _episode_metrics([completion.episode for completion in completions if completion.episode])
    )


def _critic_metrics(samples: list[Sample]) -> dict[str, float]:
    """Measure how well the critic's values predicted the returns, over all loss tokens of the step."""
    rows = [(s.returns[s.mask], s.values[s.mask]) for s in samples if s.returns is not None and s.values is not None]
    if not rows:
        return {}
    returns, values = (np.concatenate(column).astype(np.float64) for column in zip(*rows, strict=True))
    if all_equal(returns):
        return {}  # no variance to explain
    return {"train/value_explained_variance": float(1 - np.var(returns - values) / np.var(returns))}


def _episode_metrics(episodes: list[Episode]) -> dict[str, float]:
    if not episodes:
        return {}

    def fraction(*reasons: EndReason) -> float:
        return float(np.mean([episode.ended in reasons for episode in episodes]))

    own: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            own.setdefault(name, []).append(value)
    dropped = sum(own.pop(DROPPED, ()))
    kept = sorted(own, key=lambda name: -len(own[name]))[:500]  # the most common metrics
    return {
        "episode/turns_mean": float(np.mean([len(episode.turns) for episode in episodes])),
        "episode/tool_calls_mean": float(
            np.mean([sum(len(turn.calls) for turn in episode.turns) for episode in episodes])
        ),
        "episode/failed_fraction": fraction(EndReason.ERROR),
        "episode/truncated_fraction": fraction(EndReason.TURNS, EndReason.TOKENS),
        "episode/timed_out_fraction": fraction(EndReason.TIMEOUT),
        "episode/metrics_dropped": float(dropped + len(own) - len(kept)),
        **{f"env/{name}": float(np.mean(own[name])) for name in kept},
    }


def _staleness(batch: StepBatch, samples: list[Sample]) -> Counter[int]:
    """Count the trained tokens by staleness: how many versions older they are than the policy that is being updated."""
    made = {
        (group.draw, attempt): rows_of(completion)
        for group in batch.groups
        for attempt, completion in enumerate(group.completions)
    }
    lags: Counter[int] = Counter()
    for attempt, of_attempt in groupby(samples, key=lambda sample: (sample.draw, sample.attempt)):
        for row, sample in zip(made[attempt], of_attempt, strict=True):
            end = 0
            for part in row.segments:
                start, end = end, end + part.num_tokens
                if count := int(np.count_nonzero(sample.mask[start:end])):
                    lags[batch.step - 1 - part.version] += count
    return lags
