"""Samples in plain torch: one uniform number per draw selects a token by inverting the cumulative distribution.

The number depends only on the seed and the position, because it comes from a counter-based hash, not from a stateful generator. So a
completion does not depend on its neighbours in the batch, and draws the same numbers on a different device or after a restart. The hash
is two rounds of the splitmix64 finaliser (Steele, Lea and Flood, 2014). The first round scatters the seed, so that neighbouring seeds
have unrelated streams. The second scatters the position in the stream. torch's int64 arithmetic wraps, so CPU and CUDA give the same
bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # vocabulary entries per block of the two-level search
# 64-bit constants as signed integers, because torch's unsigned arithmetic is incomplete.
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_B = 0x94D049BB133111EB - (1 << 64)


def sample(
    logits: Tensor, *, uniforms: Tensor, temperature: Tensor | None, top_p: Tensor | None, top_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of float32 logits [B, V]. Return tokens [B] int64 and their log-probs [B] float32 under the distribution
    that was sampled from (for greedy rows: at temperature 1).

    ``temperature`` None means 1 for every row. ``top_p`` and ``top_k`` are None if no row truncates.
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
    """Return the first token whose cumulative probability exceeds the uniform number, but never a token with probability zero."""
    vocabulary = probs.shape[1]
    if vocabulary <= 4 * BLOCK:
        return _first_above(probs, uniforms)
    blocks = torch.nn.functional.pad(probs, (0, -vocabulary % BLOCK)).view(len(probs), -1, BLOCK)
    sums = blocks.sum(dim=-1)
    block = _first_above(sums, uniforms * sums.sum(dim=-1))
    before = torch.where(torch.arange(sums.shape[1], device=probs.device) < block[:, None], sums, 0).sum(dim=-1)
    rest = uniforms * sums.sum(dim=-1) - before
    return block * BLOCK + _first_above(blocks[torch.arange(len(probs), device=probs.device), block], rest)


def _first_above(weights: Tensor, thresholds: Tensor) -> Tensor:
    cumulative = weights.cumsum(dim=-1)
    # Rounding can put the threshold at or past the total. Then choose the last token with a nonzero weight.
    last = cumulative[:, -1:]
    thresholds = torch.minimum(thresholds.clamp(min=0)[:, None], torch.nextafter(last, torch.zeros_like(last)))
    # Comparisons with NaN weights are false. With the clamp, such a row gets a valid ID. Its log-prob is NaN, so the caller refuses it.
    return torch.searchsorted(cumulative, thresholds, right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


def truncate(scaled: Tensor, *, top_p: Tensor | None, top_k: Tensor | None) -> Tensor:
    """Set logits outside top-k and top-p to minus infinity. ``top_k`` 0 and ``top_p`` 1 leave a row unchanged."""
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


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return float32 numbers in [0, 1), multiples of 2**-24, for int64 ``seeds`` and ``positions`` whose shapes broadcast.

    ``uniforms(tensor([7]), tensor([0, 1]))`` contains the first two draws of seed 7. A seed is any int64.
    """
    state = _mix(seeds + GAMMA) + (positions + 1) * GAMMA
    # A float32 has 24 bits of mantissa, so the top 24 bits of the hash convert without rounding.
    return _shift_right(_mix(state), 40).to(torch.float32) * 2.0**-24


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * MIX_A
    state = (state ^ _shift_right(state, 27)) * MIX_B
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Shift logically. torch's own shift is arithmetic, so it copies the sign bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
