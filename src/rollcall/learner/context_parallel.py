"""Context parallelism: each rank of a context group has some of a micro-batch's tokens.

The ranks of a group get the same micro-batch. Rank r of c takes tokens r, r + c, r + 2c and so on, and computes embeddings,
matrix products, norms and the output head only for these tokens. Around attention, an all-to-all gives each rank all tokens for some
heads, and a second one reverses this (Ulysses):

    [N / c tokens, H heads]  ──▶  [N tokens, H / c heads]  ── attention ──▶  [N / c tokens, H heads]

So attention sees complete rows, with the prefixes that they share, and every rank has the same work. Tokens are distributed round-robin
because the tokens that need a logit are at the ends of rows, so a contiguous part would often have all of them, or none.

The logit statistics go to all ranks of the group, so each rank computes the full loss. Each rank has the gradient of its own tokens,
and the gradient of the weights is the sum over all ranks, just as over data ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rollcall.base.types import Longs, MicroBatch
from rollcall.learner.gang import Gang
from rollcall.learner.tensor_parallel import all_gather, exchanged, pad_rows
from rollcall.model.attention import on_device
from rollcall.model.layer import Attend


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """One rank's tokens and logits from a micro-batch. All ranks have the same number of tokens and the same number of logits. The last
    tokens and logits may be padding."""

    token_ids: Longs  # [n]
    positions: Longs  # [n]
    logit_index: Longs  # [m], indices into the rank's own tokens
    targets: Longs  # [m]
    # [M]: index of each of the micro-batch's logits in the concatenation over all ranks; None if there is only one rank.
    places: Longs | None


def own_of(batch: MicroBatch, *, rank: int, size: int) -> Own:
    holder = batch.logit_index % size
    counts = np.bincount(holder, minlength=size)
    most = int(counts.max())
    order = np.argsort(holder, kind="stable")
    places = np.empty(len(holder), dtype=np.int64)
    # Sorted by holder, so that each holder's logits begin where the previous holder's end.
    places[order] = np.arange(len(holder)) + (most * np.arange(size) - (np.cumsum(counts) - counts))[holder[order]]
    mine = holder == rank
    return Own(
        token_ids=_dealt(batch.token_ids, rank=rank, size=size),
        positions=_dealt(batch.positions, rank=rank, size=size),
        logit_index=_filled(batch.logit_index[mine] // size, most),
        targets=_filled(batch.targets[mine], most),
        places=places if size > 1 else None,
    )


def _dealt(tokens: Longs, *, rank: int, size: int) -> Longs:
    """
    >>> _dealt(np.array([5, 6, 7]), rank=1, size=2)
    array([6, 0])
    """
    return _filled(tokens[rank::size], -(-len(tokens) // size))


def _filled(values: Longs, count: int) -> Longs:
    return np.pad(values, (0, count - len(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """The ranks that split the tokens of the same micro-batches among themselves."""

    group: Any = None  # ProcessGroup
    rank: int = 0
    size: int = 1

    def around(self, attend: Attend, *, count: int) -> Attend:
        """Wrap ``attend``, which needs all ``count`` tokens of the micro-batch, for a rank that has only its own tokens."""
        if self.size == 1:
            return attend

        def run(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._to_tokens(attend(index, *self._to_heads(q, k, v, count)))

        return run

    def join(self, values: Tensor, own: Own) -> Tensor:
        """Join each rank's values [m] into the micro-batch's [M]. All ranks compute the same results from them, so each rank has the
        full gradient of its part."""
        if own.places is None:
            return values
        mine = slice(self.rank * len(values), (self.rank + 1) * len(values))
        everyones = exchanged(
            values, lambda x: all_gather(x, group=self.group, size=self.size), lambda grad: grad[mine]
        )
        return everyones.index_select(0, on_device(own.places, values.device))

    def _to_heads(self, q: Tensor, k: Tensor, v: Tensor, count: int) -> list[Tensor]:
        """Exchange [n, H, D] (own tokens, all heads) for [count, H / c, D] (all tokens, own heads). Ranks that share a key/value head all
        get that head."""
        copies = max(1, self.size // k.shape[1])
        if copies > 1:
            k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
        by_rank = [heads.unflatten(1, (self.size, -1)).transpose(0, 1) for heads in (q, k, v)]  # [c, n, heads, D]
        widths = [heads.shape[2] for heads in by_rank]
        got = exchanged(torch.cat(by_rank, dim=2), self._swap, self._swap)
        return [heads.transpose(0, 1).flatten(0, 1)[:count] for heads in got.split(widths, dim=2)]

    def _to_tokens(self, attended: Tensor) -> Tensor:
        """Exchange [N, H / c * D] (all tokens, own heads) for [n, H * D] (own tokens, all heads)."""
        padded = pad_rows(attended, -(-len(attended) // self.size) * self.size)
        got = exchanged(padded.unflatten(0, (-1, self.size)).transpose(0, 1), self._swap, self._swap)
        return got.transpose(0, 1).flatten(1)

    def _swap(self, x: Tensor) -> Tensor:
        """Send slice i of [c, ...] to rank i, and receive slice i from rank i. Calling this twice restores ``x``."""
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self.group)
        return out


def join_context(gang: Gang, *, size: int, tensor: int = 1) -> ContextGroup:
    """Return this rank's context group: one rank from each of ``size`` neighbouring tensor groups. This creates process groups, so
    every rank of the gang must call it at the same point."""
    if size == 1:
        return ContextGroup()
    key = ("context", size, tensor)
    if key not in gang.meshes:
        ranks = np.arange(gang.size).reshape(-1, size, tensor).swapaxes(1, 2).reshape(-1, size)
        gang.meshes[key], _ = dist.new_subgroups_by_enumeration(ranks.tolist())
        gang.greet(gang.meshes[key], f"context of {size}, tensor {tensor}")
    return ContextGroup(group=gang.meshes[key], rank=gang.rank // tensor % size, size=size)
