# Triton is not installed on most machines, and its decorator hides from the type checker that a kernel is launched with a subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Computes the learner's log-probs over a large vocabulary, reading each chunk of logits only once per pass.

``row_stats`` reads a chunk of logits. ``grad_logits`` reads it again and writes its gradient in the dtype that the following
products need. All quantities refer to the scaled logits z = scale * logits, with scale = 1 / temperature.

Axes: M rows (loss tokens), V vocabulary.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

STATS_BLOCK = 4096
STATS_WARPS = 8
GRAD_BLOCK = 4096
GRAD_WARPS = 8


class RowStats(NamedTuple):
    """Statistics per row, each float32 [M]."""

    target_logprob: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor
    mean_logit: torch.Tensor  # mean of z over the vocabulary; KL(uniform || policy) = logsumexp - mean_logit - log V


@triton.jit
def _row_stats_kernel(
    logits_ptr, targets_ptr, logprob_ptr, lse_ptr, entropy_ptr, mean_ptr, row_stride, vocab, scale, BLOCK: tl.constexpr
):
    """One program: one row. Only the maximum is reduced in the loop; the sums stay per lane until the end.

    ``tilt`` sums e * (z - best) rather than e * z, so that entropy = log(sum e) - tilt / sum e loses no precision
    to cancellation when the logits are large and the distribution is peaked.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * row_stride
    lanes = tl.arange(0, BLOCK)
    best = tl.full([], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    tilt = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        inside = start + lanes < vocab
        logits = tl.load(base + start + lanes, mask=inside, other=float("-inf")).to(tl.float32) * scale
        new_best = tl.maximum(best, tl.max(logits, axis=0))
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
        shift = tl.where(best == float("-inf"), 0.0, best - pivot)
        shrink = tl.exp(shift)
        weights = tl.exp(logits - pivot)
        # If the weight is 0, the product would be 0 * -inf.
        tilted = tl.where(weights > 0.0, weights * (logits - pivot), 0.0)
        tilt = (tilt + shift * mass) * shrink + tilted
        mass = mass * shrink + weights
        plain += tl.where(inside, logits, 0.0)
        best = new_best
    total = tl.sum(mass, axis=0)
    log_total = tl.log(total)
    lse = best + log_total
    target = tl.load(targets_ptr + row).to(tl.int64)
    is_valid = (target >= 0) & (target < vocab)
    chosen = tl.load(base + tl.where(is_valid, target, 0)).to(tl.float32) * scale
    tl.store(logprob_ptr + row, tl.where(is_valid, chosen - lse, float("nan")))
    tl.store(lse_ptr + row, lse)
    tl.store(entropy_ptr + row, log_total - tl.sum(tilt, axis=0) / total)
    tl.store(mean_ptr + row, tl.sum(plain, axis=0) / vocab)


def row_stats(logits: torch.Tensor, targets: torch.Tensor, *, scale: float = 1.0) -> RowStats:
    """Compute the statistics of ``logits`` [M, V] in one pass. A target in ``targets`` [M] outside the vocabulary gets NaN."""
    num_rows, vocab = _check(logits, targets)
    stats = RowStats(*(logits.new_empty(num_rows, dtype=torch.float32) for _ in range(4)))
    _row_stats_kernel[(num_rows,)](
        logits, targets, *stats, logits.stride(0), vocab, float(scale), BLOCK=STATS_BLOCK, num_warps=STATS_WARPS
    )
    return stats


@triton.jit
def _grad_logits_kernel(
    logits_ptr, out_ptr, targets_ptr, lse_ptr, grad_logprob_ptr, grad_entropy_ptr, entropy_ptr,
    row_stride, out_stride, vocab, scale, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    logprobs = logits * scale - tl.load(lse_ptr + row)
    probs = tl.exp(logprobs)
    grad_logprob = tl.load(grad_logprob_ptr + row).to(tl.float32)
    is_target = ids == tl.load(targets_ptr + row)
    grad = grad_logprob * (tl.where(is_target, 1.0, 0.0) - probs)
    if HAS_ENTROPY:
        grad_entropy = tl.load(grad_entropy_ptr + row).to(tl.float32)
        entropy = tl.load(entropy_ptr + row)
        grad -= grad_entropy * tl.where(probs > 0.0, probs * (logprobs + entropy), 0.0)
    tl.store(out_ptr + row * out_stride + ids, (grad * scale).to(out_ptr.dtype.element_ty), mask=inside)


def grad_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    dtype: torch.dtype,
    lse: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Compute the gradient [M, V] of sum(grad_logprobs * logprob + grad_entropy * entropy), rounded to ``dtype``.

    ``lse`` and ``entropy`` come from ``row_stats`` for the same logits, targets and scale. With p = softmax(z),
    d logprob / dz = onehot(target) - p and d entropy / dz = -p * (log p + entropy); both are multiplied by scale.
    """
    num_rows, vocab = _check(logits, targets)
    assert grad_entropy is None or entropy is not None
    out = torch.empty_like(logits, dtype=dtype)
    _grad_logits_kernel[(num_rows, triton.cdiv(vocab, GRAD_BLOCK))](
        logits, out, targets, lse,
        grad_logprobs.contiguous(),  # autograd may pass expanded scalars
        None if grad_entropy is None else grad_entropy.contiguous(),
        entropy, logits.stride(0), out.stride(0), vocab, float(scale),
        HAS_ENTROPY=grad_entropy is not None, BLOCK=GRAD_BLOCK, num_warps=GRAD_WARPS,
    )  # fmt: skip
    return out


def _check(logits: torch.Tensor, targets: torch.Tensor) -> tuple[int, int]:
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and targets.shape == (num_rows,) and targets.is_contiguous()
    return num_rows, vocab
