# Triton is not installed on most machines, and its decorator hides from the type checker that a kernel is launched with a subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""Attention of one query per sequence over its keys and values in the paged cache.

The cache is [blocks, block_size, K, D]; sequence b's token p lies in block ``block_tables[b, p // block_size]``. A row of
length 0 is padding and does not read the cache. Use block_size 64: with head size 64 in bf16 a tile is then one full block
(8 KB of keys and 8 KB of values per table lookup), and a sequence leaves 32 slots of its last block unused on average,
half as many as with 128.

Axes: B rows, H query heads, K key/value heads, D head size (a multiple of 16).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rollcall.model.kernels.early import launch, wait_for_inputs

LOG2_E = 1.4426950408889634
# Enough programs to give every multiprocessor of a large GPU a few each (an H200 has 132).
PROGRAMS_WANTED = 512
MAX_SPLITS = 32


class AttentionTiles(NamedTuple):
    """How paged_attention is compiled. This changes the result only by rounding."""

    tile: int  # keys per loop step; divides the block size, at least 16
    num_warps: int
    num_stages: int  # depth of the software pipeline


@triton.jit
def _attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, lengths_ptr, out_ptr, partial_ptr, lse_ptr,
    scale_log2, num_splits, table_stride, block_stride, slot_stride, head_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILES_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, GROUP_ROWS: tl.constexpr, DIMS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the GROUP query heads of one KV head, over one split of one sequence's live keys."""
    wait_for_inputs(EARLY)
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
    # The next tile's block is looked up one step early. A lookup in the same step would lengthen the chain of dependent
    # loads, and the compiler would spend pipeline stages on it instead of on keys and values.
    block = tl.load(table + begin // TILES_PER_BLOCK, mask=begin < end, other=0)
    for tile in range(begin, end):
        base = block.to(tl.int64) * block_stride + (tile % TILES_PER_BLOCK) * TILE * slot_stride
        tokens = tile * TILE + offsets
        is_live = tokens < length
        if WINDOW > 0:
            is_live = is_live & (tokens >= lowest)
        # Dead slots may contain anything, even NaN, and 0 * NaN would spoil the sum, so they are never read.
        inside = is_live[:, None] & in_head[None, :]
        k = tl.load(k_cache_ptr + base + tile_offsets, mask=inside, other=0.0)
        v = tl.load(v_cache_ptr + base + tile_offsets, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(is_live[None, :], scores, float("-inf"))
        # Every tile contains at least one live key, so this maximum is finite.
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
    partial_ptr, lse_ptr, out_ptr, num_splits,
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, DIMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: one head of one row. Splits with lse -inf were empty, and their partial result was never written."""
    wait_for_inputs(EARLY)
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
) -> torch.Tensor:
    """Compute attention for one query per sequence, ``q`` [B, H, D], over its cached keys. Returns [B, H * D].

    ``lengths`` [B] int32 counts the live keys, including the current token's key. A row of length 0 gets zeros. ``window`` keeps only
    this many of the newest keys (0: all). ``num_splits`` programs share one sequence's keys; see ``pick_num_splits``.
    """
    num_rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, cache_dim = k_cache.shape
    check_cache(k_cache, v_cache)
    assert cache_dim == head_dim and num_heads % num_kv_heads == 0 and q.is_contiguous() and q.dtype == k_cache.dtype
    assert 1 <= num_splits <= MAX_SPLITS and window >= 0
    tiles = pick_tiles(k_cache)
    assert tiles.tile >= 16 and block_size % tiles.tile == 0
    out = q.new_empty(num_rows, num_heads * head_dim)
    partial = lse = None
    if num_splits > 1:
        partial = q.new_empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32)
        lse = q.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
    group = num_heads // num_kv_heads
    dims = triton.next_power_of_2(head_dim)
    _attention_kernel[(num_kv_heads, num_rows, num_splits)](
        q, k_cache, v_cache, block_tables, lengths, out, partial, lse,
        scale * LOG2_E, num_splits, block_tables.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        NUM_HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, TILES_PER_BLOCK=block_size // tiles.tile, WINDOW=window,
        SPLIT=num_splits > 1, TILE=tiles.tile,
        GROUP_ROWS=max(triton.next_power_of_2(group), 16),  # the smallest matrix side for tensor cores
        DIMS=dims, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **launch(q),
    )  # fmt: skip
    if num_splits > 1:
        _combine_kernel[(num_rows * num_heads,)](
            partial, lse, out, num_splits,
            HEAD_DIM=head_dim, SPLITS=triton.next_power_of_2(num_splits), DIMS=dims, num_warps=1, **launch(q),
        )  # fmt: skip
    return out


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Check the keys and values of a paged cache, [blocks, block_size, K, D] each."""
    assert (k_cache.shape, k_cache.dtype, k_cache.stride()) == (v_cache.shape, v_cache.dtype, v_cache.stride())
    assert k_cache.stride(3) == 1 and k_cache.shape[3] % 16 == 0


def pick_num_splits(num_rows: int, *, num_kv_heads: int, max_blocks: int) -> int:
    """Return how many splits give the GPU enough programs, without knowing the lengths. For large batches, this is 1. The number is
    rounded down, because combining two halves takes longer than a few more programs would save."""
    wanted = PROGRAMS_WANTED // (num_rows * num_kv_heads)
    return max(1, min(wanted, max_blocks, MAX_SPLITS))


def pick_tiles(k_cache: torch.Tensor) -> AttentionTiles:
    """Return the fastest tiles on an H200 with 256 rows of 384 keys. In float32, which only tests use, tiles have at most 8 KB, so
    that several stages of several programs fit in the shared memory of one multiprocessor."""
    _, block_size, _, head_dim = k_cache.shape
    if k_cache.element_size() == 2:
        return AttentionTiles(min(block_size, 64), 4, 2) if head_dim > 64 else AttentionTiles(min(block_size, 32), 2, 3)
    tile = 8192 // (triton.next_power_of_2(head_dim) * k_cache.element_size())
    return AttentionTiles(tile=min(block_size, max(tile, 16)), num_warps=4, num_stages=3)
