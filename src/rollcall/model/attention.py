"""Attention over packed segments.

In half precision on CUDA, this is one variable-length flash call. Otherwise (flash does not support float32), segments of equal shape
are batched into one call per shape. Neither method needs padding.

On a CPU there are two equivalent methods: batched products with the scores in memory, and torch's fused kernel.
``cpu_way`` says which one is faster on this machine; the learner and the native engine both use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollcall.base.types import MicroBatch

if TYPE_CHECKING:
    from rollcall.model.kernels.gradients import Shared  # needs Triton


# Up to this many scores (segments x heads x queries x keys), a CPU processes all query heads of a KV head at once. This takes
# memory: products store the scores, and the fused kernel repeats the mask for each of those heads.
GROUPED_SCORES = 1 << 25

Way = Literal["products", "fused"]


def cpu_way() -> Way:
    """Choose products if torch has MKL, which multiplies a batch of small matrices in one call and is a third faster than the
    fused kernel. Without MKL, as on ARM, ``bmm`` runs one product per matrix and the fused kernel is several times faster.

    The choice depends on the torch build, not on a measurement, so that a restarted run computes the same numbers.
    """
    return "products" if torch.backends.mkl.is_available() else "fused"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments with the same shape."""

    count: int
    q_length: int
    k_length: int
    queries: Tensor  # [count * q_length] packed positions
    keys: Tensor  # [count * k_length] packed positions


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    shared: Shared | None  # for flash; None if every segment's keys are its own tokens, in order
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    buckets: tuple[Bucket, ...]  # empty if flash is used
    restore: Tensor  # indices that turn bucket order back into packed order


def layout_of(batch: MicroBatch, *, device: torch.device, dtype: torch.dtype) -> PackedLayout:
    q_lengths, k_lengths = np.diff(batch.cu_q), np.diff(batch.cu_k)
    buckets: tuple[Bucket, ...] = ()
    order, shared = np.zeros(0, dtype=np.int64), None
    if not runs_flash(device, dtype):
        buckets, order = _buckets(batch, q_lengths, k_lengths, device)
    elif len(batch.kv_index) != batch.num_tokens:
        from rollcall.model.kernels.gradients import Shared

        shared = Shared.of(on_device(batch.kv_index, device), num_tokens=batch.num_tokens)
    return PackedLayout(
        shared=shared,
        cu_q=on_device(batch.cu_q, device),
        cu_k=on_device(batch.cu_k, device),
        max_q=int(q_lengths.max()),
        max_k=int(k_lengths.max()),
        buckets=buckets,
        restore=on_device(np.argsort(order), device),
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
        buckets.append(Bucket(len(members), q_length, k_length, on_device(queries, device), on_device(keys, device)))
    return tuple(buckets), np.concatenate(order)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, *, scale: float, window: int) -> Tensor:
    """Map packed queries [N, H, D], keys and values [N, Hkv, D] to outputs [N, H * D]."""
    if layout.buckets:
        return _bucketed(q, k, v, layout, scale, window).flatten(1)
    if layout.shared is not None:
        k, v = layout.shared.take(k), layout.shared.take(v)
    return flash(
        q, k, v, cu_q=layout.cu_q, cu_k=layout.cu_k, max_q=layout.max_q, max_k=layout.max_k, scale=scale, window=window
    ).flatten(1)


def flash(
    q: Tensor, k: Tensor, v: Tensor, *, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, window: int
) -> Tensor:
    """Compute causal attention of queries [Nq, H, D] to keys [Nk, Hkv, D] in packed segments, which end at the same token."""
    return _varlen()(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(window - 1 if window else -1, 0))


@cache
def _varlen() -> Callable[..., Tensor]:
    """Return ``varlen_attn``. In newer torch versions, it must be told that several query heads may share a key/value head."""
    from torch.nn.attention.varlen import varlen_attn

    asks = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if asks else varlen_attn  # type: ignore[return-value]


def _bucketed(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int) -> Tensor:
    most = max(bucket.count * bucket.q_length * bucket.k_length for bucket in layout.buckets)
    if not q.is_cuda and most * q.shape[1] <= GROUPED_SCORES:
        out = _GroupedAttention.apply(q.float(), k.float(), v.float(), layout, scale, window)
        assert isinstance(out, Tensor)
        return out.to(q.dtype)
    outs: list[Tensor] = []
    for bucket in layout.buckets:
        queries, keys, values = (
            tensor.index_select(0, rows).unflatten(0, (bucket.count, -1)).transpose(1, 2)
            for tensor, rows in ((q, bucket.queries), (k, bucket.keys), (v, bucket.keys))
        )
        mask = end_aligned_mask(bucket.q_length, bucket.k_length, window, q.device)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, layout.restore)


