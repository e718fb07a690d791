"""Every algorithm on episodes with observations in the middle, branches and rewards along the way, against plain loops.

Nothing of ``rollcall.algo`` is used to compute what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from branching import make_branch, make_episode, make_group, make_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcall.algo import recipe
from rollcall.base.types import Completion, Group, Sample, attempts_of
from rollcall.config import Cispo, Dapo, DrGrpo, Grpo, Gspo, Intuitor, Ppo, ReinforcePlusPlus, Rloo
from rollcall.loop.samples import make_samples

LONGEST = 40
ALGORITHMS: list[Any] = [
    Grpo(), DrGrpo(), Dapo(dynamic_sampling=False), Gspo(clip_low=0.05, clip_high=0.1), Cispo(clip_low=0.2, clip_high=0.3), Rloo(),
    ReinforcePlusPlus(gamma=0.9), Ppo(gamma=0.95, lam=0.8), Intuitor(kl_coef=0.0),
]  # fmt: skip
GROUPS: list[Group] = [
    make_group(
        [
            make_episode([make_turn(2, 3, reward=0.5), make_turn(1, 2), make_turn(3, 0, reward=0.25)], seed=1, reward=0.5),
            make_episode([make_turn(1, 1, reward=-0.5), make_turn(2, 0)], seed=2,
                         branches=[make_branch([4, 9], [True, False, True], seed=3), make_branch([4, 8], [False, True], seed=4)]),
            make_episode([make_turn(4, 0, reward=0.75)], seed=5),
        ],
        [1.25, -0.5, 0.75],
        draw=0,
    ),
    make_group(
        [
            make_episode([make_turn(1, 2, reward=1.0), make_turn(2, 2, reward=1.0), make_turn(2, 0)], seed=6, reward=1.0),
            make_episode([make_turn(3, 1), make_turn(1, 0, reward=0.5)], seed=7,
                         branches=[make_branch([4, 7, 7], [True, True, False, True], seed=8)]),
        ],
        [3.0, 0.5],
        draw=1,
    ),
]  # fmt: skip
TURN_OF_BRANCHES = {(0, 1): [1, 2, 2, 1], (1, 1): [3, 1, 3]}  # sampled tokens, turn by turn and row by row


def value_of(sample: Sample) -> np.ndarray:
    return np.sin(np.arange(len(sample.mask)) + sample.response_ids).astype(np.float32)


def rows_of_step(algorithm: Any, *, weight: float = 1.0) -> list[Sample]:
    def values(samples: Any) -> list[np.ndarray]:
        return [value_of(sample) for sample in samples]

    return make_samples(
        GROUPS, algorithm=algorithm, max_response_tokens=LONGEST, reference=None, environment=None, environment_weight=weight,
        values=values if algorithm.name == "ppo" else None,
    )  # fmt: skip


# --- plain loops


def rows_of_attempt(completion: Completion) -> list[Any]:
    assert completion.episode is not None
    return [completion, *completion.episode.branches]


def steps_of_attempt(completion: Completion) -> list[tuple[int, int]]:
    """(row, token) of each sampled token, in time."""
    found = []
    for number, row in enumerate(rows_of_attempt(completion)):
        for place in range(len(row.token_ids)):
            if row.mask[place]:
                found.append((number, place))
    return found


def plain_rewards(completion: Completion, total: float) -> list[float]:
    """One for each sampled token: those of turns on the turn's last, the rest on the last of all."""
    assert completion.episode is not None
    rewards = [0.0] * len(steps_of_attempt(completion))
    position, given = -1, 0.0
    for turn in completion.episode.turns:
        position += turn.num_sampled
        if turn.reward is not None:
            rewards[position] += turn.reward
            given += turn.reward
    rewards[-1] += total - given
    return rewards


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def plain_compare(name: str, values: list[float]) -> list[float]:
    if len(values) == 1 or all(value == values[0] for value in values):
        return [0.0] * len(values)
    middle = mean(values)
    if name == "rloo":
        return [value - (sum(values) - value) / (len(values) - 1) for value in values]
    centred = [value - middle for value in values]
    if name == "dr_grpo":
        return centred
    deviation = math.sqrt(sum(value**2 for value in centred) / (len(values) - 1))
    return [value / (deviation + 1e-6) for value in centred]


