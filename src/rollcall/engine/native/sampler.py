"""Sampling in plain torch: one uniform number per token, turned into a token by inverting the cumulative distribution.

One number per (seed, position) makes a completion independent of its batch neighbours, and costs one draw instead of
one per vocabulary entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # vocabulary entries per block of the two-level search


def sample(
    logits: Tensor, *, uniforms: Tensor, temperature: Tensor | None, top_p: Tensor | None, top_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of float32 logits [B, V]: tokens [B] int64, and their log-probs [B] float32 under the distribution
    sampled from (greedy: under temperature 1).

    ``temperature`` None means 1 for every row; ``top_p`` / ``top_k`` are None when no row truncates.
    """
    greedy, scaled = None, logits
    if temperature is not None:
        greedy = temperature == 0
        scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    if top_p is not None or top_k is not None:
        scaled = truncate(scaled, top_p=top_p, top_k=top_k)
    probs = torch.softmax(scaled, dim=-1)
    tokens = invert_cdf(probs, uniforms)
    if greedy is not None and bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform; never one of probability zero."""
    vocabulary = probs.shape[1]
    if vocabulary <= 4 * BLOCK:
        return _first_above(probs, uniforms)
    padded = torch.nn.functional.pad(probs, (0, -vocabulary % BLOCK))
    blocks = padded.view(len(probs), -1, BLOCK)
    sums = blocks.sum(dim=-1)
    block = _first_above(sums, uniforms * sums.sum(dim=-1))
    before = torch.where(torch.arange(sums.shape[1], device=probs.device) < block[:, None], sums, 0).sum(dim=-1)
    rest = uniforms * sums.sum(dim=-1) - before
    chosen = blocks[torch.arange(len(probs), device=probs.device), block]
    return block * BLOCK + _first_above(chosen, rest)


def _first_above(weights: Tensor, thresholds: Tensor) -> Tensor:
    cumulative = weights.cumsum(dim=-1)
    # Rounding can leave the threshold at or past the total: then the last token of nonzero weight is meant.
    last = cumulative[:, -1:]
    thresholds = torch.minimum(thresholds.clamp(min=0)[:, None], torch.nextafter(last, torch.zeros_like(last)))
    # NaN weights compare with nothing: clamped, the row gets a valid id and a NaN log-prob, which the caller refuses.
    return torch.searchsorted(cumulative, thresholds, right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


def truncate(scaled: Tensor, *, top_p: Tensor | None, top_k: Tensor | None) -> Tensor:
    """Logits with everything outside top-k and top-p at minus infinity. ``top_k`` 0 and ``top_p`` 1 leave a row as is."""
    ordered, order = scaled.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    if top_k is not None:
        keep &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    if top_p is not None:
        probs = torch.softmax(ordered.masked_fill(~keep, -torch.inf), dim=-1)
        keep &= (probs.cumsum(dim=-1) - probs < top_p[:, None]) | (top_p[:, None] >= 1)
    keep[:, 0] = True
    return scaled.masked_fill(~keep.gather(1, order.argsort(dim=-1)), -torch.inf)
