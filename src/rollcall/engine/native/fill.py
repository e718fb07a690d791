"""Filling the KV cache: several token lists run through the decoder in one packed forward, without padding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollcall.engine.native.runner import Fill
from rollcall.errors import is_out_of_memory
from rollcall.model.arrays import on_device
from rollcall.model.attention import flash, runs_flash
from rollcall.model.decoder import Decoder

Store = Callable[[int, Tensor, Tensor], None]
"""(layer, k [N, Hkv, D], v [N, Hkv, D]): keep these; N runs over the fills' tokens end to end."""

AttendPast = Callable[[int, Tensor], Tensor]
"""(layer, q [N, H, D]) -> [N, H * D]: attention of the tokens of the fills with a past over all that is stored."""


def run_fills(
    decoder: Decoder, fills: list[Fill], store: Store, attend_past: AttendPast, *, gain: Tensor | None = None
) -> int:
    """Compute the keys and values of all fills, in the given order, those with a past last; how many tokens that was. ``gain`` says
    which adapter each token has."""
    lengths = [len(fill.token_ids) for fill in fills]
    ids = np.concatenate([fill.token_ids for fill in fills]).astype(np.int64)
    positions = np.concatenate([fill.past + np.arange(len(fill.token_ids)) for fill in fills])
    device = decoder.device
    fresh = [len(fill.token_ids) for fill in fills if not fill.past]
    num_fresh = sum(fresh)
    cumulative = torch.tensor([0, *np.cumsum(fresh)], dtype=torch.int32, device=device)

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store(index, k, v)
        if not num_fresh:
            return attend_past(index, q)
        window = decoder.layers[index].window
        out = _attend_fresh(*(x[:num_fresh] for x in (q, k, v)), cumulative=cumulative, lengths=fresh, window=window)
        return out if num_fresh == len(ids) else torch.cat((out, attend_past(index, q[num_fresh:])))

    decoder.forward(on_device(ids, device), on_device(positions, device), attend, gain=gain)
    return sum(lengths)


def run_halved(fills: list[Fill], run: Callable[[list[Fill]], None], *, smaller: Callable[[int], None]) -> None:
    """Run all fills at once; if memory ends, each half of them by itself. What was stored before is stored again, the same.
    ``smaller`` gets the tokens of what did not fit. One fill alone that does not fit raises."""
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


def _attend_fresh(q: Tensor, k: Tensor, v: Tensor, *, cumulative: Tensor, lengths: list[int], window: int) -> Tensor:
    if not runs_flash(q.device, q.dtype):
        return _equal_length_runs(q, k, v, lengths, window)
    longest = max(lengths)
    out = flash(
        q,
        k,
        v,
        cu_q=cumulative,
        cu_k=cumulative,
        max_q=longest,
        max_k=longest,
        scale=q.shape[-1] ** -0.5,
        window=window,
    )
    return out.reshape(len(q), -1)


def _equal_length_runs(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int) -> Tensor:
    """One batched call per run of neighbouring fills of the same length."""
    outs, start = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        end = start + length * count
        parts = [x[start:end].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        outs.append(_causal(*parts, window=window).transpose(1, 2).reshape(length * count, -1))
        start = end
    return torch.cat(outs)


def _causal(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if not window or length <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    mask = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
