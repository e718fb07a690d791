# Triton is absent on most machines, and its decorator hides from the checker that a kernel is launched by subscription.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""The derivative of ``silu(gate) * up`` for rows that hold both halves, in one pass.

A compiler writes it as two halves that are put together, and reads its inputs once for each: nearly twice the memory traffic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK = 1024


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
    """The gradient of [N, 2I] from that of [N, I]."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    out = torch.empty_like(gate_up)
    num_rows, inner = grad.shape
    wrap_triton(_silu_mul_backward_kernel)[(num_rows, triton.cdiv(inner, BLOCK))](
        grad, gate_up, out, inner, BLOCK=BLOCK
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
