"""A 64-bit checksum of raw bytes, cheap enough for both sides to compute for every weight update.

Bytes are summed as 64-bit words, 256 KiB at a time, and the sums are folded so that their order matters. A host sums each
piece right after copying it, while it is still in the cache. If there are enough cores, a second thread does half of the
pieces. A GPU sums its own memory.

>>> checksum([torch.arange(4, dtype=torch.uint8)]) == checksum([torch.arange(4, dtype=torch.uint8).flip(0)])
False
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

PIECE_BYTES = 256 << 10  # two of them fit in a core's L2 cache
CORES = 4  # enough for two threads each in the sender and the receiver
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that folding loses no information
_MASK = (1 << 64) - 1


def checksum(spans: Sequence[Tensor]) -> int:
    """Compute the checksum of the concatenation of flat uint8 tensors on one device."""
    if all(span.device.type == "cpu" for span in spans):
        return _fold(_each(_sum, [part for span in spans for part in _cut(span)]))
    total = 0
    for span in spans:
        total = _fold_on_device(total, span)
    return total


def copy_summed(targets: Sequence[Tensor], sources: Sequence[Tensor], *, total_of: Sequence[Tensor]) -> int:
    """Copy sources to targets and return the checksum of ``total_of``, which is either the sources or the targets."""
    if any(span.device.type != "cpu" for span in (*targets, *sources)):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return checksum(total_of)

    def copy(pieces: tuple[np.ndarray, ...]) -> int:
        summed, target, source = pieces
        np.copyto(target, source)
        return _sum(summed)

    cuts = ([part for span in spans for part in _cut(span)] for spans in (total_of, targets, sources))
    return _fold(_each(copy, list(zip(*cuts, strict=True))))


def _cut(span: Tensor) -> list[np.ndarray]:
    data = span.numpy()
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


def _each(sum_of: Callable[[Any], int], pieces: list[Any]) -> list[int]:
    """Sum each piece. If there are several, a second thread does half of them."""
    half = len(pieces) // 2
    helper = _helper()
    if half < 2 or helper is None:  # one thread finishes a single piece before a second one would start
        return [sum_of(piece) for piece in pieces]
    later = helper.submit(lambda: [sum_of(piece) for piece in pieces[half:]])
    return [sum_of(piece) for piece in pieces[:half]] + later.result()


@cache
def _helper() -> ThreadPoolExecutor | None:
    """Return a second thread, if the machine has enough cores."""
    if (os.cpu_count() or 1) < CORES:
        return None
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollcall-weights")


def _fold(sums: Iterable[int], *, total: int = 0) -> int:
    for one in sums:
        total = (total * _FACTOR + one + 1) & _MASK
    return total


def _sum(data: np.ndarray) -> int:
    whole = len(data) & ~7
    total = int(np.add.reduce(data[:whole].view(np.uint64), dtype=np.uint64))
    return total + int.from_bytes(data[whole:].tobytes(), "little")


def _fold_on_device(total: int, span: Tensor) -> int:
    """Compute the same number on the device. Only the sums are copied to the host."""
    whole = len(span) // PIECE_BYTES * PIECE_BYTES
    if span.data_ptr() % 8:
        span = span.clone()  # words must be aligned
    if whole:
        # Integer sums wrap around, so signed words add up to the same 64 bits.
        sums = span[:whole].view(torch.int64).view(-1, PIECE_BYTES // 8).sum(1)
        total = _fold((piece & _MASK for piece in sums.tolist()), total=total)
    return _fold(map(_sum, _cut(span[whole:].cpu())), total=total)
