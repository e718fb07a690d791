"""Groups into training rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollcall.algo.shaping import has_signal, shaped_rewards
from rollcall.base.types import Completion, FinishReason, Floats, Group, Prompt, Sample, Score, Segment
from rollcall.config import Dapo, DrGrpo, Grpo, Ppo, ReinforcePlusPlus
from rollcall.learner.learner import TokenScores
from rollcall.loop.samples import make_samples

LONGEST = 8


def make_group(draw: int, rewards: list[float], lengths: list[int]) -> Group:
    """Completions whose tokens and log-probs tell which they are; the second token of each is not the policy's."""
    completions = tuple(
        Completion(
            token_ids=np.arange(length, dtype=np.int32) + 10 * index,
            logprobs=-np.arange(1, length + 1, dtype=np.float32),
            mask=np.arange(length) != 1,
            segments=(Segment(version=0, num_tokens=length),),
            finish=FinishReason.STOP,
            seed=index,
            text="x",
            episode=None,
        )
        for index, length in enumerate(lengths)
    )
    return Group(
        step=1,
        draw=draw,
        prompt=Prompt(id=f"p{draw}", token_ids=np.array([draw + 4], dtype=np.int32), text="?", answer="!", metadata={}),
        completions=completions,
        scores=tuple(Score(value=reward, parts={}, errors={}) for reward in rewards),
        started_s=0.0,
        finished_s=0.0,
        worker="local",
    )


GROUPS = [make_group(3, [1.0, 0.0], [3, 4]), make_group(5, [0.0, 0.0, 3.0], [2, 1, 5])]


def rows_of(algorithm: Any, groups: list[Group] = GROUPS, **functions: Any) -> list[Sample]:
    given = {"reference": None, "values": None, "environment": None, "environment_weight": 0.0, **functions}
    return make_samples(groups, algorithm=algorithm, max_response_tokens=LONGEST, **given)


def constant_scores(samples: Sequence[Sample], value: float) -> list[TokenScores]:
    rows = [np.full(len(sample.response_ids), value, dtype=np.float32) for sample in samples]
    return [TokenScores(logprobs=row, entropy=row, certainty=row) for row in rows]


def test_rows_follow_groups_and_completions_in_order() -> None:
    samples = rows_of(DrGrpo())
    assert [sample.draw for sample in samples] == [3, 3, 5, 5, 5]
    completions = [completion for group in GROUPS for completion in group.completions]
    for sample, completion in zip(samples, completions, strict=True):
        assert sample.response_ids is completion.token_ids and sample.behaviour_logprobs is completion.logprobs
        assert sample.mask is completion.mask
    assert [sample.prompt_ids.tolist() for sample in samples] == [[7], [7], [9], [9], [9]]
    for sample in samples:
        assert sample.old_logprobs is sample.reference_logprobs is sample.returns is sample.values is None


def test_advantages_compare_within_the_group_and_are_zero_outside_the_mask() -> None:
    samples = rows_of(DrGrpo())
    for sample, advantage in zip(samples, [0.5, -0.5, -1.0, -1.0, 2.0], strict=True):
        np.testing.assert_allclose(sample.advantages, np.where(sample.mask, advantage, 0.0))


def test_the_reference_is_asked_once_for_all_rows() -> None:
    calls: list[int] = []

    def reference(samples: Sequence[Sample]) -> list[TokenScores]:
        calls.append(len(samples))
        return constant_scores(samples, -0.25)

    samples = rows_of(Grpo(kl_coef=0.1), reference=reference)
    assert calls == [5]
    assert all((sample.reference_logprobs == -0.25).all() for sample in samples)


def test_a_kl_in_the_reward_is_taken_off_before_comparing() -> None:
    def reference(samples: Sequence[Sample]) -> list[TokenScores]:
        return constant_scores(samples, -1.0)

    algorithm = DrGrpo(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    samples = rows_of(algorithm, [make_group(0, [1.0, 0.0], [1, 3])], reference=reference)
    # k1 is behaviour - reference: 0 for the first completion; 0 and -2 for the unmasked tokens of the second.
    rewards = np.array([1.0 - 0.1 * 0.0, 0.0 - 0.1 * (0.0 - 2.0)])
    expected = rewards - rewards.mean()
    assert samples[0].advantages[0] == pytest.approx(expected[0]) and samples[1].advantages[0] == pytest.approx(
        expected[1]
    )
    plain = rows_of(DrGrpo(kl_coef=0.1, kl_in="loss"), [make_group(0, [1.0, 0.0], [1, 3])], reference=reference)
    assert plain[0].advantages[0] == pytest.approx(0.5), "a KL in the loss leaves the reward alone"


def test_ppo_rows_carry_values_and_returns() -> None:
    def values(samples: Sequence[Sample]) -> list[Floats]:
        return [np.full(len(sample.response_ids), 0.5, dtype=np.float32) for sample in samples]

    for sample in rows_of(Ppo(), values=values):
        assert sample.values is not None and (sample.values == 0.5).all()
        assert sample.returns is not None and len(sample.returns) == len(sample.response_ids)
    with pytest.raises(AssertionError, match="earlier stage"):
        rows_of(Ppo())


def test_batch_normalised_advantages_have_no_mean_over_the_whole_step() -> None:
    samples = rows_of(ReinforcePlusPlus())
    tokens = np.concatenate([sample.advantages[sample.mask] for sample in samples])
    assert tokens.mean() == pytest.approx(0, abs=1e-5) and tokens.std() == pytest.approx(1, rel=0.1)


def test_the_overlong_punishment_grows_over_the_buffer() -> None:
    group = make_group(0, [1.0, 1.0, 1.0, 1.0], [4, 5, 6, 8])
    algorithm = Dapo(dynamic_sampling=False, overlong_buffer=4, overlong_penalty=2.0)
    np.testing.assert_allclose(shaped_rewards(group, algorithm, LONGEST), [1.0, 0.5, 0.0, -1.0])
    np.testing.assert_allclose(shaped_rewards(group, Dapo(), LONGEST), [1.0] * 4)
    assert group.rewards.tolist() == [1.0] * 4, "the group itself keeps its rewards"
    samples = rows_of(algorithm, [group])
    assert samples[0].advantages[0] > 0 > samples[3].advantages[0]


def test_a_group_has_signal_when_its_rewards_differ_before_the_overlong_punishment() -> None:
    assert has_signal(make_group(0, [1.0, 0.0], [2, 2]))
    short_and_long = make_group(0, [1.0, 1.0], [2, 8])
    assert not has_signal(short_and_long)
    # What dynamic sampling leaves out teaches nothing, even where it stands in for a step; without it, length does.
    assert not any(sample.advantages.any() for sample in rows_of(Dapo(overlong_buffer=4), [short_and_long]))
    without = Dapo(overlong_buffer=4, dynamic_sampling=False)
    assert rows_of(without, [short_and_long])[0].advantages[0] > 0


def test_empty_completions_become_rows_without_tokens() -> None:
    samples = rows_of(Grpo(), [make_group(0, [1.0, 0.0], [0, 3])])
    assert len(samples[0].advantages) == 0 and len(samples[1].advantages) == 3
