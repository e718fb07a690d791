"""The only place that maps the run file's algorithm to its advantage, its aggregation and its loss.

The controller calls ``compute_advantages`` once per step on all groups; packing calls ``loss_weights`` once per
optimizer update on all rows; the learner calls ``policy_loss`` (and ``value_loss``) once per micro-batch. Losses
and metrics are plain sums, so micro-batches and ranks add up to the full batch however it was split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollcall.algo import advantages as adv
from rollcall.algo import losses
from rollcall.algo.shaping import COMPARE, TurnRewards
from rollcall.base.types import Bools, Doubles, Floats, Longs
from rollcall.config import (
    Algorithm,
    Cispo,
    Dapo,
    DrGrpo,
    GroupAlgorithm,
    Grpo,
    Gspo,
    Intuitor,
    Ppo,
    ReinforcePlusPlus,
    Rloo,
)

# Axes: the groups, the attempts of each group, and the tokens of each attempt (of all its rows).
Masks = list[list[Bools]]
PerToken = list[list[Floats]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """The targets for one attempt's tokens. Entries outside the loss mask are 0."""

    advantages: Floats  # [T]
    returns: Floats | None  # [T] the critic's target, if there is a critic


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoss:
    """A micro-batch's part of the policy loss.

    Each metric is a weighted sum over tokens: add the sums over micro-batches and ranks, then divide by the total
    ``weight`` to get the mean. (``weight`` adds up to 1 in an update, except for Dr. GRPO.)
    """

    loss: Tensor  # scalar, carries the gradient
    metrics: dict[str, Tensor]  # scalars, detached; docs/algorithms.md explains them


def compute_advantages(
    algorithm: Algorithm,
    *,
    rewards: list[Doubles],
    masks: Masks,
    kl: PerToken | None,
    values: PerToken | None,
    turns: list[list[TurnRewards]] | None = None,
) -> list[list[TokenAdvantages]]:
    """Compute advantages for every token. Pass all groups of a step: REINFORCE++ and PPO normalise over the batch.

    The rows of an attempt are treated as one sequence, in order of time. ``turns`` contains the parts of the rewards that attempts get
    before their end. Without it, attempts get their whole reward at the end. Only algorithms that compare turns or tokens use ``turns``.
    ``kl`` is each token's estimated KL to the reference, used only with ``kl_in="reward"`` and ``kl_coef > 0``. ``values`` come from the
    critic; only PPO needs them.

    >>> rewards = [np.array([1.0, 0.0])]
    >>> masks = [[np.array([True, True]), np.array([True, False, True])]]
    >>> group = compute_advantages(DrGrpo(), rewards=rewards, masks=masks, kl=None, values=None)[0]
    >>> [token.advantages.tolist() for token in group]
    [[0.5, 0.5], [-0.5, 0.0, -0.5]]
    """
    if algorithm.kl_in == "loss" or algorithm.kl_coef == 0:
        kl = None
    else:
        assert kl is not None, f"{algorithm.name} subtracts the KL from the rewards, so compute_advantages needs it"
    if isinstance(algorithm, ReinforcePlusPlus | Ppo):
        return _batch_advantages(algorithm, rewards=rewards, masks=masks, kl=kl, values=values, turns=turns)
    if isinstance(algorithm, GroupAlgorithm) and algorithm.advantage == "turn":
        assert turns is not None, "the advantages of turns cannot be computed without ``turns``"
        found = _turn_advantages(algorithm, rewards=rewards, masks=masks, kl=kl, turns=turns)
    else:
        found = _group_advantages(algorithm, rewards=rewards, masks=masks, kl=kl)
    return [[TokenAdvantages(advantages=advantages_T, returns=None) for advantages_T in group] for group in found]


