"""Attention of several new tokens of each row over all its KV, in a CPU's dense rows.

Rows end together, and the new tokens are the last ones. So rows with equally many of them are attended to in one call, whatever
their lengths: a mask hides what is before a row's first token and what is behind a query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from rollcall.engine.native.kept_rows import places
from rollcall.engine.native.runner import Fill

MOST_SCORES = 1 << 25  # rows x heads x queries x keys of one call

AttendRows = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q [rows * Hkv, queries, D], keys [rows * Hkv, D, columns], values [rows * Hkv, columns, D], mask) -> as q"""


@dataclass(slots=True, kw_only=True)
class Extension:
    """Rows that get equally many tokens."""

    start: int  # of their tokens among those of all extensions
    num_new: int  # of each
    rows: list[int]
    lengths: list[int]  # tokens of each row, the new ones included
    seats: slice | Tensor  # of [rows * Hkv]
    masks: dict[int, Tensor] = field(default_factory=dict)  # by window

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, *, window: int, attend: AttendRows) -> Tensor:
        """q [N, H, D] of all extensions' tokens; keys and values of these rows' seats, up to the end. [tokens of these, H * D]"""
        count, dim = len(self.rows), q.shape[-1]
        kv_heads = len(keys) // count
        own = q[self.start : self.start + count * self.num_new]
        # The query heads of one KV head stand in the query axis: grouped attention without repeating keys.
        by_head = own.view(count, self.num_new, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).float()
        groups = by_head.shape[2]
        most = max(1, MOST_SCORES // (count * q.shape[1] * self.longest))
        outs: list[Tensor] = []
        for first in range(0, self.num_new, most):
            part = by_head[:, :, :, first : first + most]
            mask = self._mask(first, part.shape[3], window=window).repeat(1, groups, 1)
            mask = mask if len(mask) == 1 else mask.repeat_interleave(kv_heads, dim=0)
            out = attend(part.reshape(count * kv_heads, -1, dim), keys, values, mask)
            outs.append(out.view(part.shape))
        return torch.cat(outs, dim=3).permute(0, 3, 1, 2, 4).reshape(len(own), -1).to(q.dtype)

    def _mask(self, first: int, num_queries: int, *, window: int) -> Tensor:
        """Additive [rows, queries, columns] for queries from the ``first`` new token on; one row where all see the same."""
        if num_queries == self.num_new and window in self.masks:
            return self.masks[window]
        columns = torch.arange(self.longest)
        own = torch.arange(num_queries) + self.longest - self.num_new + first
        hidden = (columns > own[:, None])[None]
        if window:
            hidden = hidden | (columns <= own[:, None] - window)
        if len(set(self.lengths)) > 1:
            hidden = hidden | (columns < self.longest - torch.tensor(self.lengths)[:, None])[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        if num_queries == self.num_new:
            self.masks[window] = mask
        return mask


def plan_extensions(fills: list[Fill], *, kv_heads: int) -> list[Extension]:
    """Of the fills with a past, which have equal numbers of tokens side by side."""
    extensions: list[Extension] = []
    start = 0
    for num_new, group in groupby((fill for fill in fills if fill.past), key=lambda fill: len(fill.token_ids)):
        members = list(group)
        rows = [fill.rows[0] for fill in members]
        extensions.append(
            Extension(
                start=start,
                num_new=num_new,
                rows=rows,
                lengths=[fill.past + num_new for fill in members],
                seats=places([row * kv_heads + head for row in rows for head in range(kv_heads)]),
            )
        )
        start += num_new * len(rows)
    return extensions
