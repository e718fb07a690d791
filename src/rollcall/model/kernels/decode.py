# Triton is not installed on most machines, and its decorator hides from the type checker that a kernel is launched with a subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""The parts of a decode step between its matrix products, except attention (``attention.py``): norm, rotary embedding into
the paged cache, and gated activation. Each sequence contributes one token.

Rounding follows transformers op by op (the model's dtype between ops, float32 inside them), so that the engine's
log-probs stay close to the learner's. A row with a negative position is padding and does not touch the cache.

Axes: B rows, C hidden size, H query heads, K key/value heads, D head size (a multiple of 16), I inner size.
"""

import torch
import triton
import triton.language as tl

from rollcall.model.kernels.attention import check_cache
from rollcall.model.kernels.early import launch, wait_for_inputs


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, residual_out_ptr, x_stride, residual_stride, num_columns, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    dtype = out_ptr.dtype.element_ty
    hidden = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
        hidden = (hidden.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_out_ptr + row * num_columns + columns, hidden, mask=inside)
    wide = hidden.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / num_columns + eps)
    normed = (wide * inverse).to(dtype)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    scaled = (normed.to(tl.float32) * weight.to(tl.float32)).to(dtype)
    tl.store(out_ptr + row * num_columns + columns, scaled, mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``h = residual + x`` in x's dtype, then ``weight * norm(h)``. Returns (normed, h), both [B, C].

    Without a residual, h is x itself.
    """
    num_rows, num_columns = x.shape
    assert x.stride(1) == 1 and x.dtype == weight.dtype
    out = x.new_empty(x.shape)
    new_residual = x
    if residual is not None:
        assert (residual.shape, residual.dtype) == (x.shape, x.dtype)
        new_residual = x.new_empty(x.shape)
    block = triton.next_power_of_2(num_columns)
    _rms_norm_kernel[(num_rows,)](
        x, residual, weight, out, new_residual,
        x.stride(0), 0 if residual is None else residual.stride(0), num_columns, eps,
        HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=min(max(block // 256, 1), 16), **launch(x),
    )  # fmt: skip
    return out, new_residual


@triton.jit
def _rope_cache_kernel(
    qkv_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, q_out_ptr,
    qkv_stride, cos_sin_stride, table_stride, block_stride, slot_stride, head_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: HEADS neighbouring heads of one row, as two halves [HEADS, HALF] that rotate into each other."""
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    halves = tl.arange(0, HALF)
    half_dim: tl.constexpr = HEAD_DIM // 2
    dtype = q_out_ptr.dtype.element_ty
    dims_inside = halves < half_dim
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & dims_inside[None, :]
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS

    position = tl.load(positions_ptr + row).to(tl.int64)
    is_live = position >= 0
    position = tl.maximum(position, 0)

    source = qkv_ptr + row * qkv_stride + heads[:, None] * HEAD_DIM + halves[None, :]
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + half_dim, mask=inside, other=0.0)
    first = low.to(tl.float32)
    second = high.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        q_low = tl.load(q_norm_ptr + halves, mask=dims_inside, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm_ptr + half_dim + halves, mask=dims_inside, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm_ptr + halves, mask=dims_inside, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm_ptr + half_dim + halves, mask=dims_inside, other=0.0).to(tl.float32)
        weight_low = tl.where(is_query[:, None], q_low[None, :], k_low[None, :])
        weight_high = tl.where(is_query[:, None], q_high[None, :], k_high[None, :])
        first = ((first * inverse).to(dtype).to(tl.float32) * weight_low).to(dtype).to(tl.float32)
        second = ((second * inverse).to(dtype).to(tl.float32) * weight_high).to(dtype).to(tl.float32)

    # transformers rounds cosines, sines and both products to the model's dtype before the sum.
    angles = cos_sin_ptr + position * cos_sin_stride + halves
    cos = tl.load(angles, mask=dims_inside, other=0.0).to(dtype).to(tl.float32)[None, :]
    sin = tl.load(angles + half_dim, mask=dims_inside, other=0.0).to(dtype).to(tl.float32)[None, :]
    turned_low = ((first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)).to(dtype)
    turned_high = ((second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)).to(dtype)

    query = inside & is_query[:, None]
    target = q_out_ptr + row * (NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + halves[None, :]
    tl.store(target, turned_low, mask=query)
    tl.store(target + half_dim, turned_high, mask=query)

    block = tl.load(block_tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=is_live, other=0).to(tl.int64)
    token = block * block_stride + (position % BLOCK_SIZE) * slot_stride
    key = inside & ((heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS) & is_live)[:, None]
    target = k_cache_ptr + token + (heads - NUM_HEADS)[:, None] * head_stride + halves[None, :]
    tl.store(target, turned_low, mask=key)
    tl.store(target + half_dim, turned_high, mask=key)
    value = inside & (is_value & is_live)[:, None]
    target = v_cache_ptr + token + (heads - NUM_HEADS - NUM_KV_HEADS)[:, None] * head_stride + halves[None, :]
    tl.store(target, low, mask=value)
    tl.store(target + half_dim, high, mask=value)


def rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Rotate the queries and keys in ``qkv`` [B, (H + 2K) * D] and cache keys and values. Returns q [B, H, D].

    ``cos_sin`` [max positions, D] is float32, with cosines in the first half of the columns. ``q_norm`` and ``k_norm`` [D]
    are the RMS norms that Qwen3 applies before the rotation. A row with a negative position does not touch the cache.
    """
    num_rows, width = qkv.shape
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    check_cache(k_cache, v_cache)
    assert len({each.dtype for each in (qkv, k_cache, q_norm, k_norm) if each is not None}) == 1
    assert qkv.stride(1) == 1 and width % head_dim == 0 and num_heads > 0 and cos_sin.shape[1] == head_dim
    assert (q_norm is None) == (k_norm is None)
    out = qkv.new_empty(num_rows, num_heads, head_dim)
    heads = 8
    _rope_cache_kernel[(num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv, positions, cos_sin, q_norm, k_norm, k_cache, v_cache, block_tables, out,
        qkv.stride(0), cos_sin.stride(0), block_tables.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        eps, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        HAS_NORM=q_norm is not None, HEADS=heads, HALF=triton.next_power_of_2(head_dim // 2), num_warps=2, **launch(qkv),
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, inner, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + inner + columns, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * inner + columns, (activated * up).to(dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up`` for rows whose first half is the gate: [B, 2I] to [B, I]."""
    num_rows, width = gate_up.shape
    assert width % 2 == 0 and gate_up.stride(1) == 1
    inner = width // 2
    out = gate_up.new_empty(num_rows, inner)
    block = min(triton.next_power_of_2(inner), 1024)
    grid = (num_rows, triton.cdiv(inner, block))
    _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), inner, BLOCK=block, num_warps=4, **launch(gate_up))
    return out