def loss_weights(
    algorithm: Algorithm,
    *,
    num_loss_tokens: NDArray[np.integer[Any]],
    max_response_tokens: int,
    attempts: Longs | None = None,
) -> Floats:
    """Compute the weight of each row's tokens, [rows], so that an update's loss is ``sum_t weight * loss_t``.

    Pass all rows of one optimizer update, over all ranks and micro-batches. ``attempts`` says which attempt each row belongs to. All rows
    of an attempt together count as one. Without ``attempts``, each row is an attempt. An attempt without loss tokens has weight 0 and
    does not count.

    >>> lengths = np.array([1, 4, 0])
    >>> loss_weights(Grpo(), num_loss_tokens=lengths, max_response_tokens=8).tolist()
    [0.5, 0.125, 0.0]
    >>> loss_weights(Dapo(), num_loss_tokens=lengths, max_response_tokens=8).round(3).tolist()
    [0.20000000298023224, 0.20000000298023224, 0.0]
    >>> loss_weights(DrGrpo(), num_loss_tokens=lengths, max_response_tokens=8).tolist()
    [0.0625, 0.0625, 0.0]
    >>> loss_weights(Grpo(), num_loss_tokens=np.array([1, 3, 2]), max_response_tokens=8, attempts=np.array([0, 0, 1])).tolist()
    [0.125, 0.125, 0.25]
    """
    lengths = num_loss_tokens.astype(np.float64)
    per_attempt = lengths if attempts is None else np.bincount(attempts, weights=lengths)
    num_attempts = max(int((per_attempt > 0).sum()), 1)
    match algorithm:
        case Grpo() | Intuitor() | Gspo():
            of_attempt = lengths if attempts is None else per_attempt[attempts]
            weights = 1.0 / (num_attempts * np.maximum(of_attempt, 1.0))
        case DrGrpo():
            weights = np.full(len(lengths), 1.0 / (num_attempts * max_response_tokens))
        case Dapo() | Cispo() | ReinforcePlusPlus() | Ppo() | Rloo():
            weights = np.full(len(lengths), 1.0 / max(lengths.sum(), 1.0))
    return np.where(lengths > 0, weights, 0.0).astype(np.float32)


def policy_loss(
    algorithm: Algorithm,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    behaviour_logprobs: Tensor,
    reference_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    attempt: Tensor,
    num_attempts: int,
    entropy: Tensor | None,
) -> BatchLoss:
    """Compute a micro-batch's policy loss: surrogate, importance correction, KL, entropy bonus. Tensors are [L].

    The ratio is relative to ``old_logprobs`` or, if there are none, to this forward pass's own log-probs (so it is 1). With
    ``algorithm.old_logprobs="engine"``, it is relative to the behaviour log-probs. For GSPO, attempts must be complete, because it
    averages over them. Truncated importance weights multiply only the surrogate. The mismatch mask applies to every term.

    >>> logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    >>> result = policy_loss(
    ...     Grpo(), logprobs=logprobs, old_logprobs=None, behaviour_logprobs=logprobs.detach(), reference_logprobs=None,
    ...     advantages=torch.tensor([1.0, -1.0]), weights=torch.tensor([0.5, 0.5]), attempt=torch.tensor([0, 1]),
    ...     num_attempts=2, entropy=None,
    ... )
    >>> result.loss.backward()
    >>> logprobs.grad
    tensor([-0.5000,  0.5000])
    """
    if algorithm.old_logprobs == "engine":
        old_logprobs = behaviour_logprobs
    base = logprobs.detach() if old_logprobs is None else old_logprobs
    token = _surrogate(
        algorithm, logprobs, base=base, advantages=advantages, attempt=attempt, num_attempts=num_attempts
    )
    metrics: dict[str, Tensor] = {"weight": weights.sum()}

    def measure(name: str, values: Tensor) -> None:
        metrics[name] = (weights * values.detach()).sum()

    surrogate, kept = token.loss, weights
    if algorithm.tis_cap is not None:
        tis = losses.truncated_weights(base, behaviour_logprobs, cap=algorithm.tis_cap)
        surrogate = surrogate * tis
        measure("tis_weight_mean", tis)
    if algorithm.mismatch_mask is not None:
        low, high = algorithm.mismatch_mask
        keep = losses.mismatch_mask(base, behaviour_logprobs, low=low, high=high)
        kept = weights * keep
        measure("masked_fraction", 1 - keep)
    loss = (kept * surrogate).sum()

    kl_in_loss = algorithm.kl_in == "loss" and algorithm.kl_coef > 0
    assert reference_logprobs is not None or not kl_in_loss, (
        f"{algorithm.name} adds the KL to the loss, so it needs the reference"
    )
    if reference_logprobs is not None:
        kl = losses.kl_estimate(logprobs, reference_logprobs, estimator=algorithm.kl_estimator)
        measure("kl", kl)
        if kl_in_loss:
            loss = loss + algorithm.kl_coef * (kept * kl).sum()
    assert entropy is not None or algorithm.entropy_coef == 0, (
        f"{algorithm.name} has an entropy bonus, so it needs the entropy"
    )
    if entropy is not None:
        measure("entropy", entropy)
        if algorithm.entropy_coef > 0:
            loss = loss - algorithm.entropy_coef * (kept * entropy).sum()

    measure("clip_fraction", token.clipped)
    measure("ratio_mean", token.ratio)
    measure("approx_kl", base - logprobs)
    return BatchLoss(loss=loss, metrics=metrics)


