"""Attention over packed segments.

In half precision on CUDA it is one variable-length flash call; elsewhere (flash has no float32) segments of equal shape
are batched into one call each. Neither pads.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollcall.types import MicroBatch

# Scores (segments x heads x queries x keys) up to which a CPU attends by plain batched products, a third faster than
# torch's fused kernel but with the scores in memory.
PRODUCT_SCORES = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Segments of one shape."""

    count: int
    q_length: int
    k_length: int
    queries: Tensor  # [count * q_length] packed positions
    keys: Tensor  # [count * k_length] packed positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    kv_index: Tensor | None  # [K]; None: every segment's keys are its own tokens, in order
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    buckets: tuple[Bucket, ...]  # empty where flash runs
    restore: Tensor  # packed order from bucket order


def layout_of(batch: MicroBatch, *, device: torch.device, dtype: torch.dtype) -> Layout:
    q_lengths, k_lengths = np.diff(batch.cu_q), np.diff(batch.cu_k)
    buckets: tuple[Bucket, ...] = ()
    order = np.zeros(0, dtype=np.int64)
    if not runs_flash(device, dtype):
        buckets, order = _buckets(batch, q_lengths, k_lengths, device)
    shared = len(batch.kv_index) != batch.num_tokens
    return Layout(
        kv_index=torch.from_numpy(batch.kv_index).to(device) if shared else None,
        cu_q=torch.from_numpy(batch.cu_q).to(device),
        cu_k=torch.from_numpy(batch.cu_k).to(device),
        max_q=int(q_lengths.max()),
        max_k=int(k_lengths.max()),
        buckets=buckets,
        restore=torch.from_numpy(np.argsort(order)).to(device),
    )


def runs_flash(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype != torch.float32


def _buckets(
    batch: MicroBatch, q_lengths: np.ndarray, k_lengths: np.ndarray, device: torch.device
) -> tuple[tuple[Bucket, ...], np.ndarray]:
    buckets: list[Bucket] = []
    order: list[np.ndarray] = []
    for q_length, k_length in sorted(set(zip(q_lengths.tolist(), k_lengths.tolist(), strict=True))):
        members = np.flatnonzero((q_lengths == q_length) & (k_lengths == k_length))
        queries = np.concatenate([np.arange(batch.cu_q[i], batch.cu_q[i + 1]) for i in members]).astype(np.int64)
        keys = np.concatenate([batch.kv_index[batch.cu_k[i] : batch.cu_k[i + 1]] for i in members])
        order.append(queries)
        buckets.append(
            Bucket(
                count=len(members),
                q_length=q_length,
                k_length=k_length,
                queries=torch.from_numpy(queries).to(device),
                keys=torch.from_numpy(keys).to(device),
            )
        )
    return tuple(buckets), np.concatenate(order)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, scale: float, window: int) -> Tensor:
    """[N, H, D] queries and [N, Hkv, D] keys and values of packed tokens, to [N, H * D]."""
    if layout.buckets:
        return _bucketed(q, k, v, layout, scale, window).flatten(1)
    if layout.kv_index is not None:
        k, v = k.index_select(0, layout.kv_index), v.index_select(0, layout.kv_index)
    return flash(
        q, k, v, cu_q=layout.cu_q, cu_k=layout.cu_k, max_q=layout.max_q, max_k=layout.max_k, scale=scale, window=window
    ).flatten(1)


def flash(
    q: Tensor, k: Tensor, v: Tensor, *, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, window: int
) -> Tensor:
    """Causal attention of packed segments, aligned at their ends: [Nq, H, D] against [Nk, Hkv, D]."""
    from torch.nn.attention.varlen import varlen_attn

    extra: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _VARLEN_PARAMETERS else {}
    left = window - 1 if window else -1
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(left, 0), **extra)
    assert isinstance(out, Tensor)
    return out


def _bucketed(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int) -> Tensor:
    outs: list[Tensor] = []
    for bucket in layout.buckets:
        shape_q = (bucket.count, bucket.q_length, *q.shape[1:])
        shape_k = (bucket.count, bucket.k_length, *k.shape[1:])
        queries = q.index_select(0, bucket.queries).view(shape_q).transpose(1, 2)
        keys = k.index_select(0, bucket.keys).view(shape_k).transpose(1, 2)
        values = v.index_select(0, bucket.keys).view(shape_k).transpose(1, 2)
        mask = _end_aligned_mask(bucket.q_length, bucket.k_length, window, q.device)
        if not q.is_cuda and queries.shape[:3].numel() * bucket.k_length <= PRODUCT_SCORES:
            attended = _ProductAttention.apply(queries, keys, values, mask, scale)
        else:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        assert isinstance(attended, Tensor)
        outs.append(attended.transpose(1, 2).reshape(bucket.count * bucket.q_length, *q.shape[1:]))
    return torch.cat(outs).index_select(0, layout.restore)


class _ProductAttention(torch.autograd.Function):
    """[B, H, Q, D] against [B, Hkv, K, D]. The query heads of one KV head stand in the query axis, so keys are never
    repeated."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        groups = q.shape[1] // k.shape[1]
        queries = q.reshape(-1, groups * q.shape[2], q.shape[3])
        keys, values = k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])
        hidden = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf).repeat(groups, 1)
        probs = torch.softmax(torch.baddbmm(hidden, queries, keys.transpose(1, 2), alpha=scale), dim=-1)
        ctx.save_for_backward(queries, keys, values, probs)
        ctx.scale, ctx.q_shape, ctx.k_shape = scale, q.shape, k.shape
        return torch.bmm(probs, values).view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        queries, keys, values, probs = ctx.saved_tensors
        grad = grad.reshape(queries.shape)
        grad_values = torch.bmm(probs.transpose(1, 2), grad)
        grad_scores = torch._softmax_backward_data(torch.bmm(grad, values.transpose(1, 2)), probs, -1, probs.dtype)
        grad_queries = torch.bmm(grad_scores, keys).mul_(ctx.scale)
        grad_keys = torch.bmm(grad_scores.transpose(1, 2), queries).mul_(ctx.scale)
        return (
            grad_queries.view(ctx.q_shape), grad_keys.view(ctx.k_shape), grad_values.view(ctx.k_shape), None, None
        )  # fmt: skip


def _end_aligned_mask(q_length: int, k_length: int, window: int, device: torch.device) -> Tensor:
    queries = torch.arange(k_length - q_length, k_length, device=device)
    distance = queries[:, None] - torch.arange(k_length, device=device)
    mask = distance >= 0
    return mask & (distance < window) if window else mask


def _varlen_parameters() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


_VARLEN_PARAMETERS = _varlen_parameters()
