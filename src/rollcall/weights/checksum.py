"""A 64-bit checksum of raw bytes, cheap enough to be taken of every update on both sides.

Bytes are summed as 64-bit words, 256 KiB at a time, and the sums folded so that their order counts. A host sums each
piece right after copying it, while it is in the cache; a GPU sums its own memory.

>>> checksum([torch.arange(4, dtype=torch.uint8)]) == checksum([torch.arange(4, dtype=torch.uint8).flip(0)])
False
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PIECE_BYTES = 256 << 10  # fits a core's second-level cache twice
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that folding loses nothing
_MASK = (1 << 64) - 1


def checksum(spans: Sequence[Tensor]) -> int:
    """Of flat uint8 tensors, one after the other."""
    total = 0
    for span in spans:
        total = _fold(total, span) if span.device.type == "cpu" else _fold_on_device(total, span)
    return total


def copy_summed(targets: Sequence[Tensor], sources: Sequence[Tensor], *, total_of: Sequence[Tensor]) -> int:
    """Copy sources to targets; returns the checksum of ``total_of``, which is one of the two."""
    total = 0
    for target, source, summed in zip(targets, sources, total_of, strict=True):
        if target.device.type != "cpu" or source.device.type != "cpu":
            target.copy_(source)
            total = _fold(total, summed) if summed.device.type == "cpu" else _fold_on_device(total, summed)
            continue
        to, of, sums = target.numpy(), source.numpy(), summed.numpy()
        for start in range(0, len(to), PIECE_BYTES):
            piece = slice(start, start + PIECE_BYTES)
            np.copyto(to[piece], of[piece])
            total = _add(total, _sum(sums[piece]))
    return total


def _fold(total: int, span: Tensor) -> int:
    data = span.numpy()
    for start in range(0, len(data), PIECE_BYTES):
        total = _add(total, _sum(data[start : start + PIECE_BYTES]))
    return total


def _add(total: int, piece: int) -> int:
    return (total * _FACTOR + piece + 1) & _MASK


def _sum(data: np.ndarray) -> int:
    whole = len(data) & ~7
    total = int(np.add.reduce(data[:whole].view(np.uint64), dtype=np.uint64))
    return total + int.from_bytes(data[whole:].tobytes(), "little")


def _fold_on_device(total: int, span: Tensor) -> int:
    """The same number, summed where the bytes are; only the sums come to the host."""
    whole = len(span) // PIECE_BYTES * PIECE_BYTES
    if span.data_ptr() % 8:
        span = span.clone()  # words must be aligned
    if whole:
        # Integer sums wrap around, so signed words add up to the same 64 bits.
        sums = span[:whole].view(torch.int64).view(-1, PIECE_BYTES // 8).sum(1)
        for piece in sums.tolist():
            total = _add(total, piece & _MASK)
    return _fold(total, span[whole:].cpu()) if whole < len(span) else total