class _GroupedAttention(torch.autograd.Function):
    """Process all buckets on a CPU, in float32. The query heads of a KV head are put on the query axis, so keys are never repeated.
    Each token is a query exactly once, so its gradient is stored, not accumulated."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int) -> Tensor:  # type: ignore[override]
        out = torch.empty(q.shape, dtype=q.dtype)
        flat_q, flat_k, flat_v, flat_out = (x.reshape(-1, x.shape[2]) for x in (q, k, v, out))
        attend = _by_products if cpu_way() == "products" else _by_fused_kernel
        saved: list[Tensor] = []
        places: list[tuple[Tensor, Tensor]] = []
        kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
        for bucket in layout.buckets:
            q_places = _heads_first(bucket.queries, bucket.count, q.shape[1])
            k_places = _heads_first(bucket.keys, bucket.count, kv_heads)
            queries, keys, values = (
                x.index_select(0, rows).view(bucket.count * kv_heads, -1, x.shape[1])
                for x, rows in ((flat_q, q_places), (flat_k, k_places), (flat_v, k_places))
            )
            mask = end_aligned_mask(bucket.q_length, bucket.k_length, window, q.device)
            hidden = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf).repeat(groups, 1)
            attended, kept = attend(queries, keys, values, hidden, scale)
            flat_out.index_copy_(0, q_places, attended.flatten(0, 1))
            saved += (queries, keys, values, *kept)
            places.append((q_places, k_places))
        ctx.save_for_backward(*saved)
        ctx.backward_of = _products_backward if attend is _by_products else _fused_kernel_backward
        ctx.places, ctx.scale, ctx.shapes = places, scale, (q.shape, k.shape)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_shape, k_shape = ctx.shapes
        flat = grad.reshape(-1, q_shape[2])
        grad_q = torch.empty(flat.shape, dtype=grad.dtype)
        grad_k, grad_v = (torch.zeros(k_shape, dtype=grad.dtype).flatten(0, 1) for _ in range(2))
        saved = ctx.saved_tensors
        each = len(saved) // len(ctx.places)
        for number, (q_places, k_places) in enumerate(ctx.places):
            of_bucket = saved[number * each : (number + 1) * each]
            grad_out = flat.index_select(0, q_places).view(of_bucket[0].shape)
            grad_queries, grad_keys, grad_values = ctx.backward_of(grad_out, *of_bucket, scale=ctx.scale)
            grad_q.index_copy_(0, q_places, grad_queries.flatten(0, 1))
            grad_k.index_add_(0, k_places, grad_keys.flatten(0, 1))
            grad_v.index_add_(0, k_places, grad_values.flatten(0, 1))
        return grad_q.view(q_shape), grad_k.view(k_shape), grad_v.view(k_shape), None, None, None


Kept = tuple[Tensor, ...]  # saved for the backward pass, in addition to queries, keys and values


def _by_products(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Kept]:
    """Attend from [B, queries, D] to [B, keys, D], with ``hidden`` added to the scores."""
    probs = torch.softmax(torch.baddbmm(hidden, queries, keys.transpose(1, 2), alpha=scale), dim=-1)
    return torch.bmm(probs, values), (probs,)


def _products_backward(
    grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, probs: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_probs = torch.bmm(grad, values.transpose(1, 2))
    grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype).mul_(scale)
    return (
        torch.bmm(grad_scores, keys),
        torch.bmm(grad_scores.transpose(1, 2), queries),
        torch.bmm(probs.transpose(1, 2), grad),
    )


def _by_fused_kernel(
    queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float
) -> tuple[Tensor, Kept]:
    """Like ``_by_products``, but without storing the scores. The backward pass recomputes them from each row's log-sum-exp."""
    hidden = hidden[None, None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries[:, None], keys[:, None], values[:, None], attn_mask=hidden, scale=scale
    )
    return out[:, 0], (out, lse, hidden)


def _fused_kernel_backward(grad: Tensor, *saved: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values, out, lse, hidden = saved
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad[:, None], queries[:, None], keys[:, None], values[:, None], out, lse, 0.0, False, attn_mask=hidden, scale=scale
    )  # fmt: skip
    return tuple(part[:, 0] for part in grads)  # type: ignore[return-value]


def _heads_first(rows: Tensor, count: int, heads: int) -> Tensor:
    """Return row indices in [N * heads, D] for tokens [count * length], ordered by segment, head, token."""
    return (rows.view(count, 1, -1) * heads + torch.arange(heads).view(1, heads, 1)).flatten()


def end_aligned_mask(q_length: int, k_length: int, window: int, device: torch.device) -> Tensor:
    queries = torch.arange(k_length - q_length, k_length, device=device)
    distance = queries[:, None] - torch.arange(k_length, device=device)
    mask = distance >= 0
    return mask & (distance < window) if window else mask


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy the array to the device. Pinned memory keeps the host from waiting for work already queued on a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