def plain_advantages(algorithm: Any) -> tuple[list[list[list[float]]], list[list[list[float]]]]:
    """By group and attempt: the advantage of each sampled token, and the critic's targets."""
    advantages: list[list[list[float]]] = []
    targets: list[list[list[float]]] = []
    for group in GROUPS:
        totals = [score.value for score in group.scores]
        of_group: list[list[float]] = []
        of_targets: list[list[float]] = []
        if algorithm.name in ("reinforce_pp", "ppo"):
            for completion, total in zip(group.completions, totals, strict=True):
                rewards = plain_rewards(completion, total)
                values = [0.0] * len(rewards)
                if algorithm.name == "ppo":
                    rows = rows_of_attempt(completion)
                    values = [
                        math.sin(place + int(rows[row].token_ids[place])) for row, place in steps_of_attempt(completion)
                    ]
                found, after, value_after = [0.0] * len(rewards), 0.0, 0.0
                for step in reversed(range(len(rewards))):
                    if algorithm.name == "ppo":
                        delta = rewards[step] + algorithm.gamma * value_after - values[step]
                        after = delta + algorithm.gamma * algorithm.lam * after
                        value_after = values[step]
                    else:
                        after = rewards[step] + algorithm.gamma * after
                    found[step] = after
                of_group.append(found)
                of_targets.append([one + two for one, two in zip(found, values, strict=True)])
        else:
            for completion, number in zip(group.completions, plain_compare(algorithm.name, totals), strict=True):
                of_group.append([number] * len(steps_of_attempt(completion)))
        advantages.append(of_group)
        targets.append(of_targets)
    if algorithm.name in ("reinforce_pp", "ppo"):
        everything = [value for group in advantages for attempt in group for value in attempt]
        middle = mean(everything)
        variance = sum((value - middle) ** 2 for value in everything) / (len(everything) - 1)
        advantages = [
            [[(value - middle) / math.sqrt(variance + 1e-8) for value in attempt] for attempt in group]
            for group in advantages
        ]
    return advantages, targets


def numbers_of(seed: int) -> dict[tuple[int, int, int], float]:
    """A log-prob for each sampled token: (group, attempt, step)."""
    rng = np.random.default_rng(seed)
    return {
        (g, a, step): float(-2 + 0.3 * rng.standard_normal())
        for g, group in enumerate(GROUPS)
        for a, completion in enumerate(group.completions)
        for step in range(len(steps_of_attempt(completion)))
    }


def plain_loss(algorithm: Any, new: dict[Any, float], old: dict[Any, float]) -> tuple[float, dict[Any, float]]:
    """The loss of the step, and its gradient by each log-prob."""
    advantages, _ = plain_advantages(algorithm)
    attempts = [(g, a) for g, group in enumerate(GROUPS) for a in range(len(group.completions))]
    total_tokens = len(new)
    loss, gradient = 0.0, {}
    for g, a in attempts:
        steps = [key for key in new if key[:2] == (g, a)]
        sequence = math.exp(mean([new[key] - old[key] for key in steps]))
        for key in steps:
            if algorithm.name in ("grpo", "gspo", "intuitor"):
                weight = 1 / len(attempts) / len(steps)
            elif algorithm.name == "dr_grpo":
                weight = 1 / len(attempts) / LONGEST
            else:
                weight = 1 / total_tokens
            advantage = advantages[g][a][key[2]]
            ratio = sequence if algorithm.name == "gspo" else math.exp(new[key] - old[key])
            held = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
            if algorithm.name == "cispo":
                loss -= weight * held * advantage * new[key]
                gradient[key] = -weight * held * advantage
            elif ratio * advantage <= held * advantage:
                loss -= weight * ratio * advantage
                gradient[key] = -weight * ratio * advantage
            else:
                loss -= weight * held * advantage
                gradient[key] = 0.0
    return loss, gradient


# --- the comparison


