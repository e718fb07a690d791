"""Tensor parallelism: each rank of a tensor group has some of the heads and some of the MLP's columns.

Every rank has a layer's complete input or, with sequence parallelism, only its own part of the tokens. ``enter`` prepares the input
for the matrix products that are cut by heads or columns. ``leave`` sums the results of these products and restores the layout:

               forward                        backward
  enter        nothing   | all-gather         all-reduce | reduce-scatter
  leave        all-reduce | reduce-scatter    nothing    | all-gather
  join_parts   all-gather                     own part

The fused weights are cut by rows in the order of ``split_order``: a rank's queries come before its keys and values, and its gates
before its ups. If there are more ranks than key/value heads, neighbouring ranks have the same head and sum its gradients so that the
copies stay equal. Embeddings, final norm and output head are not cut. For these, each rank works on its own part of the tokens,
so the vocabulary may have any size, and weights may be tied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rollcall.model.layer import Layer, TorchOps, product
from rollcall.model.low_rank import FIELDS, a_of, b_of

# An adapter's A is cut like its module's inputs, its B like the outputs.
BY_ROWS = (
    "qkv", "qkv_bias", "gate_up", "gate_up_bias",
    *(b_of(module) for module, field in FIELDS.items() if field in ("qkv", "gate_up")),
)  # fmt: skip
BY_COLUMNS = ("out", "down", *(a_of(module) for module, field in FIELDS.items() if field in ("out", "down")))
SHARED_HEADS = (b_of("k_proj"), b_of("v_proj"))  # these have only rows for key/value heads
Exchange = Callable[[Tensor], Tensor]

# torch 2.13 warns about the names from torch 2.11.
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def cut_dim(field: str) -> int | None:
    """Return the dimension along which a layer's weight is cut, or None if every rank has all of it."""
    return 0 if field in BY_ROWS else 1 if field in BY_COLUMNS else None


def split_order(field: str, *, heads: int, kv_heads: int, dim: int, intermediate: int, tensor: int) -> Tensor | None:
    """Return the order that the rows must have so that equal consecutive slices are the ranks' parts, or None if they already have it.

    >>> split_order("qkv", heads=4, kv_heads=2, dim=1, intermediate=0, tensor=2).tolist()
    [0, 1, 4, 6, 2, 3, 5, 7]
    >>> split_order("qkv", heads=4, kv_heads=1, dim=1, intermediate=0, tensor=2).tolist()
    [0, 1, 4, 5, 2, 3, 4, 5]
    >>> split_order("k_proj_lora_B", heads=4, kv_heads=1, dim=2, intermediate=0, tensor=2).tolist()
    [0, 1, 0, 1]
    """
    if field not in BY_ROWS or tensor == 1:
        return None
    if field in SHARED_HEADS:
        heads_of = torch.arange(kv_heads * dim).chunk(min(tensor, kv_heads))
        return torch.cat([heads_of[rank * len(heads_of) // tensor] for rank in range(tensor)])
    if field not in ("qkv", "qkv_bias", "gate_up", "gate_up_bias"):
        return None
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim] if field.startswith("qkv") else [intermediate] * 2
    numbers = [tensor, *[min(tensor, kv_heads)] * 2] if field.startswith("qkv") else [tensor] * 2
    parts = [part.chunk(number) for part, number in zip(torch.arange(sum(sizes)).split(sizes), numbers, strict=True)]
    return torch.cat([part[rank * len(part) // tensor] for rank in range(tensor) for part in parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """The ranks of one tensor group and how they exchange activations."""

    group: Any  # ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool
    kv_group: Any = None  # the ranks that have the same key/value head
    kv_copies: int = 1

    def own_part(self, rows: Tensor) -> Tensor:
        """Return this rank's part of [N, ...]. All parts have the same size; the last ones may be padded with zeros."""
        if self.size == 1:
            return rows
        size = -(-len(rows) // self.size)
        return pad_rows(rows[self.rank * size : (self.rank + 1) * size], size)

    def join_parts(self, part: Tensor, count: int) -> Tensor:
        """Join all ranks' parts to [count, ...]. All ranks compute the same results, so each has the full gradient of its part."""
        if self.size == 1:
            return part
        own = slice(self.rank * len(part), (self.rank + 1) * len(part))
        return exchanged(part, self._gather, lambda grad: grad[own])[:count]

    def enter(self, x: Tensor, count: int) -> Tensor:
        """Return [count, C] as input for products that are cut by heads or columns."""
        if self.size == 1:
            return x
        if self.sequence_parallel:
            return exchanged(x, self._gather, self._scatter)[:count]
        return exchanged(x, _same, self._add_up)

    def with_kv_copies(self, weight: Tensor, *, num_own: int) -> Tensor:
        """Return a fused q/k/v weight. Its rows from ``num_own`` on also exist on other ranks, so the gradients of these rows are
        summed."""
        if self.kv_copies == 1:
            return weight
        own, copied = weight.split((num_own, len(weight) - num_own))
        shared = exchanged(copied, _same, lambda grad: _all_reduce(grad, self.kv_group))
        return torch.cat((own, shared))

    def leave(self, x: Tensor) -> Tensor:
        """Sum over ranks the results of products that are cut by heads or columns. Return the full sum, or this rank's part of it."""
        if self.size == 1:
            return x
        if self.sequence_parallel:
            return exchanged(pad_rows(x, -(-len(x) // self.size) * self.size), self._scatter, self._gather)
        return exchanged(x, self._add_up, lambda grad: grad)

    def _add_up(self, x: Tensor) -> Tensor:
        return _all_reduce(x, self.group)

    def _gather(self, x: Tensor) -> Tensor:
        return all_gather(x, group=self.group, size=self.size)

    def _scatter(self, x: Tensor) -> Tensor:
        """Sum over ranks and return this rank's part."""
        x = x.contiguous()
        out = x.new_empty((len(x) // self.size, *x.shape[1:]))
        _reduce_into(out, x, group=self.group)
        return out


def pad_rows(x: Tensor, count: int) -> Tensor:
    missing = count - len(x)
    return F.pad(x, (0,) * (2 * x.ndim - 1) + (missing,)) if missing else x


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOps(TorchOps):
    """The steps of a layer whose heads and columns are split across ranks."""

    group: TensorGroup

    def product(self, x: Tensor, layer: Layer, name: str) -> Tensor:
        return product(self.group.enter(x, len(self.cos)), layer, name)

    def add_product(self, x: Tensor, h: Tensor, layer: Layer, name: str) -> Tensor:
        # The adapter's output is summed with the rest, because each rank has a part of its inputs.
        out = self.group.leave(product(h, layer, name, with_bias=False))
        bias: Tensor | None = getattr(layer, name + "_bias")
        return x + (out if bias is None else out + bias)


def all_gather(x: Tensor, *, group: Any, size: int) -> Tensor:
    """Concatenate equal parts from all ranks along the first dimension."""
    x = x.contiguous()
    out = x.new_empty((size * len(x), *x.shape[1:]))
    _gather_into(out, x, group=group)
    return out


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def exchanged(x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    """Apply ``forward`` to activations in the forward pass and ``backward`` to their gradients in the backward pass."""
    return _Exchange.apply(x, forward, backward)  # type: ignore[return-value]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:  # type: ignore[override]
        ctx.backward_of = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.backward_of(grad), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
