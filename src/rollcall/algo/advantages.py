"""Advantages: how much better than expected each completion, or each of its tokens, did. NumPy computes them on the host.

Rewards stay float64 until they are compared; advantages are float32. Axes: G completions in a group, T tokens in a completion.
Every token function takes the loss mask and skips masked-out tokens (tool or user turns) as if they were not
there; their entries in the result are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollcall.base.types import Bools, Doubles, Floats

STD_EPSILON = 1e-6  # added to a group's standard deviation, which has the scale of the rewards
VARIANCE_EPSILON = 1e-8  # added to a batch's variance
ROUNDING = 1e-12  # relative to the size of the rewards; a smaller difference between float64 sums counts as rounding


def all_equal(values: NDArray[np.floating], *, size: float = 0.0) -> bool:
    """Whether the values are equal up to rounding, or there are fewer than two. ``size`` is the largest term in the sums that the values
    come from: even if large terms have cancelled out, their rounding errors remain.

    >>> all_equal(np.array([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1])), all_equal(np.array([0.6, 0.6000001]))
    (True, False)
    """
    return len(values) == 0 or bool(np.ptp(values) <= ROUNDING * max(size, np.abs(values).max()))


def group_normalized(rewards_G: NDArray[np.floating]) -> Floats:
    """GRPO (arXiv:2402.03300): rewards minus the group's mean, divided by its (unbiased) standard deviation.

    The result is all zeros if all rewards are equal or there is only one.

    >>> group_normalized(np.array([1.0, 0.0, 0.0, 1.0], dtype=np.float32)).round(3).tolist()
    [0.8659999966621399, -0.8659999966621399, -0.8659999966621399, 0.8659999966621399]
    >>> group_normalized(np.array([0.1, 0.1, 0.1], dtype=np.float32)).tolist()
    [0.0, 0.0, 0.0]
    """
    if all_equal(rewards_G):
        return np.zeros(len(rewards_G), dtype=np.float32)
    rewards = rewards_G.astype(np.float64)
    return ((rewards - rewards.mean()) / (rewards.std(ddof=1) + STD_EPSILON)).astype(np.float32)


def group_centered(rewards_G: NDArray[np.floating]) -> Floats:
    """Dr. GRPO (arXiv:2503.20783): rewards minus the group's mean, without dividing by the standard deviation.

    >>> group_centered(np.array([1.0, 0.0, 0.0, 1.0], dtype=np.float32)).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    if all_equal(rewards_G):
        return np.zeros(len(rewards_G), dtype=np.float32)
    rewards = rewards_G.astype(np.float64)
    return (rewards - rewards.mean()).astype(np.float32)


def leave_one_out(rewards_G: NDArray[np.floating]) -> Floats:
    """RLOO (arXiv:2402.14740): each reward minus the mean of the others; 0 for the only completion of a group.

    >>> leave_one_out(np.array([3.0, 0.0, 0.0], dtype=np.float32)).tolist()
    [3.0, -1.5, -1.5]
    """
    if all_equal(rewards_G):
        return np.zeros(len(rewards_G), dtype=np.float32)
    rewards = rewards_G.astype(np.float64)
    others_mean = (rewards.sum() - rewards) / (len(rewards) - 1)
    return (rewards - others_mean).astype(np.float32)


def token_rewards(
    reward: float, kl_T: Floats | None, *, kl_coef: float, mask_T: Bools, along: Sequence[tuple[int, float]] = ()
) -> Doubles:
    """Put the scalar reward on the last loss token and subtract ``kl_coef`` times the KL on each loss token.

    This is the per-token reward of PPO for language models (arXiv:2203.02155) and REINFORCE++ (arXiv:2501.03262). ``kl_T=None`` means no
    KL. A completion without loss tokens gets no reward on any token. ``along`` lists the parts of the reward that are given earlier, each
    with the index of the loss token that gets it.

    >>> kl = np.array([0.5, 9.0, 1.0], dtype=np.float32)
    >>> token_rewards(1.0, kl, kl_coef=0.5, mask_T=np.array([True, False, True])).tolist()
    [-0.25, 0.0, 0.5]
    >>> token_rewards(1.0, None, kl_coef=0, mask_T=np.array([True, False, True, True]), along=[(0, 0.25)]).tolist()
    [0.25, 0.0, 0.0, 0.75]
    """
    rewards = np.zeros(len(mask_T))
    if kl_T is not None:
        rewards[mask_T] = -kl_coef * kl_T[mask_T]
    loss_tokens = np.flatnonzero(mask_T)
    if len(loss_tokens):
        for place, part in along:
            rewards[loss_tokens[place]] += part
        rewards[loss_tokens[-1]] += reward - sum(part for _, part in along)
    return rewards


