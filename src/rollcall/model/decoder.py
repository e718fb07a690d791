"""A transformers decoder as plain tensors: the one forward that the engine samples from and the learner trains.

``fuse_parameters`` re-lays a loaded model so that q/k/v and gate/up are slices of one storage each. The module keeps
its parameter names (loading and exporting go through them) while engine and learner work on the fused tensors: fewer
and larger products, and an optimizer step is visible to the next decoded token without a copy. On a CPU the storage
is kept transposed, the faster operand order there.

``Decoder.of(model)`` collects those tensors, or refuses an architecture that it cannot run exactly, by name. A layer
is two pure functions around attention, ``before_attention`` and ``after_attention``. The caller of ``forward`` gives the
attention: over a cache, or over packed rows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollcall.model.low_rank import PATHS, LayerAdapter, LowRank, a_of, add_low_rank, b_of
from rollcall.model.recompute import HostStore, run_again

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose angles do not depend on the sequence length

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, H, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, H * D]; stores k and v on its way."""


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which torch needs to compile for a CPU."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


class UnsupportedModel(ValueError):
    """The native engine cannot run this model exactly."""


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


@dataclass(slots=True, kw_only=True)
class Decoder:
    """The weights of one model and the few numbers its forward needs."""

    embed: Tensor  # [V, C]
    layers: list[Layer]
    norm: Tensor
    lm_head: Tensor  # [V, C]; the same tensor as embed when they are tied
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    rotary: nn.Module
    cos: Tensor  # [positions, D]
    sin: Tensor  # [positions, D], its first half negated: rope is x * cos + swap_halves(x) * sin
    before: Callable[..., tuple[Tensor, Tensor, Tensor]]  # before_attention, or its compiled form
    after: Callable[..., Tensor]
    adapter_of: Callable[[int], LayerAdapter] | None = None  # of a layer; None: the model's weights alone

    @classmethod
    def of(cls, model: nn.Module) -> Decoder:
        config: Any = model.config
        refuse_unsupported(config)
        body: Any = model.model
        embed = body.embed_tokens.weight.data
        head: Any = model.lm_head
        lm_head: Tensor = head.weight.data
        tied = head.weight is body.embed_tokens.weight or 0 != embed.data_ptr() == lm_head.data_ptr()
        decoder = cls(
            embed=embed,
            layers=[_layer_of(config, index, layer) for index, layer in enumerate(body.layers)],
            norm=body.norm.weight.data,
            lm_head=embed if tied else lm_head,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=body.layers[0].self_attn.head_dim,
            eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            rotary=body.rotary_emb,
            cos=torch.empty(0),
            sin=torch.empty(0),
            before=before_attention,
            after=after_attention,
        )
        decoder.grow_rope(256)
        return decoder

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def named_tensors(self) -> dict[str, Tensor]:
        """All weights, each once."""
        named = {"embed": self.embed, "norm": self.norm}
        if self.lm_head is not self.embed:
            named["lm_head"] = self.lm_head
        for index, layer in enumerate(self.layers):
            for field in fields(layer):
                value = getattr(layer, field.name)
                if isinstance(value, Tensor):
                    named[f"layers.{index}.{field.name}"] = value
        return named

    def compile(self) -> None:
        """One graph for all layers. Only the number of tokens may change (``forward`` marks it): a kernel with known sizes is
        a quarter faster."""
        self.before = torch.compile(before_attention)
        self.after = torch.compile(after_attention)

    def grow_rope(self, positions: int) -> None:
        """Make the rotary tables cover this many positions, computed by the model's own rotary module."""
        if positions <= len(self.cos):
            return
        cos, sin = rope_tables(self.rotary, positions, like=self.embed[:1])
        # cos last: another thread reads its length.
        self.sin = sin
        self.cos = cos

    def part_rows(self) -> dict[str, tuple[int, ...]]:
        """The rows of each module in each product of a layer."""
        layer, q = self.layers[0], self.num_heads * self.head_dim
        half = len(layer.gate_up) // 2
        return {
            "qkv": (q, self.kv_width, self.kv_width), "out": (len(layer.out),), "gate_up": (half, half), "down": (len(layer.down),)
        }  # fmt: skip

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        recompute: bool = False,
        store: HostStore | None = None,
        gain: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [N, C] after the final norm, for N tokens at their positions.

        ``recompute`` keeps only each layer's input for the backward pass, in ``store`` if there is one, and runs the layer again
        there. ``gain`` says which adapter each token has, where there are several (``LayerAdapter.gain``).
        """
        x = F.embedding(token_ids, self.embed)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, self.eps)

        def run(x: Tensor, index: int, layer: Layer) -> Tensor:
            if self.adapter_of is not None:
                adapter = self.adapter_of(index)
                layer = replace(layer, lora=adapter if gain is None else replace(adapter, gain=gain))
            leave_open(x, cos, sin)
            q, k, v = self.before(x, layer, cos, sin, sizes)
            attended = attend(index, q, k, v)
            leave_open(attended)
            return self.after(x, attended, layer, self.eps)

        for index, layer in enumerate(self.layers):
            if recompute and torch.is_grad_enabled():
                x = run_again(run, x, index, layer, store=store)
            else:
                x = run(x, index, layer)
        return rms_norm(x, self.norm, self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [N, V]."""
        return wide_product(hidden, self.lm_head.t())


