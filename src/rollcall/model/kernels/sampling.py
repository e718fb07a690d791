# Triton is not installed on most machines, and its decorator hides from the type checker that a kernel is launched with a subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Samples one token per row by inverting the cumulative distribution at one uniform number.

There are two kernels, so that many programs can read a large vocabulary in parallel. The first stores each vocabulary block's maximum and
sum of exponentials. The second finds the block, then the token inside it. A row's result depends only on that row, never on the rest of
the batch. The caller applies top-k and top-p by setting excluded logits to -inf.

Axes: B rows, V vocabulary, N vocabulary blocks per row.
"""

import torch
import triton
import triton.language as tl

from rollcall.model.kernels.early import launch, wait_for_inputs

# These change the result only by rounding.
SAMPLE_BLOCK = 4096  # vocabulary entries per program; a power of two
SAMPLE_WARPS = 8


@triton.jit
def _scale_of(temperature):
    """Return 1 / temperature. Greedy rows report log-probs at temperature 1."""
    return tl.where(temperature > 0.0, 1.0 / tl.where(temperature > 0.0, temperature, 1.0), 1.0)


@triton.jit
def _first_past(masses, target, places, COUNT: tl.constexpr):
    """Return the first place with mass where the running sum exceeds the target, or else the last place with mass.
    The float32 prefix sums of a parallel scan may decrease, and may end below the total."""
    found = tl.min(tl.where((tl.cumsum(masses, axis=0) > target) & (masses > 0.0), places, COUNT), axis=0)
    return tl.where(found == COUNT, tl.max(tl.where(masses > 0.0, places, 0), axis=0), found)


@triton.jit
def _first_equal(values, wanted, places, COUNT: tl.constexpr):
    """Return the first place with the wanted value, or 0 if there is none."""
    found = tl.min(tl.where(values == wanted, places, COUNT), axis=0)
    return tl.where(found == COUNT, 0, found)


@triton.jit
def _block_stats_kernel(
    logits_ptr, temperatures_ptr, best_ptr, sum_ptr, row_stride, vocab, num_blocks,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    scale = _scale_of(tl.load(temperatures_ptr + row).to(tl.float32))
    ids = index * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32) * scale
    best = tl.max(logits, axis=0)
    mass = tl.sum(tl.exp(logits - tl.where(best == float("-inf"), 0.0, best)), axis=0)
    tl.store(best_ptr + row * num_blocks + index, best)
    tl.store(sum_ptr + row * num_blocks + index, mass)


@triton.jit
def _pick_kernel(
    logits_ptr, uniforms_ptr, temperatures_ptr, best_ptr, sum_ptr, tokens_ptr, logprobs_ptr, row_stride, vocab, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: one row."""
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row).to(tl.float32)
    is_greedy = temperature <= 0.0
    scale = _scale_of(temperature)

    indices = tl.arange(0, BLOCKS)
    bests = tl.load(best_ptr + row * num_blocks + indices, mask=indices < num_blocks, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_blocks + indices, mask=indices < num_blocks, other=0.0)
    best = tl.max(bests, axis=0)
    pivot = tl.where(best == float("-inf"), 0.0, best)
    masses = sums * tl.exp(bests - pivot)
    total = tl.sum(masses, axis=0)
    target = tl.load(uniforms_ptr + row).to(tl.float32) * total
    drawn = _first_past(masses, target, indices, BLOCKS)
    block = tl.where(is_greedy, _first_equal(bests, best, indices, BLOCKS), drawn)
    target = target - tl.sum(tl.where(indices < block, masses, 0.0), axis=0)

    offsets = tl.arange(0, BLOCK)
    ids = block * BLOCK + offsets
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32) * scale
    drawn = _first_past(tl.exp(logits - pivot), target, offsets, BLOCK)
    offset = tl.where(is_greedy, _first_equal(logits, best, offsets, BLOCK), drawn)
    chosen = tl.sum(tl.where(offsets == offset, logits, 0.0), axis=0)
    tl.store(tokens_ptr + row, (block * BLOCK + offset).to(tl.int64))
    tl.store(logprobs_ptr + row, chosen - pivot - tl.log(total))


def sample(
    logits: torch.Tensor, uniforms: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row of ``logits`` [B, V], and compute its log-prob at the row's temperature.

    ``uniforms`` [B] are float32 in [0, 1). A temperature of 0 in ``temperatures`` [B] selects the most likely token (the lowest
    id on ties) with its log-prob at temperature 1. Returns tokens [B] int64 and log-probs [B] float32. A token with logit -inf
    is never drawn. A row that contains NaN gets a valid id and a NaN log-prob.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and uniforms.shape == temperatures.shape == (num_rows,)
    assert uniforms.is_contiguous() and temperatures.is_contiguous()
    num_blocks = triton.cdiv(vocab, SAMPLE_BLOCK)
    bests, sums = (logits.new_empty(num_rows, num_blocks, dtype=torch.float32) for _ in range(2))
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    logprobs = logits.new_empty(num_rows, dtype=torch.float32)
    _block_stats_kernel[(num_rows, num_blocks)](
        logits, temperatures, bests, sums, logits.stride(0), vocab, num_blocks,
        BLOCK=SAMPLE_BLOCK, num_warps=SAMPLE_WARPS, **launch(logits),
    )  # fmt: skip
    _pick_kernel[(num_rows,)](
        logits, uniforms, temperatures, bests, sums, tokens, logprobs, logits.stride(0), vocab, num_blocks,
        BLOCK=SAMPLE_BLOCK, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=SAMPLE_WARPS, **launch(logits),
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _mix(state):
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _uniforms_kernel(seeds_ptr, positions_ptr, out_ptr, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    seeds = tl.load(seeds_ptr + rows, mask=inside, other=0).to(tl.uint64)
    positions = tl.load(positions_ptr + rows, mask=inside, other=0).to(tl.uint64)
    state = _mix(seeds + 0x9E3779B97F4A7C15) + (positions + 1) * 0x9E3779B97F4A7C15
    bits = (_mix(state) >> 40).to(tl.int32)
    tl.store(out_ptr + rows, bits.to(tl.float32) * (1.0 / 16777216.0), mask=inside)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute ``rollcall.engine.native.sampler.uniforms`` bit for bit, in one launch instead of about twenty.

    ``seeds`` and ``positions`` are contiguous int64 [B].
    """
    (num_rows,) = seeds.shape
    assert positions.shape == seeds.shape and seeds.dtype == positions.dtype == torch.int64
    assert seeds.is_contiguous() and positions.is_contiguous()
    out = seeds.new_empty(num_rows, dtype=torch.float32)
    block = 256
    _uniforms_kernel[(triton.cdiv(num_rows, block),)](seeds, positions, out, num_rows, BLOCK=block)
    return out
