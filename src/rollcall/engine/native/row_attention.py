"""Attention over a CPU's dense rows, in one of two ways: two batched products, or torch's fused kernel.

Rows end together, so a row that has fewer columns than the longest begins later, and a mask hides what is before it. Rows are often almost
equally long. A product's scores are masked only in the columns where something is hidden; the fused kernel takes a mask of all columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rollcall.model.attention import Way
from rollcall.types import Longs

Masks = tuple[tuple[int, Tensor], ...]
"""Each from a column on, additive [rows * Hkv or 1, queries or 1, columns]; none: every query sees every column."""

AttendRows = Callable[[Tensor, Tensor, Tensor, Masks], Tensor]
"""(q [rows * Hkv, queries, D], keys [rows * Hkv, D, columns], values [rows * Hkv, columns, D], masks) -> as q"""


def attend_by_products(q: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
    scores = torch.bmm(q * q.shape[-1] ** -0.5, keys)
    for start, mask in masks:
        scores[:, :, start : start + mask.shape[-1]].add_(mask)
    return torch.bmm(torch.softmax(scores, dim=-1), values)


def attend_fused(q: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
    mask = masks[0][1][:, None] if masks else None
    return F.scaled_dot_product_attention(q[:, None], keys.transpose(1, 2)[:, None], values[:, None], attn_mask=mask)[
        :, 0
    ]


ATTEND: dict[Way, AttendRows] = {"products": attend_by_products, "fused": attend_fused}


def hide_starts(num_hidden: Longs, *, num_columns: int, way: Way) -> Tensor | None:
    """A mask from the first column on that hides this many columns of each of [rows * Hkv]; None: there is nothing to hide."""
    most = int(num_hidden.max())
    if not most:
        return None
    columns = torch.arange(most if way == "products" else num_columns)
    return additive(columns < torch.from_numpy(num_hidden)[:, None])[:, None]


def additive(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
