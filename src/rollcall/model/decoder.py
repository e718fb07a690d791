"""A transformers decoder as plain tensors. The engine and the learner use the same forward pass.

``fuse_parameters`` rearranges a loaded model so that q, k and v share one storage, and gate and up share another. The module keeps
its parameter names, which loading and exporting use, while the engine and the learner work on the fused tensors. So there are fewer
and larger products, and an optimizer step takes effect from the next decoded token on, without a copy. On a CPU, the storage
is transposed, because that operand order is faster.

``Decoder.of(model)`` collects these tensors, or refuses an architecture that it cannot run exactly. ``layer.py`` defines
what a layer computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollcall.model.layer import Attend, Layer, Pass, Shape, TorchOps
from rollcall.model.low_rank import PATHS, LayerAdapter, a_of, b_of

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # only types whose angles do not depend on the sequence length


class UnsupportedModel(ValueError):
    """The native engine cannot run this model exactly."""


class Rope:
    """The rotary tables. The model's own rotary module computes them for as many positions as are needed."""

    def __init__(self, rotary: nn.Module, *, like: Tensor) -> None:
        """The tables use the dtype and device of ``like``."""
        self.rotary, self._like = rotary, like
        self.cos = torch.empty(0)  # [positions, D]
        self.sin = torch.empty(0)  # [positions, D], its first half negated: rope is x * cos + swap_halves(x) * sin

    @torch.no_grad()
    def grow(self, positions: int) -> None:
        """Extend the tables to at least this many positions."""
        if positions <= len(self.cos):
            return
        size = 1 << (max(positions, 256) - 1).bit_length()
        cos, sin = self.rotary(self._like, torch.arange(size, device=self._like.device)[None])
        half = sin.shape[-1] // 2
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1).contiguous()
        self.cos = cos[0].contiguous()  # assigned last: another thread reads its length

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [N, 1, D] for N positions."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


@dataclass(slots=True, kw_only=True)
class Decoder:
    """A model's weights and the few numbers its forward pass needs."""

    embed: Tensor  # [V, C]
    layers: list[Layer]
    norm: Tensor
    lm_head: Tensor  # [V, C]; the same tensor as embed if they are tied
    shape: Shape
    max_positions: int
    rope: Rope
    adapter_of: Callable[[int], LayerAdapter] | None = None  # the adapter of a layer, if there is one

    @classmethod
    def of(cls, model: nn.Module) -> Decoder:
        config: Any = model.config
        refuse_unsupported(config)
        body: Any = model.model
        embed = body.embed_tokens.weight.data
        head: Any = model.lm_head
        lm_head: Tensor = head.weight.data
        tied = head.weight is body.embed_tokens.weight or 0 != embed.data_ptr() == lm_head.data_ptr()
        rope = Rope(body.rotary_emb, like=embed[:1])
        rope.grow(256)
        return cls(
            embed=embed,
            layers=[_layer_of(config, index, layer) for index, layer in enumerate(body.layers)],
            norm=body.norm.weight.data,
            lm_head=embed if tied else lm_head,
            shape=Shape(
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=body.layers[0].self_attn.head_dim,
                eps=config.rms_norm_eps,
            ),
            max_positions=config.max_position_embeddings,
            rope=rope,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def named_tensors(self) -> dict[str, Tensor]:
        """Return all weights, each exactly once."""
        named = {"embed": self.embed, "norm": self.norm}
        if self.lm_head is not self.embed:
            named["lm_head"] = self.lm_head
        for index, layer in enumerate(self.layers):
            for field in fields(layer):
                value = getattr(layer, field.name)
                if isinstance(value, Tensor):
                    named[f"layers.{index}.{field.name}"] = value
        return named

    def part_rows(self) -> dict[str, tuple[int, ...]]:
        """Return, for each fused product of a layer, the number of rows of each of its modules."""
        layer, q, kv = self.layers[0], self.shape.q_width, self.shape.kv_width
        half = len(layer.gate_up) // 2
        return {"qkv": (q, kv, kv), "out": (len(layer.out),), "gate_up": (half, half), "down": (len(layer.down),)}

    def layer(self, index: int, gain: Tensor | None = None) -> Layer:
        """Return a layer with its adapter. If there are several adapters, ``gain`` selects one per token (``LayerAdapter.gain``)."""
        layer = self.layers[index]
        if self.adapter_of is None:
            return layer
        adapter = self.adapter_of(index)
        return replace(layer, lora=adapter if gain is None else replace(adapter, gain=gain))

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, *, gain: Tensor | None = None) -> Tensor:
        """Return hidden states [N, C] after the final norm, for N tokens at the given positions."""
        cos, sin = self.rope.at(positions)
        return self.run(token_ids, Pass(ops=TorchOps(shape=self.shape, cos=cos, sin=sin), attend=attend), gain=gain)

    def run(self, token_ids: Tensor, one: Pass, *, gain: Tensor | None = None) -> Tensor:
        x = F.embedding(token_ids, self.embed)
        for index in range(len(self.layers)):
            x = one.layer(x, index, partial(self.layer, index, gain))
        return one.ops.norm(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [N, V]."""
        return wide_product(hidden, self.lm_head.t())


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32, whatever their dtypes."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def fuse_parameters(model: nn.Module) -> None:
    """Rearrange q/k/v and gate/up (and, on a CPU, every linear weight) in place, in the order in which the engine reads them."""
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
    """Return the single tensor made up of these consecutive slices, or None if the model has none of them."""
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


_MODULE_NAMES = {  # field of ``Layer`` -> the transformers layer parameters it consists of
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
    # The critic's head, named as in transformers' token classification models.
    "head": "score.weight",
    "head_bias": "score.bias",
}


def _layer_of(config: Any, index: int, layer: nn.Module) -> Layer:
    parameters = {name: parameter.data for name, parameter in layer.named_parameters()}
    tensors = {field: _fused([parameters.get(name) for name in names]) for field, names in _MODULE_NAMES.items()}
    layer_types = getattr(config, "layer_types", None)
    slides = config.model_type == "mistral" or (layer_types is not None and layer_types[index] == "sliding_attention")
    return Layer(**tensors, window=(config.sliding_window or 0) if slides else 0)  # type: ignore[arg-type]


def module_names(name: str) -> tuple[str, ...]:
    """Return the names of the transformers parameters that make up a decoder (or adapter) tensor, in order.

    >>> module_names("layers.3.gate_up")
    ('model.layers.3.mlp.gate_proj.weight', 'model.layers.3.mlp.up_proj.weight')
    """
    if name.startswith("layers."):
        layer, _, field = name.rpartition(".")
        return tuple(f"model.{layer}.{part}" for part in (_MODULE_NAMES.get(field) or _ADAPTER_NAMES[field]))
    return (_OUTER_NAMES[name],)


def refuse_unsupported(config: Any) -> None:
    kind, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    if kind not in SUPPORTED:
        why = f"cannot run architecture {kind!r} exactly; it runs {', '.join(SUPPORTED)}"
    elif config.hidden_act != "silu":
        why = f"needs hidden_act=silu; this {kind} model has {config.hidden_act!r}"
    elif (rope_type := rope.get("rope_type", "default")) not in ROPE_TYPES:
        why = f"runs only rope types {', '.join(ROPE_TYPES)}; this {kind} model has {rope_type!r}"
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        why = f"cannot run partial rotary embeddings; this {kind} model has them"
    elif getattr(config, "quantization_config", None) is not None:
        why = "runs only unquantised weights; load the model without quantization_config"
    else:
        return
    raise UnsupportedModel(f"the native engine {why}")
