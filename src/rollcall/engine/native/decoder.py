"""A transformers decoder as plain tensors: what the native engine runs instead of the module's own forward.

``fuse_parameters`` re-lays a loaded model so that q/k/v and gate/up are slices of one storage each. The module keeps
its parameter names and trains as before, while the engine reads the fused tensors: an optimizer step is visible to
the next decoded token without a copy. On a CPU the storage is kept transposed, the faster operand order there.

``Decoder.of(model)`` collects those tensors, or refuses an architecture that it cannot run exactly, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose angles do not depend on the sequence length

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, H, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, H * D]; stores k and v on its way."""


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


@dataclass(slots=True, kw_only=True)
class Decoder:
    """The weights of one model and the few numbers its forward needs."""

    embed: Tensor  # [V, C]
    layers: list[Layer]
    norm: Tensor
    lm_head: Tensor  # [V, C]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    rotary: nn.Module
    cos: Tensor  # [positions, D]
    sin: Tensor  # [positions, D], its first half negated: rope is x * cos + swap_halves(x) * sin

    @classmethod
    def of(cls, model: nn.Module) -> Decoder:
        config: Any = model.config
        _refuse_unsupported(config)
        body: Any = model.model
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = body.layers[0].self_attn.head_dim
        decoder = cls(
            embed=body.embed_tokens.weight.data,
            layers=[_layer_of(config, index, layer) for index, layer in enumerate(body.layers)],
            norm=body.norm.weight.data,
            lm_head=model.lm_head.weight.data,  # type: ignore[union-attr]
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            rotary=body.rotary_emb,
            cos=torch.empty(0),
            sin=torch.empty(0),
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

    def grow_rope(self, positions: int) -> None:
        """Make the rotary tables cover this many positions, computed by the model's own rotary module."""
        if positions <= len(self.cos):
            return
        size = 1 << (positions - 1).bit_length()
        ids = torch.arange(size, device=self.device)[None]
        with torch.no_grad():
            cos, sin = self.rotary(self.embed[:1], ids)
        half = self.head_dim // 2
        self.cos = cos[0].contiguous()
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1).contiguous()

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, C] after the final norm, for N tokens at their positions."""
        num_tokens, heads, kv_heads, dim = len(token_ids), self.num_heads, self.num_kv_heads, self.head_dim
        x = F.embedding(token_ids, self.embed)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        shape = (x.shape[-1],)
        for index, layer in enumerate(self.layers):
            h = F.rms_norm(x, shape, layer.input_norm, self.eps)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(num_tokens, heads + 2 * kv_heads, dim)
            qk = qkv[:, : heads + kv_heads]
            if layer.q_norm is not None and layer.k_norm is not None:
                q = F.rms_norm(qk[:, :heads], (dim,), layer.q_norm, self.eps)
                k = F.rms_norm(qk[:, heads:], (dim,), layer.k_norm, self.eps)
                qk = torch.cat((q, k), dim=1)
            qk = torch.addcmul(qk * cos, torch.roll(qk, dim // 2, -1), sin)
            attended = attend(index, qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :])
            x = _add_linear(x, attended, layer.out, layer.out_bias)
            h = F.rms_norm(x, shape, layer.post_norm, self.eps)
            gate, up = F.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = _add_linear(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return F.rms_norm(x, shape, self.norm, self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [N, V]."""
        if hidden.dtype == torch.float32:
            return F.linear(hidden, self.lm_head)
        return torch.mm(hidden, self.lm_head.t(), out_dtype=torch.float32)


def _add_linear(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = torch.addmm(x, h, weight.t())
    return x if bias is None else x + bias


def fuse_parameters(model: nn.Module) -> None:
    """Re-lay q/k/v and gate/up (and, on a CPU, every linear weight) in the order the engine reads; in place."""
    _refuse_unsupported(model.config)
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


def _fused(*tensors: Tensor | None) -> Tensor | None:
    """The one tensor that these consecutive slices are parts of."""
    first = tensors[0]
    if first is None:
        return None
    rows = 0
    for tensor in tensors:
        assert tensor is not None and tensor.stride() == first.stride(), "parameters are not fused"
        assert tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr(), "parameters are not fused"
        assert tensor.storage_offset() == first.storage_offset() + rows * first.stride(0), "parameters are not fused"
        rows += tensor.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _layer_of(config: Any, index: int, layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp

    def data(parameter: nn.Parameter | None) -> Tensor | None:
        return None if parameter is None else parameter.data

    def fused(name: str, *linears: nn.Linear) -> Tensor | None:
        return _fused(*(data(getattr(linear, name)) for linear in linears))

    qkv = fused("weight", attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = fused("weight", mlp.gate_proj, mlp.up_proj)
    assert qkv is not None and gate_up is not None
    return Layer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=qkv,
        qkv_bias=fused("bias", attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=attention.q_norm.weight.data if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight.data if hasattr(attention, "k_norm") else None,
        out=attention.o_proj.weight.data,
        out_bias=data(attention.o_proj.bias),
        post_norm=layer.post_attention_layernorm.weight.data,
        gate_up=gate_up,
        gate_up_bias=fused("bias", mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight.data,
        down_bias=data(mlp.down_proj.bias),
        window=_window(config, index),
    )


def _window(config: Any, index: int) -> int:
    if config.model_type == "mistral":
        return config.sliding_window or 0
    layer_types = getattr(config, "layer_types", None)
    sliding = layer_types is not None and layer_types[index] == "sliding_attention"
    return (config.sliding_window or 0) if sliding else 0


def _refuse_unsupported(config: Any) -> None:
    kind = config.model_type
    if kind not in SUPPORTED:
        raise UnsupportedModel(
            f"the native engine cannot run architecture {kind!r} exactly; it runs {', '.join(SUPPORTED)}"
        )
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"the native engine needs hidden_act=silu; this {kind} model has {config.hidden_act!r}")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise UnsupportedModel(f"the native engine runs rope types {', '.join(ROPE_TYPES)}; this {kind} model has {rope!r}")
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"the native engine cannot run partial rotary embeddings; this {kind} model has them")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel("the native engine runs unquantised weights; load the model without quantization_config")
