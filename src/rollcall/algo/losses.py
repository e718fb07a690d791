"""Per-token losses in torch. All tensors are flat, with shape [L]. They contain one value for each loss token of a micro-batch.

``attempt`` [L] says which of ``num_attempts`` attempts a token belongs to. Nothing is averaged here: the caller
multiplies by each token's share of the batch (``recipe.loss_weights``) and sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: far outside any clip range, and its square still fits float32
K3_BOUND = 10.0  # k3 grows exponentially; one token past this would outweigh the rest of the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss for each token. ``ratio`` and ``clipped`` are for metrics and carry no gradient."""

    loss: Tensor  # [L]
    ratio: Tensor  # [L] policy over old (for GSPO the sequence's ratio)
    clipped: Tensor  # [L] 1 where clipping determined the loss (for CISPO: where it changed the weight), else 0


def bounded_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``exp(logprobs - base_logprobs)`` with the difference clamped to +-20, so that it is always finite."""
    return (logprobs - base_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, *, attempt: Tensor, num_attempts: int) -> Tensor:
    """GSPO (arXiv:2507.18071): one ratio per sequence, ``exp(mean_t log r_t)``, bounded like a token's ratio.

    Each token's ratio has the sequence's value and the token's own gradient, ``s_t = sg[s] * p_t / sg[p_t]`` (the
    paper's GSPO-token). Averaged over a response whose tokens share one advantage, the clipped loss has the same value and gradient
    as the sequence objective. The sequence is everything sampled in an attempt, in all its rows, because the reward is for all of
    it, and the paper's point is that ratio and reward should have the same unit.

    >>> logprobs = torch.tensor([1.21, 1.0, 0.9]).log()
    >>> sequence_ratio(logprobs, torch.zeros(3), attempt=torch.tensor([0, 0, 1]), num_attempts=2)
    tensor([1.1000, 1.1000, 0.9000])
    """
    mean = attempt_mean((logprobs - old_logprobs).detach(), attempt=attempt, num_attempts=num_attempts)
    ratio = mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[attempt].exp()
    return ratio * (logprobs - logprobs.detach()).exp()


def clipped_policy_loss(
    ratio: Tensor, *, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """PPO's clipped surrogate (arXiv:1707.06347), ``-min(r A, clip(r, 1 - low, 1 + high) A)`` per token.

    ``clip_high`` above ``clip_low`` is DAPO's clip-higher (arXiv:2503.14476). ``dual_clip=c`` limits the loss of
    tokens with a negative advantage to ``-c A`` (arXiv:1912.09729).

    >>> ratio, advantages = torch.tensor([1.5, 1.1, 4.0]), torch.tensor([1.0, 1.0, -1.0])
    >>> result = clipped_policy_loss(ratio, advantages=advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    >>> result.loss, result.clipped
    (tensor([-1.2000, -1.1000,  3.0000]), tensor([1., 0., 1.]))
    """
    plain = -advantages * ratio
    held = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, held)
    clipped = held > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        clipped = clipped | bounded
    return TokenLoss(loss=loss, ratio=ratio.detach(), clipped=clipped.to(ratio.dtype))


def cispo_policy_loss(
    logprobs: Tensor, *, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """CISPO (arXiv:2506.13585): ``-sg[clip(r, 1 - low, 1 + high)] A log p`` per token.

    The clipped ratio is a constant weight on the policy gradient, so clipped tokens still contribute.

    >>> logprobs = torch.tensor([0.5, 0.5]).log().requires_grad_()
    >>> old = torch.tensor([0.4, 0.05]).log()
    >>> result = cispo_policy_loss(
    ...     logprobs, old_logprobs=old, advantages=torch.tensor([1.0, 1.0]), clip_low=1.0, clip_high=4.0
    ... )
    >>> result.loss.sum().backward()
    >>> logprobs.grad, result.clipped
    (tensor([-1.2500, -5.0000]), tensor([0., 1.]))
    """
    ratio = bounded_ratio(logprobs, old_logprobs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(loss=-weight * advantages * logprobs, ratio=ratio, clipped=(weight != ratio).to(ratio.dtype))


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, *, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled token, with ``d = log p - log p_ref``.

    All three are from J. Schulman ("Approximating KL divergence", 2020). k1 is ``d``; it is unbiased, but may be negative.
    k2 is ``d^2 / 2``; it is biased, but never negative. k3 is ``exp(-d) - 1 + d``; it is unbiased and never negative, and GRPO's loss
    uses it (arXiv:2402.03300). For k3, ``d`` is clamped to +-20 and the result to at most 10.

    >>> policy, reference = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    >>> kl_estimate(policy, reference, estimator="k1")
    tensor([ 0.6931, -0.6931])
    >>> kl_estimate(policy, reference, estimator="k3")
    tensor([0.1931, 0.3069])
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    difference = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # Where the two policies nearly agree, exp(-d) - 1 + d could round to a negative number; expm1 prevents this.
    return ((-difference).expm1() + difference).clamp(0.0, K3_BOUND)


# Corrections for the gap between the behaviour policy (the engine, which sampled the tokens) and the old policy (the learner before the
# step, which the ratio is relative to). Both functions compare the two policies token by token, and neither result carries a gradient.


def truncated_weights(old_logprobs: Tensor, behaviour_logprobs: Tensor, *, cap: float) -> Tensor:
    """Truncated importance weights: ``min(old / behaviour, cap)`` per token.

    Truncation limits the variance at the cost of a bias, as in V-trace (arXiv:1802.01561).

    >>> old = torch.tensor([0.5, 0.9, 0.2]).log()
    >>> truncated_weights(old, torch.tensor([0.5, 0.1, 0.4]).log(), cap=2.0)
    tensor([1.0000, 2.0000, 0.5000])
    """
    return bounded_ratio(old_logprobs, behaviour_logprobs).clamp(max=cap).detach()


def mismatch_mask(old_logprobs: Tensor, behaviour_logprobs: Tensor, *, low: float, high: float) -> Tensor:
    """Return 1 for tokens to keep, where ``low <= old / behaviour <= high``, else 0 (IcePop, arXiv:2510.18855).

    >>> old = torch.tensor([0.5, 0.9, 0.2]).log()
    >>> mismatch_mask(old, torch.tensor([0.5, 0.1, 0.4]).log(), low=0.4, high=5.0)
    tensor([1., 0., 1.])
    """
    ratio = bounded_ratio(old_logprobs, behaviour_logprobs).detach()
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)


def attempt_mean(values: Tensor, *, attempt: Tensor, num_attempts: int) -> Tensor:
    """Mean over each attempt's tokens, [num_attempts]; 0 for an attempt without tokens.

    >>> attempt_mean(torch.tensor([1.0, 3.0, 5.0]), attempt=torch.tensor([0, 0, 2]), num_attempts=3)
    tensor([2., 0., 5.])
    """
    total = torch.zeros(num_attempts, dtype=values.dtype, device=values.device).index_add(0, attempt, values)
    count = torch.zeros_like(total).index_add(0, attempt, torch.ones_like(values))
    return total / count.clamp(min=1)
