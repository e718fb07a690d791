# Triton is absent on most machines, and its decorator hides from the checker that a kernel is launched by subscription.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""Keys and values of tokens that several segments read: copied to each of them, and their gradients added up.

torch adds such gradients by atomic operations, in bfloat16 and in any order. Here each token adds its own, in float32 and always
in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_uses_kernel(grad_ptr, starts_ptr, uses_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """One program: one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(tl.load(starts_ptr + token), tl.load(starts_ptr + token + 1)):
        use = tl.load(uses_ptr + place)
        total += tl.load(grad_ptr + use * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_uses(grad: Tensor, starts: Tensor, uses: Tensor) -> Tensor:
    """[uses, ...] to [tokens, ...]: the gradient of ``index_select``. The uses of token n are ``uses[starts[n]:starts[n + 1]]``."""
    grad = grad.contiguous()
    out = grad.new_empty(len(starts) - 1, *grad.shape[1:])
    width = grad[0].numel()
    _sum_uses_kernel[(len(out),)](grad, starts, uses, out, width, BLOCK=triton.next_power_of_2(width), num_warps=1)
    return out


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, starts: Tensor, uses: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(starts, uses)
        return tokens.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return sum_uses(grad, *ctx.saved_tensors), None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Which token is read at each place."""

    index: Tensor  # [places]
    starts: Tensor  # [tokens + 1]
    uses: Tensor  # [places]

    @classmethod
    def of(cls, index: Tensor, *, num_tokens: int) -> Shared:
        ordered, uses = torch.sort(index, stable=True)
        starts = torch.searchsorted(ordered, torch.arange(num_tokens + 1, device=index.device))
        return cls(index=index, starts=starts, uses=uses)

    def take(self, tokens: Tensor) -> Tensor:
        """[tokens, ...] to [places, ...]."""
        return _Take.apply(tokens, self.index, self.starts, self.uses)  # type: ignore[return-value]
