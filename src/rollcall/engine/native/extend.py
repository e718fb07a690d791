"""Attention of several new tokens of each row over all its KV, in a CPU's dense rows.

Rows end together, and the new tokens are the last ones. So rows side by side with equally many of them are attended to in one call,
whatever their lengths: masks hide what is before a row's first token and what is behind a query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from rollcall.engine.native.row_attention import ATTEND, Masks, additive, hide_starts
from rollcall.engine.native.runner import Fill
from rollcall.model.attention import Way

MOST_SCORES = 1 << 25  # rows x heads x queries x keys of one call


@dataclass(slots=True, kw_only=True)
class Extension:
    """Rows side by side that get equally many tokens."""

    start: int  # of their tokens among those of all extensions
    num_new: int  # of each
    first_row: int
    lengths: list[int]  # tokens of each row, the new ones included
    masks: dict[int, Masks] = field(default_factory=dict)  # by window

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, *, window: int, way: Way) -> Tensor:
        """q [N, H, D] of all extensions' tokens; keys and values of these rows, as long as the longest. [tokens of these, H * D]"""
        count, dim = len(self.lengths), q.shape[-1]
        kv_heads = len(keys) // count
        own = q[self.start : self.start + count * self.num_new]
        # The query heads of one KV head stand in the query axis: grouped attention without repeating keys.
        by_head = own.view(count, self.num_new, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).float()
        groups = by_head.shape[2]
        most = max(1, MOST_SCORES // (count * q.shape[1] * self.longest))
        outs: list[Tensor] = []
        for first in range(0, self.num_new, most):
            part = by_head[:, :, :, first : first + most]
            if most < self.num_new or window not in self.masks:
                queries = torch.arange(first, first + part.shape[3]).repeat(groups)
                self.masks[window] = self._masks(queries, kv_heads=kv_heads, window=window, way=way)
            out = ATTEND[way](part.reshape(count * kv_heads, -1, dim), keys, values, self.masks[window])
            outs.append(out.view(part.shape))
        return torch.cat(outs, dim=3).permute(0, 3, 1, 2, 4).reshape(len(own), -1).to(q.dtype)

    def _masks(self, queries: Tensor, *, kv_heads: int, window: int, way: Way) -> Masks:
        """For queries that are the new tokens with these numbers."""
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
    """Of the fills with a past, which have equal numbers of tokens side by side."""
    extensions: list[Extension] = []
    start = 0
    past = [fill for fill in fills if fill.past]
    # Rows side by side keep their distance to their place.
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