def value_loss(algorithm: Ppo, *, values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor) -> Tensor:
    """Compute a micro-batch's critic loss: half the squared difference between values and returns. Tensors are [L]; the advantages
    were computed from ``old_values``.

    With ``value_clip``, a token's error is the larger of this one and that of the value clamped to within ``value_clip`` of the old
    value, so a step gains nothing by moving the value further (PPO's value clipping; arXiv:2005.12729 discusses its use).

    >>> values, half = torch.tensor([1.0, 0.6]), torch.tensor([0.5, 0.5])
    >>> value_loss(Ppo(), values=values, old_values=half, returns=torch.ones(2), weights=half)
    tensor(0.0625)
    """
    error = (values - returns).square()
    if algorithm.value_clip is not None:
        held = values.clamp(old_values - algorithm.value_clip, old_values + algorithm.value_clip)
        error = torch.maximum(error, (held - returns).square())
    return (weights * (0.5 * error)).sum()


def _surrogate(
    algorithm: Algorithm, logprobs: Tensor, *, base: Tensor, advantages: Tensor, attempt: Tensor, num_attempts: int
) -> losses.TokenLoss:
    low, high, dual_clip = algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
    if isinstance(algorithm, Cispo):
        assert dual_clip is None, "a run file cannot combine dual_clip with cispo"
        return losses.cispo_policy_loss(
            logprobs, old_logprobs=base, advantages=advantages, clip_low=low, clip_high=high
        )
    if isinstance(algorithm, Gspo):
        ratio = losses.sequence_ratio(logprobs, base, attempt=attempt, num_attempts=num_attempts)
    else:
        ratio = losses.bounded_ratio(logprobs, base)
    return losses.clipped_policy_loss(ratio, advantages=advantages, clip_low=low, clip_high=high, dual_clip=dual_clip)


def _group_advantages(algorithm: Algorithm, *, rewards: list[Doubles], masks: Masks, kl: PerToken | None) -> PerToken:
    """Compute one number per attempt, from its group alone, and put it on each loss token of the attempt."""
    compare, out = COMPARE[algorithm.name], []
    for i, (rewards_G, masks_G) in enumerate(zip(rewards, masks, strict=True)):
        if kl is not None:
            divergence_G = [float(kl_T[mask_T].sum()) for kl_T, mask_T in zip(kl[i], masks_G, strict=True)]
            rewards_G = rewards_G - algorithm.kl_coef * np.array(divergence_G)
        scalars_G = compare(rewards_G)
        out.append([np.where(mask_T, scalar, np.float32(0)) for scalar, mask_T in zip(scalars_G, masks_G, strict=True)])
    return out


