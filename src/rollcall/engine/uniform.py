"""One uniform number per sampled token, a function of seed and position.

A counter-based hash, not a generator with a state: a completion redone on another device, in another batch or after a
restart draws the same numbers. Two rounds of the splitmix64 finaliser (Steele, Lea and Flood, 2014): the first
scatters the seed, so that streams of neighbouring seeds share nothing; the second scatters the position within the
stream. Written in torch's int64 arithmetic, which wraps, so CPU and CUDA give the same bits.
"""

from __future__ import annotations

import torch

# 64-bit constants as signed integers, since torch has no full unsigned arithmetic.
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_B = 0x94D049BB133111EB - (1 << 64)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Float32 in [0, 1), a multiple of 2**-24, for int64 ``seeds`` and ``positions`` of shapes that broadcast.

    ``uniforms(tensor([7]), tensor([0, 1]))`` holds the first two draws of seed 7. A seed is any int64.
    """
    state = _mix(seeds + GAMMA) + (positions + 1) * GAMMA
    # A float32 has 24 bits of mantissa, so the top 24 bits of the hash convert without rounding.
    return _shift_right(_mix(state), 40).to(torch.float32) * 2.0**-24


def _mix(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shift_right(state, 30)) * MIX_A
    state = (state ^ _shift_right(state, 27)) * MIX_B
    return state ^ _shift_right(state, 31)


def _shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own is arithmetic and drags the sign bit along."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
