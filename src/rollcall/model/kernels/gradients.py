# Triton is not installed on most machines, and its decorator hides from the type checker that a kernel is launched with a subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""Learner gradients for which torch's own kernels move more bytes or add in an arbitrary order.

- ``add``: adds half-precision gradients to float32 sums. torch's mixed-dtype kernel reaches only two thirds of the bandwidth.
- ``SiluMul``: the derivative of ``silu(gate) * up`` for rows that contain both halves, in one pass. A compiler computes the halves
  separately and concatenates them. It reads the inputs once for each half, so the memory traffic is nearly twice as large.
- ``Shared``: copies the keys and values of shared tokens to each segment that reads them, and sums their gradients. torch sums
  such gradients with atomics, in bfloat16 and in arbitrary order. Here each token sums its own gradients in float32, in a fixed order.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

ADD_BLOCK = 4096
GATED_BLOCK = 1024


@triton.jit
def _add_kernel(total_ptr, part_ptr, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    total = tl.load(total_ptr + places, mask=inside)
    part = tl.load(part_ptr + places, mask=inside)
    tl.store(total_ptr + places, total + part.to(tl.float32), mask=inside)


def add(total: Tensor, part: Tensor) -> None:
    """Add ``part`` to ``total`` in place."""
    if part.dtype == torch.float32 or not (total.is_contiguous() and part.is_contiguous()):
        total += part
    else:
        _add_kernel[(triton.cdiv(total.numel(), ADD_BLOCK),)](total, part, total.numel(), BLOCK=ADD_BLOCK, num_warps=8)


@triton.jit
def _silu_mul_backward_kernel(grad_ptr, gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    both = row * 2 * inner + columns
    dtype = out_ptr.dtype.element_ty
    grad = tl.load(grad_ptr + row * inner + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + both, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + both + inner, mask=inside, other=0.0).to(tl.float32)
    open = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + both, (grad * up * open * (1.0 + gate * (1.0 - open))).to(dtype), mask=inside)
    tl.store(out_ptr + both + inner, (grad * gate * open).to(dtype), mask=inside)


@triton_op("rollcall::silu_mul_backward", mutates_args={})
def silu_mul_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Compute the gradient [N, 2I] of the input from the gradient [N, I] of the output."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    out = torch.empty_like(gate_up)
    num_rows, inner = grad.shape
    wrap_triton(_silu_mul_backward_kernel)[(num_rows, triton.cdiv(inner, GATED_BLOCK))](
        grad, gate_up, out, inner, BLOCK=GATED_BLOCK
    )
    return out


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        return silu_mul_backward(grad, gate_up)


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


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, starts: Tensor, uses: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(starts, uses)
        return tokens.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        starts, uses = ctx.saved_tensors
        grad = grad.contiguous()  # [uses, ...]; token n is used at ``uses[starts[n]:starts[n + 1]]``
        out = grad.new_empty(len(starts) - 1, *grad.shape[1:])
        width = grad[0].numel()
        _sum_uses_kernel[(len(out),)](grad, starts, uses, out, width, BLOCK=triton.next_power_of_2(width), num_warps=1)
        return out, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The index of the token that is read at each position, and its inverse."""

    index: Tensor  # [places]
    starts: Tensor  # [tokens + 1]
    uses: Tensor  # [places]

    @classmethod
    def of(cls, index: Tensor, *, num_tokens: int) -> Self:
        ordered, uses = torch.sort(index, stable=True)
        starts = torch.searchsorted(ordered, torch.arange(num_tokens + 1, device=index.device))
        return cls(index=index, starts=starts, uses=uses)

    def take(self, tokens: Tensor) -> Tensor:
        """Select from [tokens, ...] to [places, ...]."""
        return _Take.apply(tokens, self.index, self.starts, self.uses)  # type: ignore[return-value]