def discounted_returns(token_rewards_T: NDArray[np.floating], mask_T: Bools, *, gamma: float) -> Doubles:
    """Reward to go: ``R_t = r_t + gamma * R_next``, where next is the next loss token (arXiv:2501.03262).

    >>> mask = np.array([True, False, True])
    >>> discounted_returns(np.array([1.0, 9.0, 2.0], dtype=np.float32), mask, gamma=0.5).tolist()
    [2.0, 0.0, 2.0]
    """
    returns: list[float] = []
    to_go = 0.0
    # Plain lists: indexing numpy scalars in a Python loop is several times slower.
    for reward in reversed(token_rewards_T[mask_T].tolist()):
        to_go = reward + gamma * to_go
        returns.append(to_go)
    return _scatter(returns[::-1], mask_T)


def gae(
    token_rewards_T: NDArray[np.floating], values_T: Floats, mask_T: Bools, *, gamma: float, lam: float
) -> tuple[Doubles, Doubles]:
    """Generalised advantage estimation (arXiv:1506.02438): advantages, and the critic's returns.

    ``delta_t = r_t + gamma * V_next - V_t`` and ``A_t = delta_t + gamma * lam * A_next``, where next is the next loss
    token and both are 0 after the last one; ``returns = A + V``. The advantages are not whitened: see :func:`batch_normalized`.

    >>> rewards, values = np.array([0.0, 1.0], dtype=np.float32), np.array([0.5, 0.5], dtype=np.float32)
    >>> advantages, returns = gae(rewards, values, np.array([True, True]), gamma=1.0, lam=0.5)
    >>> advantages.tolist(), returns.tolist()
    ([0.25, 0.5], [0.75, 1.0])
    """
    advantages: list[float] = []
    next_value, next_advantage = 0.0, 0.0
    values = values_T[mask_T].tolist()
    for reward, value in zip(reversed(token_rewards_T[mask_T].tolist()), reversed(values), strict=True):
        delta = reward + gamma * next_value - value
        next_advantage = delta + gamma * lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    returns = [advantage + value for advantage, value in zip(reversed(advantages), values, strict=True)]
    return _scatter(advantages[::-1], mask_T), _scatter(returns, mask_T)


def batch_normalized(values: list[Doubles], masks: list[Bools], *, size: float = 0.0) -> list[Floats]:
    """Normalise to mean 0 and (unbiased) variance 1 over all loss tokens in the batch. There is one [T] array per completion.

    REINFORCE++ (arXiv:2501.03262) does this to token returns; PPO does it to GAE's advantages, where it is called whitening.
    The result is all zeros if all values are equal (``size`` as in :func:`all_equal`) or there are fewer than two loss tokens.

    >>> values = [np.array([1.0, 5.0]), np.array([3.0])]
    >>> [x.tolist() for x in batch_normalized(values, [np.array([True, False]), np.array([True])])]
    [[-0.7071067690849304, 0.0], [0.7071067690849304]]
    """
    chosen = [array[mask] for array, mask in zip(values, masks, strict=True)]
    flat = np.concatenate([np.zeros(0), *chosen])
    normalized = np.zeros(len(flat))
    if not all_equal(flat, size=size):
        normalized = (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + VARIANCE_EPSILON)
    ends = np.cumsum([len(part) for part in chosen])
    parts = np.split(normalized, ends[:-1]) if chosen else []
    return [_scatter(part, mask).astype(np.float32) for part, mask in zip(parts, masks, strict=True)]


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476): a number from 0 to ``-penalty`` to add to the reward.

    It is 0 up to ``max_tokens - buffer`` tokens, then falls linearly to ``-penalty`` at ``max_tokens``.
    ``buffer=0`` turns it off.

    >>> [overlong_penalty(n, max_tokens=100, buffer=20, penalty=1.0) for n in (80, 90, 100)]
    [0.0, -0.5, -1.0]
    """
    assert buffer <= max_tokens, "a run file cannot set a longer buffer"
    exceeded = num_tokens - (max_tokens - buffer)
    if buffer == 0 or exceeded <= 0:
        return 0.0
    return -penalty * min(exceeded / buffer, 1.0)


def _scatter(values: list[float] | Doubles, mask_T: Bools) -> Doubles:
    """Put one value on each loss token, and zeros on all other tokens."""
    whole = np.zeros(len(mask_T))
    whole[mask_T] = values
    return whole
