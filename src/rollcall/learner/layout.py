"""How one weight of a model is divided over the ranks of a gang, and which blocks of the model's tensors a rank holds.

A rank's own part of a fused weight (q/k/v, gate/up) is rows of several tensors of the model. ``blocks`` says where each run of
these rows lies in the tensor that transformers knows, so that a checkpoint holds that model's names and any other gang can
read it. What several ranks hold (copies of the state, weights that tensor parallel does not cut, shared key/value heads) is
one rank's own.

A rank reads its part from where the model is stored: only its own blocks, one piece at a time. So the host memory that reading takes
is that of a piece, whatever the size of the model and the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollcall.model.decoder import module_names
from rollcall.model.stored.tensors import Stored
from rollcall.plan.mesh import ModelSplit

WHOLE = ModelSplit(replicate=1, shard=1, tensor=1, rank=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of one tensor of the model, and the rows of a rank's part that hold it."""

    name: str  # of the tensor, as transformers knows it
    start: tuple[int, ...]  # where the block begins in the tensor
    shape: tuple[int, ...]  # of the block
    whole: tuple[int, ...]  # of the tensor
    row: int  # the first of the rank's rows

    def of(self, part: Tensor) -> Tensor:
        """The block's rows of a rank's part: a view."""
        return part[self.row : self.row + self.shape[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSplit:
    """One weight, as one rank of a gang holds it."""

    name: str  # of Decoder.named_tensors, or a critic's head
    shape: torch.Size  # of the whole weight
    rows: tuple[int, ...]  # of each tensor that the weight is fused from
    split: ModelSplit = WHOLE
    dim: int | None = None  # the dimension that tensor parallel cuts; None: all ranks of the tensor group have the same
    order: Tensor | None = None  # rows of the whole weight in the order they are cut
    is_root: bool = False  # sharded over the ranks of the tensor groups too

    @property
    def num_shards(self) -> int:
        return self.split.shard * (self.split.tensor if self.is_root else 1)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        part = self.tensor_part(whole)
        rank = self.split.rank % self.num_shards if self.is_root else self.split.shard_rank
        rows = -(-len(part) // self.num_shards)
        return part[rank * rows : (rank + 1) * rows]

    def tensor_part(self, whole: Tensor) -> Tensor:
        """The part that the ranks with this place in their tensor group have together."""
        if self.order is not None:
            whole = whole.index_select(0, self.order.to(whole.device))
        if self.dim is None or self.split.tensor == 1:
            return whole
        return whole.chunk(self.split.tensor, dim=self.dim)[self.split.tensor_rank]

    def blocks(self, *, own: bool = False) -> Iterator[Block]:
        """All blocks of this rank's part, in the order of its rows; ``own``: without those that another rank writes."""
        # The whole row that each row of the part is; a second dimension, because that may be cut.
        index = torch.arange(self.shape[0])[:, None].expand(-1, self.split.tensor if self.dim == 1 else 1)
        rows = self.cut(index)[:, 0].numpy()
        keep = self._is_own(rows) if own else np.ones(len(rows), dtype=bool)
        ends = np.cumsum(self.rows)
        tensor = np.searchsorted(ends, rows, side="right")
        breaks = (np.diff(rows) != 1) | (np.diff(tensor) != 0) | np.diff(keep)
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1)) if len(rows) else np.zeros(0, dtype=np.int64)
        names = module_names(self.name)
        for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(rows)], strict=False):
            if keep[begin]:
                which = int(tensor[begin])
                row = int(rows[begin] - ends[which] + self.rows[which])
                yield self._block(names[which], row=row, count=end - begin, of=self.rows[which], at=begin)

    def _block(self, name: str, *, row: int, count: int, of: int, at: int) -> Block:
        rest, start = list(self.shape[1:]), [0] * (len(self.shape) - 1)
        if self.dim == 1:
            rest[0] //= self.split.tensor
            start[0] = rest[0] * self.split.tensor_rank
        return Block(name=name, start=(row, *start), shape=(count, *rest), whole=(of, *self.shape[1:]), row=at)

    def _is_own(self, rows: np.ndarray) -> np.ndarray:
        """Which of these rows of the whole weight this rank writes: the first of the ranks that have the same row does."""
        split = self.split
        if split.lane >= split.shard or (self.dim is None and not self.is_root and split.tensor_rank):
            return np.zeros(len(rows), dtype=bool)
        if self.order is None:
            return np.ones(len(rows), dtype=bool)
        owner = np.zeros(self.shape[0], dtype=np.int64)
        for rank, part in reversed(list(enumerate(self.order.chunk(split.tensor)))):
            owner[part.numpy()] = rank
        return owner[rows] == split.tensor_rank


def module_shapes(layouts: Iterable[WeightSplit]) -> dict[str, torch.Size]:
    """The whole tensors that these weights are fused from, by the names of transformers, in order."""
    return {
        module: torch.Size((rows, *layout.shape[1:]))
        for layout in layouts
        for module, rows in zip(module_names(layout.name), layout.rows, strict=True)
    }


def fused_rows(name: str, num_rows: int, *, heads: int, kv_heads: int) -> tuple[int, ...]:
    """The rows of each tensor that a weight of the decoder is fused from.

    >>> fused_rows("layers.0.qkv", 64, heads=4, kv_heads=2)
    (32, 16, 16)
    """
    names = module_names(name)
    if len(names) != 3:
        return (num_rows // len(names),) * len(names)
    unit = num_rows // (heads + 2 * kv_heads)
    return heads * unit, kv_heads * unit, kv_heads * unit


@torch.no_grad()
def read_part(
    into: Tensor, layout: WeightSplit, stored: Stored, *, prefix: str = "", rounded_to: torch.dtype | None = None
) -> None:
    """Fill ``into``, which is what this rank holds of the weight or a tensor of the same shape, on any device. ``rounded_to``: the
    precision that the values go through on their way."""
    for block in layout.blocks():
        part = block.of(into)
        for row, piece in stored.runs(f"{prefix}{block.name}", start=block.start, shape=block.shape):
            part[row : row + len(piece)].copy_(piece if rounded_to is None else piece.to(rounded_to))
