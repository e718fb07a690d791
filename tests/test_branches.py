"""Episodes that branch, in the learner: what rows share is computed once, and the gradient is that of rows apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from branching import compacted_group, same_advantage
from learners import (
    WAYS,
    assert_same_gradient,
    cpu_way,
    gradients,
    make_learner,
    naive_gradients,
    num_unique,
    section,
    trainable,
)
from tiny import make_model

from rollcall.base.types import Sample, attempts_of
from rollcall.config import Dapo, Grpo, Gspo, Ppo
from rollcall.learner.learner import Critic, Learner, share_rows
from rollcall.learner.packing import pack
from rollcall.model import attention

assert cpu_way  # a fixture of these tests too


def packed_tokens(samples: list[Sample], budget: int) -> int:
    weights = np.ones(len(samples), dtype=np.float32)
    return sum(batch.num_tokens for batch in pack(samples, weights=weights, tokens_per_microbatch=budget))


def test_twenty_turns_with_rewritten_histories_cost_their_unique_tokens() -> None:
    samples = [row for draw in range(3) for row in compacted_group(attempts=4, draw=draw, tokens=20)]
    unique, fed = num_unique(samples), sum(len(row.prompt_ids) + len(row.response_ids) - 1 for row in samples)
    assert packed_tokens(samples, 10**9) == unique < 0.8 * fed
    assert packed_tokens(samples, unique // 7) <= 1.1 * unique, "what is laid out again where a budget ends"


@pytest.mark.parametrize("cpu_way", WAYS, indirect=True)
@pytest.mark.parametrize("architecture", ["qwen2-tied", "qwen2-sliding"])
@pytest.mark.parametrize("algorithm", [Grpo(kl_coef=0.1, entropy_coef=0.05), Dapo()], ids=["grpo", "dapo"])
def test_branches_have_the_gradient_of_rows_apart(architecture: str, algorithm: Any, cpu_way: str) -> None:
    samples = compacted_group(turns=6, every=3)
    shared = gradients(make_learner(trainable(architecture), algorithm), samples)
    apart = gradients(make_learner(trainable(architecture), algorithm, tokens_per_microbatch=1), samples)
    assert_same_gradient(shared, apart, tolerance=1e-4)
    assert_same_gradient(shared, naive_gradients(make_model(architecture), algorithm, samples), tolerance=1e-4)


def test_segments_too_large_to_group_have_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = compacted_group(turns=6, every=3)
    grouped = gradients(make_learner(trainable()), samples)
    monkeypatch.setattr(attention, "GROUPED_SCORES", 0)
    assert_same_gradient(gradients(make_learner(trainable()), samples), grouped)


def test_a_token_that_several_rows_learn_from_is_laid_out_once_and_counts_for_each() -> None:
    samples = compacted_group(attempts=2, turns=3, every=3)[:1]
    other = samples[0].with_(
        attempt=1, advantages=samples[0].advantages - 1, response_ids=samples[0].response_ids.copy()
    )
    both = [*samples, other]
    (batch,) = pack(both, weights=np.ones(2, dtype=np.float32), tokens_per_microbatch=1000)
    assert batch.num_tokens == num_unique(samples)
    half = len(batch.logit_index) // 2
    assert batch.logit_index[:half].tolist() == batch.logit_index[half:].tolist()
    assert batch.row.tolist() == [0] * half + [1] * half
    apart = gradients(make_learner(trainable(), tokens_per_microbatch=1), both)
    assert_same_gradient(gradients(make_learner(trainable()), both), apart, tolerance=1e-4)


def test_gspo_has_one_ratio_for_all_rows_of_an_attempt_however_they_are_packed() -> None:
    algorithm = Gspo(clip_low=0.5, clip_high=0.5)
    samples = same_advantage(compacted_group(turns=4, every=2))
    expected = naive_gradients(make_model(), algorithm, samples)
    for budget in (1, 60, 1000):
        learner = make_learner(trainable(), algorithm, tokens_per_microbatch=budget)
        assert_same_gradient(gradients(learner, samples), expected, tolerance=1e-4)
    batches = pack(
        samples, weights=np.ones(len(samples), dtype=np.float32), tokens_per_microbatch=1, whole_attempts=True
    )
    assert [batch.num_attempts for batch in batches] == [1, 1]


def test_a_ratio_counts_rows_whose_own_advantage_is_zero() -> None:
    algorithm = Gspo(clip_low=0.5, clip_high=0.5)
    samples = same_advantage(compacted_group(turns=4, every=2))
    samples[0] = samples[0].with_(advantages=np.zeros_like(samples[0].advantages))
    expected = naive_gradients(make_model(), algorithm, samples)
    assert_same_gradient(gradients(make_learner(trainable(), algorithm), samples), expected, tolerance=1e-4)


def test_scores_and_values_of_branches_are_those_of_rows_apart() -> None:
    samples = compacted_group(turns=6, every=3)
    together = make_learner(trainable()).score(samples)
    apart = make_learner(trainable(), tokens_per_microbatch=1).score(samples)
    for one, other, sample in zip(together, apart, samples, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert (one.logprobs[~sample.mask] == 0).all()
    values: list[Any] = []
    for budget in (1, 1000):
        critic = Critic(trainable(), section(tokens_per_microbatch=budget), algorithm=Ppo(), total_updates=10)
        with torch.no_grad():
            for head in critic.body.named.values():
                if head.shape[0] == 1:
                    head.copy_(torch.linspace(-1, 1, head.numel()).view_as(head))
        values.append([*critic.values(samples), np.array([critic.update(samples)["value_loss"]])])
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


class _Place:
    def __init__(self, rank: int, size: int) -> None:
        self.place = (rank, size)


@pytest.mark.parametrize("size", [2, 3])
def test_members_of_a_gang_never_divide_an_attempt(size: int) -> None:
    samples = compacted_group(attempts=5, turns=4, every=2)
    attempts = attempts_of(samples)
    shares = [share_rows(samples, range(len(samples)), _Place(rank, size)) for rank in range(size)]  # type: ignore[arg-type]
    assert sorted(row for share in shares for row in share) == list(range(len(samples)))
    of_member = [set(attempts[share].tolist()) for share in shares]
    assert sum(map(len, of_member)) == 5


def test_the_updates_of_a_learner_do_not_depend_on_the_budget() -> None:
    """Epochs and minibatches: old log-probs are scored first, over the same tree."""
    samples = [
        row.with_(old_logprobs=None) for draw in range(2) for row in compacted_group(draw=draw, turns=4, every=2)
    ]

    def metrics(budget: int) -> dict[str, float]:
        learner: Learner = make_learner(trainable(), tokens_per_microbatch=budget, minibatches=2)
        return learner.update(samples)

    one, other = metrics(1), metrics(1000)
    for name in ("loss", "mismatch", "entropy"):
        assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4)
