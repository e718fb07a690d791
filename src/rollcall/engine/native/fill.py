"""Fills the KV cache: several token lists run through the decoder in one packed forward pass, without padding.

A list without a past attends only to its own tokens. A list with a past, such as a session's next turn, also attends to the stored KV.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollcall.base.errors import is_out_of_memory
from rollcall.engine.native.runner import Fill
from rollcall.model.attention import end_aligned_mask, flash, on_device, runs_flash
from rollcall.model.decoder import Decoder

Store = Callable[[int, Tensor, Tensor], None]
"""(layer, k [N, Hkv, D], v [N, Hkv, D]): stores these keys and values. The N tokens are those of all fills, one fill after another."""

AttendPast = Callable[[int, Tensor], Tensor]
"""(layer, q [N, H, D]) -> [N, H * D]: attention of the fills with a past, over all stored KV."""


def run_fills(
    decoder: Decoder, fills: list[Fill], store: Store, attend_past: AttendPast, *, gain: Tensor | None = None
) -> None:
    """Compute the keys and values of all fills in order. Fills with a past must be last. ``gain`` selects each token's adapter."""
    ids = np.concatenate([fill.token_ids for fill in fills]).astype(np.int64)
    positions = np.concatenate([fill.past + np.arange(len(fill.token_ids)) for fill in fills])
    device = decoder.device
    fresh = [len(fill.token_ids) for fill in fills if not fill.past]
    num_fresh = sum(fresh)
    cumulative = _cumulative(fresh, device)

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store(index, k, v)
        if not num_fresh:
            return attend_past(index, q)
        out = _attend_fresh(
            *(x[:num_fresh] for x in (q, k, v)),
            cumulative=cumulative,
            lengths=fresh,
            window=decoder.layers[index].window,
            scale=decoder.shape.scale,
        )
        return out if num_fresh == len(ids) else torch.cat((out, attend_past(index, q[num_fresh:])))

    decoder.forward(on_device(ids, device), on_device(positions, device), attend, gain=gain)


def run_halved(fills: list[Fill], run: Callable[[list[Fill]], None], *, smaller: Callable[[int], None]) -> None:
    """Run all fills at once. If memory runs out, run each half by itself. This may store KV a second time, but does not change it.
    ``smaller`` is called with the number of tokens that did not fit. If a single fill does not fit, raise."""
    try:
        run(fills)
        return
    except Exception as error:
        if len(fills) == 1 or not is_out_of_memory(error):
            raise
    smaller(sum(len(fill.token_ids) for fill in fills))
    half = len(fills) // 2
    for part in (fills[:half], fills[half:]):
        run_halved(part, run, smaller=smaller)


def _attend_fresh(
    q: Tensor, k: Tensor, v: Tensor, *, cumulative: Tensor, lengths: list[int], window: int, scale: float
) -> Tensor:
    if not runs_flash(q.device, q.dtype):
        return _equal_length_runs(q, k, v, lengths, window=window, scale=scale)
    longest = max(lengths)
    out = flash(q, k, v, cu_q=cumulative, cu_k=cumulative, max_q=longest, max_k=longest, scale=scale, window=window)
    return out.reshape(len(q), -1)


def _equal_length_runs(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], *, window: int, scale: float) -> Tensor:
    """Compute attention with one batched call for each run of neighbouring fills of the same length."""
    outs, start = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        end = start + length * count
        parts = [x[start:end].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        mask = end_aligned_mask(length, length, window, q.device) if window and length > window else None
        outs.append(_attend(*parts, mask=mask, scale=scale).transpose(1, 2).reshape(length * count, -1))
        start = end
    return torch.cat(outs)


def attend_packed(q: Tensor, keys: Tensor, values: Tensor, fills: list[Fill], *, window: int, scale: float) -> Tensor:
    """Compute attention for the queries q [Nq, H, D] of all fills' tokens over the keys and values [Nk, Hkv, D] of their pasts and
    tokens. Return [Nq, H * D]."""
    num_queries = [len(fill.token_ids) for fill in fills]
    num_keys = [fill.past + len(fill.token_ids) for fill in fills]
    if not runs_flash(q.device, q.dtype):
        parts = zip(q.split(num_queries), keys.split(num_keys), values.split(num_keys), strict=True)
        return torch.cat([_attend_one(*part, window=window, scale=scale) for part in parts])
    cu_q, cu_k = _cumulative(num_queries, q.device), _cumulative(num_keys, q.device)
    return flash(
        q, keys, values, cu_q=cu_q, cu_k=cu_k, max_q=max(num_queries), max_k=max(num_keys), scale=scale, window=window
    ).reshape(len(q), -1)


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, *, window: int, scale: float) -> Tensor:
    """Compute attention for one fill. Its last query and its last key belong to the same token."""
    parts = (x.transpose(0, 1)[None] for x in (q, keys, values))
    out = _attend(*parts, mask=end_aligned_mask(len(q), len(keys), window, q.device), scale=scale)
    return out[0].transpose(0, 1).reshape(len(q), -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention for q [B, H, queries, D]. Without a mask, attention is causal."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
