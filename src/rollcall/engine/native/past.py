"""Attention of packed new tokens over packed keys that hold their past as well."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollcall.engine.native.runner import Fill
from rollcall.model.attention import end_aligned_mask, flash, runs_flash


def attend_packed(q: Tensor, keys: Tensor, values: Tensor, fills: list[Fill], *, window: int) -> Tensor:
    """[Nq, H, D] of the fills' tokens end to end, against [Nk, Hkv, D] of their pasts and tokens end to end, to [Nq, H * D]."""
    num_queries = [len(fill.token_ids) for fill in fills]
    num_keys = [fill.past + len(fill.token_ids) for fill in fills]
    if not runs_flash(q.device, q.dtype):
        parts = zip(q.split(num_queries), keys.split(num_keys), values.split(num_keys), strict=True)
        return torch.cat([_attend_one(*part, window=window) for part in parts])
    out = flash(
        q,
        keys,
        values,
        cu_q=_cumulative(num_queries, q.device),
        cu_k=_cumulative(num_keys, q.device),
        max_q=max(num_queries),
        max_k=max(num_keys),
        scale=q.shape[-1] ** -0.5,
        window=window,
    )
    return out.reshape(len(q), -1)


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, *, window: int) -> Tensor:
    """One fill alone; the last query and the last key are the same token."""
    mask = end_aligned_mask(len(q), len(keys), window, q.device)
    parts = (x.transpose(0, 1)[None] for x in (q, keys, values))
    out = F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=q.shape[1] != keys.shape[1])
    return out[0].transpose(0, 1).reshape(len(q), -1)
