"""Sends only the changes since the previous version: which elements differ, and their new bits.

At the learning rates of reinforcement learning, most bfloat16 weights do not change in an update. A tensor's changes are sent as three
lists: how many there are in each block of 65,536 elements, their positions in these blocks (two bytes each), and the new values. A tensor
whose changes would take at least as many bytes as the tensor itself is sent in full. The sender keeps a copy of what it sent last, so it
needs twice the memory of the weights. The checksums cover the full tensors, so they reveal a receiver that started from different weights
than the sender assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollcall.engine.weights.layout import Entry, Layout
from rollcall.engine.weights.protocol import RefusedUpdateError

BLOCK = 1 << 16  # elements; a position in a block takes two bytes
WHOLE = -1  # in place of a count: the tensor is sent in full


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    counts: list[int]  # for each tensor: the number of changed elements, or WHOLE
    payload: Tensor  # flat uint8


def encode(layout: Layout, *, new: Sequence[Tensor], base: Sequence[Tensor]) -> Delta:
    """Return the changes that turn ``base`` into ``new``; both are flat bytes in the layout's order."""
    counts: list[int] = []
    parts: list[Tensor] = []
    for entry, new_bytes, base_bytes in zip(layout.entries, new, base, strict=True):
        words = new_bytes.view(_word(entry))
        changed = words != base_bytes.view(_word(entry))
        count = int(torch.count_nonzero(changed))
        if payload_bytes(entry, count) >= entry.num_bytes and count:
            counts.append(WHOLE)
            parts.append(new_bytes)
            continue
        counts.append(count)
        if count:
            places = changed.nonzero()[:, 0]
            per_block = torch.bincount(places >> 16, minlength=_num_blocks(entry)).int()
            offsets = (places & (BLOCK - 1)).to(torch.uint16)
            parts += [per_block.view(torch.uint8), offsets.view(torch.uint8), words[places].view(torch.uint8)]
    payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=new[0].device)
    return Delta(counts=counts, payload=payload)


def payload_bytes(entry: Entry, count: int) -> int:
    """Return how many bytes a tensor's changes take."""
    if count == WHOLE:
        return entry.num_bytes
    if count == 0:
        return 0
    return 4 * _num_blocks(entry) + count * (2 + entry.torch_dtype.itemsize)


def total_bytes(layout: Layout, counts: Sequence[int]) -> int:
    return sum(payload_bytes(entry, count) for entry, count in zip(layout.entries, counts, strict=True))


def apply(layout: Layout, delta: Delta, *, flat: Sequence[Tensor]) -> None:
    """Apply the changes in place."""
    start = 0
    for entry, count, target in zip(layout.entries, delta.counts, flat, strict=True):
        part = delta.payload[start : start + payload_bytes(entry, count)]
        start += len(part)
        if count == WHOLE:
            target.copy_(part)
        elif count:
            places, values = _changes(entry, count, part)
            target.view(_word(entry))[places] = values


def _changes(entry: Entry, count: int, part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the changed positions and their new values. Refuse changes that do not fit this tensor, before anything is written."""
    part = part.clone()  # it may not be aligned for the views below
    head = 4 * _num_blocks(entry)
    per_block = part[:head].view(torch.int32).long()
    if bool((per_block < 0).any()) or int(per_block.sum()) != count:
        raise RefusedUpdateError(
            f"the numbers of changes in the blocks of tensor {entry.name!r} do not add up to their total"
        )
    offsets = part[head : head + 2 * count].view(torch.uint16).long()
    blocks = torch.arange(len(per_block), device=part.device) * BLOCK
    places = torch.repeat_interleave(blocks, per_block) + offsets
    if int(places.max()) * entry.torch_dtype.itemsize >= entry.num_bytes:
        raise RefusedUpdateError(f"a change to tensor {entry.name!r} is outside the tensor")
    return places, part[head + 2 * count :].clone().view(_word(entry))


def _word(entry: Entry) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[entry.torch_dtype.itemsize]


def _num_blocks(entry: Entry) -> int:
    return -(-entry.num_bytes // entry.torch_dtype.itemsize // BLOCK)
