"""How a weight is split across the ranks of a gang, and which blocks of the model's tensors each rank has.

A rank's part of a fused weight (q/k/v, gate/up) contains rows from several model tensors. ``blocks`` maps each range of consecutive rows
to its position in transformers' tensors, so that checkpoints use transformers' names and any other gang can read them. If several ranks
have the same data (copies of the state, weights that tensor parallelism does not cut, shared key/value heads), one of them owns it.

A rank reads its part directly from the model files: only its own blocks, one piece at a time. So reading needs host memory for only
one piece, whatever the size of the model and the number of processes.
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
    """A block of one model tensor, and the rows of a rank's part that contain it."""

    name: str  # the tensor's name in transformers
    start: tuple[int, ...]  # where the block begins in the tensor
    shape: tuple[int, ...]  # the block's shape
    whole: tuple[int, ...]  # the full tensor's shape
    row: int  # the block's first row in the rank's part

    def of(self, part: Tensor) -> Tensor:
        """Return the block's rows of a rank's part, as a view."""
        return part[self.row : self.row + self.shape[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSplit:
    """How one weight is split, as seen by one rank of a gang."""

    name: str  # a name in Decoder.named_tensors, or a critic's head
    shape: torch.Size  # the full weight's shape
    rows: tuple[int, ...]  # the number of rows in each tensor that the weight is fused from
    split: ModelSplit = WHOLE
    dim: int | None = None  # the dimension that tensor parallelism cuts; None if all tensor ranks have the same data
    order: Tensor | None = None  # the full weight's rows in the order in which they are cut
    is_root: bool = False  # whether the weight is also sharded across the ranks of the tensor groups

    @property
    def num_shards(self) -> int:
        return self.split.shard * (self.split.tensor if self.is_root else 1)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a full tensor."""
        part = self.tensor_part(whole)
        rank = self.split.rank % self.num_shards if self.is_root else self.split.shard_rank
        rows = -(-len(part) // self.num_shards)
        return part[rank * rows : (rank + 1) * rows]

    def tensor_part(self, whole: Tensor) -> Tensor:
        """Return the part for this rank's index in the tensor group. All ranks with this index share it."""
        if self.order is not None:
            whole = whole.index_select(0, self.order.to(whole.device))
        if self.dim is None or self.split.tensor == 1:
            return whole
        return whole.chunk(self.split.tensor, dim=self.dim)[self.split.tensor_rank]

    def blocks(self, *, own: bool = False) -> Iterator[Block]:
        """Yield all blocks of this rank's part, in row order. With ``own``, leave out the blocks that another rank writes."""
        # The row in the full weight of each row of the part. The second dimension is only for ``cut``, which may cut along it.
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
        """Return which of these rows this rank writes. The first rank that has a row writes it."""
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
    """Return the shapes of the full tensors that these weights are fused from, by their names in transformers, in order."""
    return {
        module: torch.Size((rows, *layout.shape[1:]))
        for layout in layouts
        for module, rows in zip(module_names(layout.name), layout.rows, strict=True)
    }


def fused_rows(name: str, num_rows: int, *, heads: int, kv_heads: int) -> tuple[int, ...]:
    """Return the number of rows of each tensor that a decoder weight is fused from.

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
    """Read this rank's part of a weight into ``into``, which has the shape of that part and may be on any device. With ``rounded_to``,
    round the values to that dtype first."""
    for block in layout.blocks():
        part = block.of(into)
        for row, piece in stored.runs(f"{prefix}{block.name}", start=block.start, shape=block.shape):
            part[row : row + len(piece)].copy_(piece if rounded_to is None else piece.to(rounded_to))
