"""Corrections for the gap between the policy that sampled (behaviour: the engine) and the one the ratio starts from
(old: the learner before the step). Both compare old with behaviour token by token, and neither carries a gradient.
"""

from __future__ import annotations

from torch import Tensor

from rollcall.algo.losses import bounded_ratio


def truncated_weights(old_logprobs: Tensor, behaviour_logprobs: Tensor, *, cap: float) -> Tensor:
    """Truncated importance weights: ``min(old / behaviour, cap)`` per token.

    Truncation bounds the variance at the price of a bias, as in V-trace (arXiv:1802.01561).

    >>> import torch
    >>> old = torch.tensor([0.5, 0.9, 0.2]).log()
    >>> truncated_weights(old, torch.tensor([0.5, 0.1, 0.4]).log(), cap=2.0)
    tensor([1.0000, 2.0000, 0.5000])
    """
    return bounded_ratio(old_logprobs, behaviour_logprobs).clamp(max=cap).detach()


def mismatch_mask(old_logprobs: Tensor, behaviour_logprobs: Tensor, *, low: float, high: float) -> Tensor:
    """1 where ``low <= old / behaviour <= high``, else 0: the tokens to keep (IcePop, arXiv:2510.18855).

    >>> import torch
    >>> old = torch.tensor([0.5, 0.9, 0.2]).log()
    >>> mismatch_mask(old, torch.tensor([0.5, 0.1, 0.4]).log(), low=0.4, high=5.0)
    tensor([1., 0., 1.])
    """
    ratio = bounded_ratio(old_logprobs, behaviour_logprobs).detach()
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
