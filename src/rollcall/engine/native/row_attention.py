"""Attention over the CPU runner's dense rows, computed with either two batched products or torch's fused kernel.

Rows end together, so a row with fewer columns than the longest begins later, and a mask hides the columns before it. Rows often have
almost the same length. So with products, only the columns in which something is hidden get a mask. The fused kernel needs a full mask.

An ``Extension`` adds several new tokens to each row in a set, such as the next turns of sessions. The new tokens are the last tokens of
their rows. So one call can process neighbouring rows with the same number of new tokens, even if the rows differ in length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollcall.base.types import Longs
from rollcall.engine.native.runner import Fill
from rollcall.model.attention import Way

MOST_SCORES = 1 << 25  # rows x heads x queries x keys in one call

Masks = tuple[tuple[int, Tensor], ...]
"""Additive masks [rows * Hkv or 1, queries or 1, columns], each with its first column. Without a mask, queries see every column."""

AttendRows = Callable[[Tensor, Tensor, Tensor, Masks, float], Tensor]
"""(q [rows * Hkv, queries, D], keys [rows * Hkv, D, columns], values [rows * Hkv, columns, D], masks, scale) -> shaped like q"""


def attend_by_products(q: Tensor, keys: Tensor, values: Tensor, masks: Masks, scale: float) -> Tensor:
    scores = torch.bmm(q * scale, keys)
    for start, mask in masks:
        scores[:, :, start : start + mask.shape[-1]].add_(mask)
    return torch.bmm(torch.softmax(scores, dim=-1), values)


def attend_fused(q: Tensor, keys: Tensor, values: Tensor, masks: Masks, scale: float) -> Tensor:
    mask = masks[0][1][:, None] if masks else None
    return F.scaled_dot_product_attention(
        q[:, None], keys.transpose(1, 2)[:, None], values[:, None], attn_mask=mask, scale=scale
    )[:, 0]


ATTEND: dict[Way, AttendRows] = {"products": attend_by_products, "fused": attend_fused}


def hide_starts(num_hidden: Longs, *, num_columns: int, way: Way) -> Tensor | None:
    """Return a mask that hides this many columns at the start of each of [rows * Hkv], or None if there is nothing to hide."""
    most = int(num_hidden.max())
    if not most:
        return None
    columns = torch.arange(most if way == "products" else num_columns)
    return additive(columns < torch.from_numpy(num_hidden)[:, None])[:, None]


def additive(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


@dataclass(slots=True, kw_only=True)
class Extension:
    """Adjacent rows that get the same number of new tokens."""

    start: int  # where these rows' tokens begin among the tokens of all extensions
    num_new: int  # new tokens per row
    first_row: int
    lengths: list[int]  # tokens in each row, including the new ones
    masks: dict[int, Masks] = field(default_factory=dict)  # by window

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, *, window: int, scale: float, way: Way) -> Tensor:
        """Compute attention for these rows' part of q [N, H, D] over their keys and values. Return [tokens of these rows, H * D]."""
        count, dim = len(self.lengths), q.shape[-1]
        kv_heads = len(keys) // count
        own = q[self.start : self.start + count * self.num_new]
        # Put the query heads of a KV head on the query axis: grouped attention without repeating keys.
        by_head = own.view(count, self.num_new, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).float()
        groups = by_head.shape[2]
        most = max(1, MOST_SCORES // (count * q.shape[1] * self.longest))
        outs: list[Tensor] = []
        for first in range(0, self.num_new, most):
            part = by_head[:, :, :, first : first + most]
            if most < self.num_new or window not in self.masks:
                queries = torch.arange(first, first + part.shape[3]).repeat(groups)
                self.masks[window] = self._masks(queries, kv_heads=kv_heads, window=window, way=way)
            out = ATTEND[way](part.reshape(count * kv_heads, -1, dim), keys, values, self.masks[window], scale)
            outs.append(out.view(part.shape))
        return torch.cat(outs, dim=3).permute(0, 3, 1, 2, 4).reshape(len(own), -1).to(q.dtype)

    def _masks(self, queries: Tensor, *, kv_heads: int, window: int, way: Way) -> Masks:
        """Return the masks for the queries of the new tokens with these indices."""
        num_hidden = (self.longest - np.array(self.lengths)).repeat(kv_heads)
        if way == "products" and not window:
            behind = torch.arange(self.num_new) > queries[:, None]
            starts = hide_starts(num_hidden, num_columns=self.longest, way=way)
            ends = (self.longest - self.num_new, additive(behind[None]))
            return (ends,) if starts is None else ((0, starts), ends)
        columns, own = torch.arange(self.longest), (queries + self.longest - self.num_new)[:, None]
        hidden = (columns > own)[None]
        if window:
            hidden = hidden | (columns <= own - window)
        if num_hidden.any():
            hidden = hidden | (columns < torch.from_numpy(num_hidden)[:, None])[:, None]
        return ((0, additive(hidden)),)


def plan_extensions(fills: list[Fill]) -> list[Extension]:
    """Group the fills with a past. Fills of equal length must be next to each other."""
    extensions: list[Extension] = []
    start = 0
    past = [fill for fill in fills if fill.past]
    # For adjacent rows, the difference between row and index is constant.
    for (num_new, _), group in groupby(
        enumerate(past), key=lambda each: (len(each[1].token_ids), each[1].rows[0] - each[0])
    ):
        members = [fill for _, fill in group]
        extensions.append(
            Extension(
                start=start,
                num_new=num_new,
                first_row=members[0].rows[0],
                lengths=[fill.past + num_new for fill in members],
            )
        )
        start += num_new * len(members)
    return extensions
