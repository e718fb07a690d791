"""A rank's part of a model, read from where the model is stored: only the rank's own blocks, one piece at a time.

So the host memory that reading takes is that of a piece, whatever the size of the model and the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rollcall.learner.layout import Block, WeightSplit
from rollcall.stored.tensors import Stored

PIECE_BYTES = 64 << 20


@torch.no_grad()
def read_part(
    into: Tensor, layout: WeightSplit, stored: Stored, *, prefix: str = "", rounded_to: torch.dtype | None = None
) -> None:
    """Fill ``into``, which is what this rank holds of the weight or a tensor of the same shape, on any device. ``rounded_to``: the
    precision that the values go through on their way."""
    for block in layout.blocks():
        name = f"{prefix}{block.name}"
        for row, start, shape in pieces(block, itemsize=stored.tensors[name].dtype.itemsize):
            piece = stored.read(name, start=start, shape=shape)
            into[row : row + shape[0]].copy_(piece if rounded_to is None else piece.to(rounded_to))


def pieces(block: Block, *, itemsize: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """A block in runs of rows: the first of the rank's rows, where the run begins in the tensor, and its shape."""
    # Stored rows are read with all their columns, also where the block has only some.
    row_bytes = itemsize * int(torch.Size(block.whole[1:]).numel())
    step = max(1, PIECE_BYTES // max(row_bytes, 1))
    for begin in range(0, block.shape[0], step):
        rows = min(step, block.shape[0] - begin)
        yield block.row + begin, (block.start[0] + begin, *block.start[1:]), (rows, *block.shape[1:])


def same_values(layout: WeightSplit, stored: Stored, *, name: str, other: str) -> bool:
    """Whether two stored tensors are equal in the rows that this rank holds of ``name``, which is not fused."""
    for block in layout.blocks():
        assert block.name == name
        for _, start, shape in pieces(block, itemsize=stored.tensors[name].dtype.itemsize):
            one, two = (stored.read(each, start=start, shape=shape) for each in (name, other))
            if not torch.equal(one, two):
                return False
    return True
