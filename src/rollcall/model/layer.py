"""One layer of a decoder. The engine samples with it, and the learner trains it.

    x ── norm ── q, k, v ── attention ── out ──(+ x)── norm ── gate, up ── silu(gate) * up ── down ──(+)──▶ x

``Ops`` computes the steps. The default is ``TorchOps``. A tensor-parallel rank computes with its share of each weight
(``learner/tensor_parallel.py``), and the engine decodes on CUDA with Triton kernels (``engine/native/paged.py``). The creator of a
``Pass`` supplies the attention: over a cache, or over packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollcall.model.low_rank import LayerAdapter, add_low_rank
from rollcall.model.recompute import HostStore, run_again

Attend = Callable[..., Tensor]
"""(layer, q [N, H, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, H * D]. May also store k and v. Its inputs are what ``Ops.heads`` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    input_norm: Tensor
    qkv: Tensor  # [(H + 2 Hkv) D, C]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D], Qwen3
    k_norm: Tensor | None
    out: Tensor  # [C, H D]
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor  # [2 I, C]
    gate_up_bias: Tensor | None
    down: Tensor  # [C, I]
    down_bias: Tensor | None
    window: int  # 0: full attention
    lora: LayerAdapter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers that all layers share."""

    heads: int  # computed by this rank
    kv_heads: int
    head_dim: int
    eps: float

    @property
    def scale(self) -> float:
        """The factor for attention scores."""
        return self.head_dim**-0.5

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


class Ops(Protocol):
    """The steps of a layer. x is the residual stream [N, C]; ``name`` is a weight of ``Layer``."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def product(self, x: Tensor, layer: Layer, name: str) -> Tensor: ...
    def heads(self, qkv: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        """Return rotated queries [N, H, D], rotated keys [N, Hkv, D] and values [N, Hkv, D]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def add_product(self, x: Tensor, h: Tensor, layer: Layer, name: str) -> Tensor:
        """Return x plus the product of h and the weight."""
        ...


def before_attention(x: Tensor, layer: Layer, ops: Ops) -> tuple[Tensor, ...]:
    return ops.heads(ops.product(ops.norm(x, layer.input_norm), layer, "qkv"), layer)


def after_attention(x: Tensor, attended: Tensor, layer: Layer, ops: Ops) -> Tensor:
    x = ops.add_product(x, attended, layer, "out")
    gated = ops.silu_mul(ops.product(ops.norm(x, layer.post_norm), layer, "gate_up"))
    return ops.add_product(x, gated, layer, "down")


class Halves(NamedTuple):
    """The parts of a layer before and after attention, either eager or compiled."""

    before: Callable[[Tensor, Layer, Any], tuple[Tensor, ...]] = before_attention
    after: Callable[[Tensor, Tensor, Layer, Any], Tensor] = after_attention


def compiled_halves() -> Halves:
    """Compile one graph for all layers. Only the number of tokens is dynamic, because a kernel with fixed sizes is a quarter faster."""
    before, after = torch.compile(before_attention), torch.compile(after_attention)

    def open_before(x: Tensor, layer: Layer, ops: TorchOps) -> tuple[Tensor, ...]:
        _leave_open(x, ops.cos, ops.sin)
        return before(x, layer, ops)

    def open_after(x: Tensor, attended: Tensor, layer: Layer, ops: TorchOps) -> Tensor:
        _leave_open(attended)
        return after(x, attended, layer, ops)

    return Halves(open_before, open_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass through the layers."""

    ops: Ops
    attend: Attend
    halves: Halves = Halves()
    recompute: bool = False  # keep only each layer's input, and rerun the layer in the backward pass
    store: HostStore | None = None  # where these inputs are kept, if not on the GPU

    def layer(self, x: Tensor, index: int, weights: Callable[[], Layer]) -> Tensor:
        """Run a layer. ``weights`` is called again on recomputation, because the weights may have been freed."""
        if self.recompute and torch.is_grad_enabled():
            return run_again(self._run, x, index, weights, store=self.store)
        return self._run(x, index, weights)

    def _run(self, x: Tensor, index: int, weights: Callable[[], Layer]) -> Tensor:
        layer = weights()
        attended = self.attend(index, *self.halves.before(x, layer, self.ops))
        return self.halves.after(x, attended, layer, self.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOps:
    """The steps in torch, with gradients."""

    shape: Shape
    cos: Tensor  # [N, 1, D], as returned by ``Rope.at``
    sin: Tensor

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute RMSNorm as transformers does: normalise in float32, round to the model's dtype, then multiply by the weight."""
        eps = self.shape.eps
        if _is_fused(x):
            wide = x.float()
            return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
        return _RmsNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _inverse_rms(x, eps).mul(x).mul_(weight)  # type: ignore[return-value]

    def product(self, x: Tensor, layer: Layer, name: str) -> Tensor:
        return product(x, layer, name)

    def heads(self, qkv: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        by_head = qkv.view(qkv.shape[0], heads + 2 * kv_heads, self.shape.head_dim)
        qk, v = by_head.split_with_sizes((heads + kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split_with_sizes((heads, kv_heads), dim=1)
            qk = torch.cat((self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)), dim=1)
        q, k = rotate(qk, self.cos, self.sin).split_with_sizes((heads, kv_heads), dim=1)
        return q, k, v

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute silu(gate) * up for rows whose first half is the gate."""
        if torch.is_grad_enabled() and gate_up.is_cuda:
            from rollcall.model.kernels.gradients import SiluMul

            return SiluMul.apply(gate_up)  # type: ignore[return-value]
        if torch.is_grad_enabled() and not _is_fused(gate_up):
            return _SiluMul.apply(gate_up)  # type: ignore[return-value]
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up if _is_fused(gate_up) else F.silu(gate).mul_(up)

    def add_product(self, x: Tensor, h: Tensor, layer: Layer, name: str) -> Tensor:
        if x.is_cuda or (layer.lora is not None and x.dtype != torch.float32):
            # A compiler fuses the addition with the next norm and rounds as the engine does. The adapter's part is added to the product
            # first: values in the residual stream are larger, and rounding there would lose a small contribution.
            return x + product(h, layer, name)
        bias: Tensor | None = getattr(layer, name + "_bias")
        x = torch.addmm(x, h, getattr(layer, name).t())
        x = x if bias is None else x + bias
        return x if layer.lora is None else add_low_rank(x, h, getattr(layer.lora, name), layer.lora)


def product(x: Tensor, layer: Layer, name: str, *, with_bias: bool = True) -> Tensor:
    """Return the product of x and one of the layer's weights, including the adapter's contribution."""
    out = F.linear(x, getattr(layer, name), getattr(layer, name + "_bias") if with_bias else None)
    return out if layer.lora is None else add_low_rank(out, x, getattr(layer.lora, name), layer.lora)


def _leave_open(*tensors: Tensor) -> None:
    """Tell the compiler that the first dimension of these tensors is dynamic."""
    for tensor in tensors:
        if tensor.is_cuda and len(tensor) > 1:
            torch._dynamo.mark_dynamic(tensor, 0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to [N, heads, D]; see ``Rope.sin`` for the sign."""
    if _is_fused(x):
        return x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _rotated(x, cos, sin)  # type: ignore[return-value]


def _is_fused(x: Tensor) -> bool:
    """Return whether to use the plain formula, because a compiler fuses it and its derivative or because each step must be rounded."""
    return x.is_cuda or torch.compiler.is_compiling() or x.dtype != torch.float32


# On a CPU, torch takes a dozen passes over memory for each of these derivatives. Written out by hand, they take only a few. These
# versions are used only for float32.


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
    return torch.addcmul(_scalar(eps, x.dtype), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@cache
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    """Cache the tensor, because creating it takes longer than the addition that uses it."""
    return torch.tensor(value, dtype=dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        grad_weight = (grad * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        scaled = grad * weight
        dot = (scaled * normed).mean(-1, keepdim=True)
        return scaled.addcmul_(normed, dot, value=-1).mul_(inverse), grad_weight, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each half separately. Rolling the tensor first would take another pass."""
    out = x * cos
    (out_1, out_2), (x_1, x_2), (sin_1, sin_2) = out.chunk(2, -1), x.chunk(2, -1), sin.chunk(2, -1)
    out_1.addcmul_(x_2, sin_1)
    out_2.addcmul_(x_1, sin_2)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        # Swapping the halves is its own inverse, so the sines are swapped too.
        return _rotated(grad, cos, torch.roll(sin, sin.shape[-1] // 2, -1)), None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up
