# Triton is absent on most machines, and its decorator hides from the checker that a kernel is launched by subscription.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Half-precision gradients added to float32 sums. torch's own kernel for two dtypes moves two thirds of the bytes per second."""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _add_kernel(total_ptr, part_ptr, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    total = tl.load(total_ptr + places, mask=inside)
    part = tl.load(part_ptr + places, mask=inside)
    tl.store(total_ptr + places, total + part.to(tl.float32), mask=inside)


def add(total: torch.Tensor, part: torch.Tensor) -> None:
    """``total += part``, in place."""
    if part.dtype == torch.float32 or not (total.is_contiguous() and part.is_contiguous()):
        total += part
    else:
        _add_kernel[(triton.cdiv(total.numel(), BLOCK),)](total, part, total.numel(), BLOCK=BLOCK, num_warps=8)