def in_rows(per_attempt: list[list[list[float]]]) -> list[np.ndarray]:
    """Numbers of sampled tokens as [T] of each row, with 0 elsewhere."""
    found: list[np.ndarray] = []
    for group, of_group in zip(GROUPS, per_attempt, strict=True):
        for completion, numbers in zip(group.completions, of_group, strict=True):
            rows = [np.zeros(len(row.token_ids)) for row in rows_of_attempt(completion)]
            for (row, place), number in zip(steps_of_attempt(completion), numbers, strict=True):
                rows[row][place] = number
            found += rows
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_advantages_are_those_of_plain_loops(algorithm: Any) -> None:
    samples = rows_of_step(algorithm)
    assert [(sample.draw, sample.attempt) for sample in samples] == [
        (0, 0), (0, 1), (0, 1), (0, 1), (0, 2), (1, 0), (1, 1), (1, 1)
    ]  # fmt: skip
    advantages, targets = plain_advantages(algorithm)
    for sample, expected in zip(samples, in_rows(advantages), strict=True):
        np.testing.assert_allclose(sample.advantages, expected, atol=1e-5)
    if algorithm.name == "ppo":
        for sample, expected in zip(samples, in_rows(targets), strict=True):
            assert sample.returns is not None
            np.testing.assert_allclose(sample.returns, expected, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_the_loss_and_its_gradient_are_those_of_plain_loops(algorithm: Any) -> None:
    new, old = numbers_of(1), numbers_of(2)
    samples = rows_of_step(algorithm)
    counts = np.array([int(sample.mask.sum()) for sample in samples])
    weights = recipe.loss_weights(
        algorithm, num_loss_tokens=counts, attempts=attempts_of(samples), max_response_tokens=LONGEST
    )
    logprobs = torch.tensor(list(new.values()), dtype=torch.float64, requires_grad=True)
    result = recipe.policy_loss(
        algorithm,
        logprobs=logprobs,
        old_logprobs=torch.tensor(list(old.values()), dtype=torch.float64),
        behaviour_logprobs=torch.tensor(list(old.values()), dtype=torch.float64),
        reference_logprobs=None,
        advantages=torch.from_numpy(np.concatenate([sample.advantages[sample.mask] for sample in samples])).double(),
        weights=torch.from_numpy(np.repeat(weights, counts)).double(),
        attempt=torch.from_numpy(np.repeat(attempts_of(samples), counts)),
        num_attempts=5,
        entropy=None,
    )
    result.loss.backward()
    loss, gradient = plain_loss(algorithm, new, old)
    assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), [gradient[key] for key in new], atol=1e-7)
    assert any(value == 0 for value in gradient.values()) or algorithm.name == "cispo", "some token is clipped"


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_advantages_of_turns_are_those_of_plain_loops(name: str, gamma: float) -> None:
    classes = {algorithm.name: type(algorithm) for algorithm in ALGORITHMS}
    samples = rows_of_step(classes[name](advantage="turn", gamma=gamma))
    expected: list[list[list[float]]] = []
    for g, group in enumerate(GROUPS):
        returns: list[list[float]] = []
        sizes: list[list[int]] = []
        for a, (completion, score) in enumerate(zip(group.completions, group.scores, strict=True)):
            assert completion.episode is not None
            rewards = [turn.reward or 0.0 for turn in completion.episode.turns]
            size = [turn.num_sampled for turn in completion.episode.turns]
            branches = sum(TURN_OF_BRANCHES.get((g, a), size)) - sum(size)
            if branches:  # a last turn, of which the environment says nothing
                rewards.append(0.0)
                size.append(branches)
            rewards[-1] += score.value - sum(rewards)
            returns.append(
                [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]
            )
            sizes.append(size)
        numbers = [[0.0] * len(one) for one in returns]
        for k in range(max(map(len, returns))):
            there = [a for a in range(len(returns)) if len(returns[a]) > k]
            for a, number in zip(there, plain_compare(name, [returns[a][k] for a in there]), strict=True):
                numbers[a][k] = number
        expected.append(
            [[number for number, count in zip(of_attempt, size, strict=True) for _ in range(count)]
             for of_attempt, size in zip(numbers, sizes, strict=True)]
        )  # fmt: skip
    for sample, wanted in zip(samples, in_rows(expected), strict=True):
        np.testing.assert_allclose(sample.advantages, wanted, atol=1e-5)


def test_rewards_that_the_score_does_not_count_stay_out_of_the_turns() -> None:
    """Without a weight for the environment's rewards the whole score comes at the end."""
    with_turns, without = (
        rows_of_step(ReinforcePlusPlus(gamma=0.5)),
        rows_of_step(ReinforcePlusPlus(gamma=0.5), weight=0.0),
    )
    assert not np.allclose(with_turns[0].advantages, without[0].advantages)
    last = np.flatnonzero(without[0].mask)
    raw = [1.25 * 0.5 ** (len(last) - 1 - step) for step in range(len(last))]
    steps = np.diff(without[0].advantages[last]) / np.diff(raw)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-3)


FLOAT = st.floats(-100, 100, allow_subnormal=False)
GROUP_ALGORITHMS = [algorithm for algorithm in ALGORITHMS if algorithm.name not in ("ppo", "reinforce_pp")]


def advantages_of(algorithm: Any, attempts: Sequence[tuple[list[float], float]], *, weight: float) -> list[np.ndarray]:
    """Per attempt. An attempt is the rewards of its turns and that of its end, scored as the scorer does. Two tokens a turn."""
    completions = [
        make_episode([make_turn(2, 1, reward=reward) for reward in along], seed=seed, reward=end)
        for seed, (along, end) in enumerate(attempts)
    ]
    group = make_group(completions, [weight * (sum(along) + end) for along, end in attempts])
    rows = make_samples(
        [group], algorithm=algorithm, max_response_tokens=LONGEST, reference=None, values=None, environment=None,
        environment_weight=weight,
    )  # fmt: skip
    return [row.advantages[row.mask] for row in rows]


@given(rewards=st.lists(FLOAT, min_size=1, max_size=5), order=st.randoms(use_true_random=False), weight=FLOAT)
@settings(max_examples=20, deadline=None)
def test_rewards_that_are_equal_but_for_rounding_give_exact_zeros(
    rewards: list[float], order: Any, weight: float
) -> None:
    orders = [order.sample(rewards, len(rewards)) for _ in range(4)]
    last_turn_scores_0 = [([*along, 0.0], 0.0) for along in orders]
    for algorithm in GROUP_ALGORITHMS:
        assert not any(map(np.any, advantages_of(algorithm, last_turn_scores_0, weight=weight)))
        if not isinstance(algorithm, Intuitor):
            turn = algorithm.model_copy(update={"advantage": "turn"})
            for numbers in advantages_of(turn, last_turn_scores_0, weight=weight):
                assert not numbers[:2].any() and not numbers[-2:].any(), (
                    "the same return from the first turn and from the last"
                )
    at_the_end = [([0.0] * 3 + along[:1], sum(along[1:])) for along in orders]
    assert not any(map(np.any, advantages_of(ReinforcePlusPlus(), at_the_end, weight=weight)))