def _turn_advantages(
    algorithm: Grpo | DrGrpo | Dapo | Gspo | Cispo | Rloo,
    *,
    rewards: list[Doubles],
    masks: Masks,
    kl: PerToken | None,
    turns: list[list[TurnRewards]],
) -> PerToken:
    """Compute one number per turn: its discounted return, compared with that of the same turn in other attempts that got this far."""
    compare, out = COMPARE[algorithm.name], []
    for i, (rewards_G, masks_G, turns_G) in enumerate(zip(rewards, masks, turns, strict=True)):
        returns_G: list[Doubles] = []
        size = _largest(rewards_G, turns_G)
        for j, (reward, mask_T, turn) in enumerate(zip(rewards_G, masks_G, turns_G, strict=True)):
            each = turn.rewards.copy()
            each[-1] += reward - each.sum()
            if kl is not None and mask_T.any():
                of_token = np.repeat(np.arange(len(each)), turn.num_sampled)
                each -= algorithm.kl_coef * np.bincount(of_token, weights=kl[i][j][mask_T], minlength=len(each))
            returns_G.append(adv.discounted_returns(each, np.ones(len(each), dtype=np.bool_), gamma=algorithm.gamma))
        numbers_G = [np.zeros(len(returns), dtype=np.float32) for returns in returns_G]
        for place in range(max((len(returns) for returns in returns_G), default=0)):
            there = [j for j, returns in enumerate(returns_G) if len(returns) > place]
            returns = np.array([returns_G[j][place] for j in there])
            if adv.all_equal(returns, size=size):
                continue
            for j, number in zip(there, compare(returns), strict=True):
                numbers_G[j][place] = number
        out.append([_spread(*each) for each in zip(numbers_G, turns_G, masks_G, strict=True)])
    return out


def _spread(numbers: Floats, turn: TurnRewards, mask_T: Bools) -> Floats:
    """Assign each turn's number to all of its loss tokens. A fully masked attempt has no loss tokens."""
    advantages = np.zeros(len(mask_T), dtype=np.float32)
    if mask_T.any():
        advantages[mask_T] = np.repeat(numbers, turn.num_sampled)
    return advantages


def _batch_advantages(
    algorithm: ReinforcePlusPlus | Ppo,
    *,
    rewards: list[Doubles],
    masks: Masks,
    kl: PerToken | None,
    values: PerToken | None,
    turns: list[list[TurnRewards]] | None,
) -> list[list[TokenAdvantages]]:
    """Compute token advantages, normalised over all loss tokens in the batch. Groups may have any size, even one."""
    flat_masks = [mask_T for masks_G in masks for mask_T in masks_G]
    flat_rewards = [float(reward) for rewards_G in rewards for reward in rewards_G]
    flat_kl = [None] * len(flat_masks) if kl is None else [kl_T for kl_G in kl for kl_T in kl_G]
    along = [()] * len(flat_masks) if turns is None else [_along(turn) for turns_G in turns for turn in turns_G]
    token_rewards = [
        adv.token_rewards(reward, kl_T, kl_coef=algorithm.kl_coef, mask_T=mask_T, along=parts)
        for reward, kl_T, mask_T, parts in zip(flat_rewards, flat_kl, flat_masks, along, strict=True)
    ]
    if isinstance(algorithm, Ppo):
        assert values is not None, "ppo needs the critic's values"
        flat_values = [values_T for values_G in values for values_T in values_G]
        estimates = [
            adv.gae(rewards_T, values_T, mask_T, gamma=algorithm.gamma, lam=algorithm.lam)
            for rewards_T, values_T, mask_T in zip(token_rewards, flat_values, flat_masks, strict=True)
        ]
        raw = [advantages_T for advantages_T, _ in estimates]
        returns = [returns_T.astype(np.float32) for _, returns_T in estimates]
    else:
        raw = [
            adv.discounted_returns(rewards_T, mask_T, gamma=algorithm.gamma)
            for rewards_T, mask_T in zip(token_rewards, flat_masks, strict=True)
        ]
        returns = [None] * len(raw)
    size = max((_largest(*group) for group in zip(rewards, turns or [[]] * len(rewards), strict=True)), default=0.0)
    flat = iter(
        TokenAdvantages(advantages=advantages_T, returns=returns_T)
        for advantages_T, returns_T in zip(adv.batch_normalized(raw, flat_masks, size=size), returns, strict=True)
    )
    return [[next(flat) for _ in masks_G] for masks_G in masks]


def _largest(rewards_G: Doubles, turns_G: Sequence[TurnRewards]) -> float:
    """Return the largest absolute reward in a group, over attempts and turns."""
    return float(np.abs(np.concatenate([rewards_G, *(turn.rewards for turn in turns_G)])).max(initial=0.0))


def _along(turn: TurnRewards) -> Sequence[tuple[int, float]]:
    """Return the rewards of individual turns, each with the index of the turn's last loss token."""
    last = np.maximum(np.cumsum(turn.num_sampled) - 1, 0)
    return [(place, reward) for place, reward in zip(last.tolist(), turn.rewards.tolist(), strict=True) if reward]
