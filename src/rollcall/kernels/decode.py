# Triton is absent on most machines, and its decorator hides from the checker that a kernel is launched by subscription.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""What a decode step does between its matrix products: norm, rotary embedding into the paged cache, attention over it,
gated activation. One token per sequence.

Roundings follow transformers op by op (the model's dtype between ops, float32 inside them), so that the engine's
log-probs stay close to the learner's. A row is padding when its position is negative or its length is 0: it reads and
writes no cache. The same kernels serve prompt tokens, one row per token, given each token's own block-table row.

Axes: B rows, C hidden size, H query heads, K key/value heads, D head size (a multiple of 16), I inner size.
The cache is [blocks, block_size, K, D]; sequence b's token p lies in block ``block_tables[b, p // block_size]``.
Use block_size 64: with heads of 64 in bf16 a tile is then one whole block (8 KB of keys, 8 KB of values per look-up), and
a sequence leaves 32 slots of its last block unused on average, half as many as with 128.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rollcall.kernels import checks

LOG2_E = 1.4426950408889634
# Enough programs to keep every multiprocessor of a large card busy with a few each (132 on an H200).
PROGRAMS_WANTED = 512
MAX_SPLITS = 32


class AttentionTiles(NamedTuple):
    """How paged_attention is compiled; the result does not depend on it beyond rounding."""

    tile: int  # keys per loop step; divides the block size, at least 16
    num_warps: int
    num_stages: int  # depth of the software pipeline


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    x_stride,
    residual_stride,
    num_columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``h = residual + x`` in x's dtype, then ``weight * norm(h)``. Returns (normed, h), both [B, C].

    Without a residual h is x itself.
    """
    num_rows, num_columns = checks.rows(x, name="x")
    checks.same_dtype(x=x, weight=weight, residual=residual)
    out = x.new_empty(x.shape)
    new_residual = x
    if residual is not None:
        checks.need(
            residual.shape == x.shape, f"residual is {tuple(residual.shape)} for x {tuple(x.shape)}; match them"
        )
        new_residual = x.new_empty(x.shape)
    block = triton.next_power_of_2(num_columns)
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        new_residual,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        num_columns,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
    )
    return out, new_residual


@triton.jit
def _rope_cache_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    q_out_ptr,
    qkv_stride,
    cos_sin_stride,
    table_stride,
    block_stride,
    slot_stride,
    head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program: HEADS neighbouring heads of one row, as two halves [HEADS, HALF] that rotate into each other."""
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
    """Rotates queries and keys of ``qkv`` [B, (H + 2K) * D], caches keys and values. Returns q [B, H, D].

    ``cos_sin`` [max positions, D] is float32, cosines in the first half of the columns. ``q_norm`` and ``k_norm`` [D]
    are the RMS norms that Qwen3 puts before the rotation. A row whose position is negative leaves the cache alone.
    """
    num_rows, width = checks.rows(qkv, name="qkv")
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    _check_cache(k_cache, v_cache)
    checks.need(
        width % head_dim == 0 and num_heads > 0,
        f"qkv has {width} columns; with {num_kv_heads} KV heads of {head_dim} it needs (H + {2 * num_kv_heads}) * {head_dim}",
    )
    checks.same_dtype(qkv=qkv, k_cache=k_cache, q_norm=q_norm, k_norm=k_norm)
    checks.need(
        cos_sin.shape[1] == head_dim, f"cos_sin has {cos_sin.shape[1]} columns; give it the head size, {head_dim}"
    )
    checks.need((q_norm is None) == (k_norm is None), "q_norm and k_norm come together; give both or neither")
    out = qkv.new_empty(num_rows, num_heads, head_dim)
    heads = 8
    _rope_cache_kernel[(num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv,
        positions,
        cos_sin,
        q_norm,
        k_norm,
        k_cache,
        v_cache,
        block_tables,
        out,
        qkv.stride(0),
        cos_sin.stride(0),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_NORM=q_norm is not None,
        HEADS=heads,
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
    )
    return out


@triton.jit
def _attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    lengths_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    num_splits,
    table_stride,
    block_stride,
    slot_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILES_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program: the GROUP query heads of one KV head, over one split of one sequence's live keys."""
    # KV heads vary fastest, so programs that run together read neighbouring rows of the same blocks.
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - WINDOW, 0)
    first = lowest // TILE
    last = (length + TILE - 1) // TILE
    per_split = (last - first + num_splits - 1) // num_splits
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, last)

    members = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIMS)
    offsets = tl.arange(0, TILE)
    heads = kv_head * GROUP + members
    in_head = dims < HEAD_DIM
    in_group = (members < GROUP)[:, None] & in_head[None, :]
    q = tl.load(q_ptr + (row * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :], mask=in_group, other=0.0)
    tile_offsets = offsets[:, None] * slot_stride + dims[None, :] + kv_head * head_stride
    table = block_tables_ptr + row * table_stride

    best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    mixed = tl.zeros([GROUP_ROWS, DIMS], tl.float32)
    # The next tile's block is looked up a step early: a look-up in the same step would be one more link in the chain of
    # loads, and the compiler would spend pipeline stages on it instead of on keys and values.
    block = tl.load(table + begin // TILES_PER_BLOCK, mask=begin < end, other=0)
    for tile in range(begin, end):
        base = block.to(tl.int64) * block_stride + (tile % TILES_PER_BLOCK) * TILE * slot_stride
        tokens = tile * TILE + offsets
        is_live = tokens < length
        if WINDOW > 0:
            is_live = is_live & (tokens >= lowest)
        # Dead slots may hold anything, NaN too, and 0 * NaN would reach the sum: they are never read.
        inside = is_live[:, None] & in_head[None, :]
        k = tl.load(k_cache_ptr + base + tile_offsets, mask=inside, other=0.0)
        v = tl.load(v_cache_ptr + base + tile_offsets, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(is_live[None, :], scores, float("-inf"))
        # Every tile holds at least one live key, so this maximum is finite.
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        best = new_best
        block = tl.load(table + (tile + 1) // TILES_PER_BLOCK, mask=tile + 1 < end, other=0)

    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    if SPLIT:
        places = (row * NUM_HEADS + heads) * num_splits + split
        in_rows = members < GROUP
        lse = tl.where(is_empty, float("-inf"), best + tl.log2(tl.where(is_empty, 1.0, total)))
        tl.store(lse_ptr + places, lse, mask=in_rows)
        tl.store(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], mixed, mask=in_group & (begin < end))
    else:
        target = out_ptr + (row * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, mixed.to(out_ptr.dtype.element_ty), mask=in_group)


@triton.jit
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program: one head of one row. Splits with lse -inf were empty and their partial was never written."""
    head = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIMS)
    lse = tl.load(lse_ptr + head * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    best = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights, axis=0)
    inside = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    source = partial_ptr + (head * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
    partial = tl.load(source, mask=inside, other=0.0)
    mixed = tl.sum(partial * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + head * HEAD_DIM + dims, mixed.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    num_splits: int = 1,
    tiles: AttentionTiles | None = None,
) -> torch.Tensor:
    """Attention of one query per sequence, ``q`` [B, H, D], over its cached keys. Returns [B, H * D].

    ``lengths`` [B] int32 counts the live keys, this token's own among them; 0 gives zeros. ``window`` keeps only this many of
    the newest keys (0: all). ``num_splits`` programs share one sequence's keys; see ``pick_num_splits``.
    """
    num_rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, cache_dim = k_cache.shape
    _check_cache(k_cache, v_cache)
    checks.need(
        cache_dim == head_dim and num_heads % num_kv_heads == 0 and q.is_contiguous(),
        f"q is {tuple(q.shape)} and the cache {tuple(k_cache.shape)}; q needs the cache's head size, a multiple of its "
        "heads, and contiguous memory",
    )
    checks.same_dtype(q=q, k_cache=k_cache)
    checks.need(1 <= num_splits <= MAX_SPLITS, f"num_splits={num_splits} is outside 1 to {MAX_SPLITS}")
    checks.need(window >= 0, f"window={window} is negative; use 0 for no window")
    tiles = tiles or _default_tiles(k_cache)
    checks.need(
        tiles.tile >= 16 and block_size % tiles.tile == 0,
        f"a tile of {tiles.tile} keys does not divide blocks of {block_size}, or is below 16; use block_size 64",
    )
    out = q.new_empty(num_rows, num_heads * head_dim)
    partial = lse = None
    if num_splits > 1:
        partial = q.new_empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32)
        lse = q.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
    group = num_heads // num_kv_heads
    dims = triton.next_power_of_2(head_dim)
    _attention_kernel[(num_kv_heads, num_rows, num_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        lengths,
        out,
        partial,
        lse,
        scale * LOG2_E,
        num_splits,
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        TILES_PER_BLOCK=block_size // tiles.tile,
        WINDOW=window,
        SPLIT=num_splits > 1,
        TILE=tiles.tile,
        GROUP_ROWS=max(triton.next_power_of_2(group), 16),  # the tensor cores' smallest side
        DIMS=dims,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if num_splits > 1:
        _combine_kernel[(num_rows * num_heads,)](
            partial,
            lse,
            out,
            num_splits,
            HEAD_DIM=head_dim,
            SPLITS=triton.next_power_of_2(num_splits),
            DIMS=dims,
            num_warps=1,
        )
    return out


def pick_num_splits(num_rows: int, *, num_kv_heads: int, max_blocks: int) -> int:
    """Splits that give the card enough programs, known before any length is: 1 for large batches."""
    wanted = -(-PROGRAMS_WANTED // (num_rows * num_kv_heads))
    return max(1, min(wanted, max_blocks, MAX_SPLITS))


def _default_tiles(k_cache: torch.Tensor) -> AttentionTiles:
    """Tiles of at most 8 KB, so that several stages of several programs fit one multiprocessor's shared memory."""
    _, block_size, _, head_dim = k_cache.shape
    tile = 8192 // (triton.next_power_of_2(head_dim) * k_cache.element_size())
    return AttentionTiles(tile=min(block_size, max(tile, 16)), num_warps=4, num_stages=3)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + inner + columns, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * inner + columns, (activated * up).to(dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for rows that hold the gate in their first half: [B, 2I] to [B, I]."""
    num_rows, width = checks.rows(gate_up, name="gate_up")
    checks.need(width % 2 == 0, f"gate_up has {width} columns; it needs a gate and an up half of equal size")
    inner = width // 2
    out = gate_up.new_empty(num_rows, inner)
    block = min(triton.next_power_of_2(inner), 1024)
    grid = (num_rows, triton.cdiv(inner, block))
    _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), inner, BLOCK=block, num_warps=4)
    return out


def _check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    head_dim = k_cache.shape[3]
    checks.need(
        k_cache.shape == v_cache.shape
        and k_cache.dtype == v_cache.dtype
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride(3) == 1,
        f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} need one shape and dtype, the same strides and "
        "contiguous heads",
    )
    checks.need(head_dim % 16 == 0, f"heads of {head_dim} are not a multiple of 16; decode this model without kernels")