@torch.no_grad()
def rope_tables(rotary: nn.Module, positions: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """``Decoder.cos`` and ``Decoder.sin`` for at least this many positions, in the dtype and on the device of ``like``."""
    size = 1 << (positions - 1).bit_length()
    cos, sin = rotary(like, torch.arange(size, device=like.device)[None])
    half = sin.shape[-1] // 2
    return cos[0].contiguous(), torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1).contiguous()


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, whatever the two are in."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def leave_open(*tensors: Tensor) -> None:
    """Tell the compiler that the first size of these changes from call to call."""
    for tensor in tensors:
        if tensor.is_cuda and len(tensor) > 1:
            torch._dynamo.mark_dynamic(tensor, 0)


def before_attention(
    x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, sizes: tuple[int, int, int, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, the q/k/v product and rotation: [N, C] to q [N, H, D], k and v [N, Hkv, D]."""
    return project_qkv(rms_norm(x, layer.input_norm, sizes[3]), layer, cos, sin, sizes)


def project_qkv(
    x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, sizes: tuple[int, int, int, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of ``before_attention`` behind the norm, for the heads that ``layer`` holds."""
    heads, kv_heads, dim, eps = sizes
    qkv = F.linear(x, layer.qkv, layer.qkv_bias)
    if layer.lora is not None:
        qkv = add_low_rank(qkv, x, layer.lora.qkv, layer.lora)
    by_head = qkv.view(x.shape[0], heads + 2 * kv_heads, dim)
    qk, v = by_head.split_with_sizes((heads + kv_heads, kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = qk.split_with_sizes((heads, kv_heads), dim=1)
        qk = torch.cat((rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)), dim=1)
    q, k = rotate(qk, cos, sin).split_with_sizes((heads, kv_heads), dim=1)
    return q, k, v


def after_attention(x: Tensor, attended: Tensor, layer: Layer, eps: float) -> Tensor:
    """The output product, and the gated MLP behind its norm, each added to the stream [N, C]."""
    x = project_out(x, attended, layer)
    return project_down(x, silu_mul(project_gate_up(rms_norm(x, layer.post_norm, eps), layer)), layer)


def project_out(x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
    return _add_linear(
        x, attended, layer.out, layer.out_bias, layer.lora, None if layer.lora is None else layer.lora.out
    )


def project_gate_up(x: Tensor, layer: Layer) -> Tensor:
    gate_up = F.linear(x, layer.gate_up, layer.gate_up_bias)
    return gate_up if layer.lora is None else add_low_rank(gate_up, x, layer.lora.gate_up, layer.lora)


def project_down(x: Tensor, gated: Tensor, layer: Layer) -> Tensor:
    return _add_linear(
        x, gated, layer.down, layer.down_bias, layer.lora, None if layer.lora is None else layer.lora.down
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """transformers' RMSNorm: in float32, rounded to the model's dtype, then weighted."""
    if _is_fused(x):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return _RmsNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _inverse_rms(x, eps).mul(x).mul_(weight)  # type: ignore[return-value]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [N, heads, D]; see ``Decoder.sin`` for the sign."""
    if _is_fused(x):
        return x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _rotated(x, cos, sin)  # type: ignore[return-value]


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for rows that hold the gate in their first half."""
    if torch.is_grad_enabled() and gate_up.is_cuda:
        from rollcall.kernels.gated import SiluMul

        return SiluMul.apply(gate_up)  # type: ignore[return-value]
    if torch.is_grad_enabled() and not _is_fused(gate_up):
        return _SiluMul.apply(gate_up)  # type: ignore[return-value]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up if _is_fused(gate_up) else F.silu(gate).mul_(up)


def _is_fused(x: Tensor) -> bool:
    """Whether to use the plain formula: a compiler turns it and its derivative into one pass, or its steps must be rounded."""
    return x.is_cuda or torch.compiler.is_compiling() or x.dtype != torch.float32


# On a CPU torch runs each of these derivatives as a dozen passes over memory; written out it is a few. In float32.


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
    return torch.addcmul(_scalar(eps, x.dtype), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@cache
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    """Made once: making it takes longer than the addition that uses it."""
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
    """Half by half: rolling the tensor first would be another pass."""
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


def _add_linear(
    x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, lora: LayerAdapter | None, pair: LowRank | None
) -> Tensor:
    if x.is_cuda or (lora is not None and x.dtype != torch.float32):
        # A compiler adds on the way to the next norm, and rounds as the engine does. An adapter's part goes to the product first: the
        # stream is larger, and its rounding would lose all of a small one.
        out = F.linear(h, weight, bias)
        return x + (out if lora is None else add_low_rank(out, h, pair, lora))
    x = torch.addmm(x, h, weight.t())
    x = x if bias is None else x + bias
    return x if lora is None else add_low_rank(x, h, pair, lora)


def fuse_parameters(model: nn.Module) -> None:
    """Re-lay q/k/v and gate/up (and, on a CPU, every linear weight) in the order the engine reads; in place."""
    refuse_unsupported(model.config)
    body: Any = model.model
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        _fuse([mlp.gate_proj, mlp.up_proj])
        _fuse([attention.o_proj])
        _fuse([mlp.down_proj])


def _fuse(linears: list[nn.Linear]) -> None:
    """Make the weights (and biases) of these linears consecutive slices of one tensor."""
    weights = [linear.weight.data for linear in linears]
    if weights[0].device.type == "cpu":
        storage = torch.cat([weight.t() for weight in weights], dim=1).t()  # [K, N] in memory
    else:
        storage = torch.cat(weights, dim=0)
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    bias_storage = torch.cat(biases) if biases else None
    start = 0
    for linear in linears:
        linear.weight.data = storage[start : start + linear.out_features]
        if bias_storage is not None:
            linear.bias.data = bias_storage[start : start + linear.out_features]
        start += linear.out_features


def _fused(tensors: list[Tensor | None]) -> Tensor | None:
    """The one tensor that these consecutive slices are parts of; None: the model has none of them."""
    first = tensors[0]
    if first is None or len(tensors) == 1:
        return first
    rows = 0
    for tensor in tensors:
        assert tensor is not None and tensor.stride() == first.stride(), "parameters are not fused"
        assert tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr(), "parameters are not fused"
        assert tensor.storage_offset() == first.storage_offset() + rows * first.stride(0), "parameters are not fused"
        rows += tensor.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


_MODULE_NAMES = {  # of a layer: the parameters of the module that make up each field of ``Layer``
    "input_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "out": ("self_attn.o_proj.weight",),
    "out_bias": ("self_attn.o_proj.bias",),
    "post_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}
_ADAPTER_NAMES = {a_of(module): (f"{path}.lora_A.weight",) for module, path in PATHS.items()} | {
    b_of(module): (f"{path}.lora_B.weight",) for module, path in PATHS.items()
}


_OUTER_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    # A critic's, as transformers' models for token classification have them.
    "head": "score.weight",
    "head_bias": "score.bias",
}


def _layer_of(config: Any, index: int, layer: nn.Module) -> Layer:
    parameters = {name: parameter.data for name, parameter in layer.named_parameters()}
    tensors = {field: _fused([parameters.get(name) for name in names]) for field, names in _MODULE_NAMES.items()}
    return Layer(**tensors, window=_window(config, index))  # type: ignore[arg-type]


def module_names(name: str) -> tuple[str, ...]:
    """The module's parameters that make up one of ``Decoder.named_tensors`` (or an adapter's), in their order.

    >>> module_names("layers.3.gate_up")
    ('model.layers.3.mlp.gate_proj.weight', 'model.layers.3.mlp.up_proj.weight')
    """
    if name.startswith("layers."):
        layer, _, field = name.rpartition(".")
        return tuple(f"model.{layer}.{part}" for part in (_MODULE_NAMES.get(field) or _ADAPTER_NAMES[field]))
    return (_OUTER_NAMES[name],)


def _window(config: Any, index: int) -> int:
    if config.model_type == "mistral":
        return config.sliding_window or 0
    layer_types = getattr(config, "layer_types", None)
    sliding = layer_types is not None and layer_types[index] == "sliding_attention"
    return (config.sliding_window or 0) if sliding else 0


def refuse_unsupported(config: Any) -> None:
    kind = config.model_type
    if kind not in SUPPORTED:
        raise UnsupportedModel(
            f"the native engine cannot run architecture {kind!r} exactly; it runs {', '.join(SUPPORTED)}"
        )
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"the native engine needs hidden_act=silu; this {kind} model has {config.hidden_act!r}")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise UnsupportedModel(
            f"the native engine runs rope types {', '.join(ROPE_TYPES)}; this {kind} model has {rope!r}"
        )
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"the native engine cannot run partial rotary embeddings; this {kind} model has them")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel("the native engine runs unquantised weights; load the model without quantization_config")
