"""The modules of a sharded model: what one rank computes with its part of the weights (``sharded.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from rollcall.config.lora import LoraSection
from rollcall.learner.logprobs import token_stats
from rollcall.learner.tensor_parallel import SHARED_HEADS, TensorGroup, cut_dim, run_layer
from rollcall.model.decoder import Attend, Layer, after_attention, before_attention, leave_open, rms_norm
from rollcall.model.low_rank import LayerAdapter, a_of, b_of, fuse
from rollcall.model.recompute import HostStore, run_again

LAYER_TENSORS = tuple(field.name for field in fields(Layer) if field.name not in ("window", "lora"))


@dataclass(slots=True, kw_only=True)
class Shape:
    """The numbers and functions that all layers share."""

    heads: int  # of this rank
    kv_heads: int
    head_dim: int
    eps: float
    group: TensorGroup
    before: Callable[..., tuple[Tensor, Tensor, Tensor]] = before_attention
    after: Callable[..., Tensor] = after_attention

    @property
    def sizes(self) -> tuple[int, int, int, float]:
        return self.heads, self.kv_heads, self.head_dim, self.eps


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One micro-batch on its way through the model."""

    token_ids: Tensor  # [N]
    cos: Tensor  # [N, 1, D]
    sin: Tensor
    attend: Attend
    logit_index: Tensor  # [M]
    targets: Tensor  # [M]
    temperature: float
    recompute: bool
    store: HostStore | None = None  # for the inputs of layers that run again
    plain: bool = False  # without the adapter


class ShardedLayer(nn.Module):
    """One decoder layer. The code that makes it registers its weights under the names of ``Layer``, and those of an adapter under
    theirs (``low_rank.py``)."""

    def __init__(self, *, index: int, window: int, shape: Shape, lora: LoraSection | None = None):
        super().__init__()
        self.index, self.window, self.shape, self.lora = index, window, shape, lora

    def forward(self, x: Tensor, work: Work) -> Tensor:
        if work.recompute and torch.is_grad_enabled():
            return run_again(self._run, x, work, store=work.store)
        return self._run(x, work)

    def _run(self, x: Tensor, work: Work) -> Tensor:
        shape, layer = self.shape, self._layer(plain=work.plain)
        if shape.group.size > 1:
            return run_layer(
                x, layer, index=self.index, cos=work.cos, sin=work.sin, sizes=shape.sizes, attend=work.attend,
                group=shape.group,
            )  # fmt: skip
        leave_open(x, work.cos, work.sin)
        q, k, v = shape.before(x, layer, work.cos, work.sin, shape.sizes)
        attended = work.attend(self.index, q, k, v)
        leave_open(attended)
        return shape.after(x, attended, layer, shape.eps)

    def _layer(self, *, plain: bool) -> Layer:
        weights = {name: self._local(name, getattr(self, name)) for name in LAYER_TENSORS}
        lora = None if self.lora is None or plain else self._adapter(self.lora, half=len(weights["gate_up"]) // 2)
        return Layer(**weights, window=self.window, lora=lora)

    def _adapter(self, section: LoraSection, *, half: int) -> LayerAdapter:
        names = [name for module in section.modules for name in (a_of(module), b_of(module))]
        tensors = {name: self._local(name, getattr(self, name)) for name in names}
        q, kv = self.shape.heads * self.shape.head_dim, self.shape.kv_heads * self.shape.head_dim
        rows = {"qkv": (q, kv, kv), "gate_up": (half, half), "out": (), "down": ()}
        return fuse(tensors, rows=rows, gain=section.gain, dropout=section.dropout)

    def _local(self, name: str, weight: Any) -> Any:
        if not isinstance(weight, DTensor):
            return weight
        group = self.shape.group
        if name in ("qkv", "qkv_bias"):
            return group.with_kv_copies(weight.to_local(), num_own=self.shape.heads * self.shape.head_dim)
        if name in SHARED_HEADS:
            return group.with_kv_copies(weight.to_local(), num_own=0)
        if cut_dim(name) is not None:
            return weight.to_local()
        # All ranks have this weight. A rank computes a part of its gradient: that of its heads or columns, or with sequence parallel
        # that of its tokens.
        partial = name in ("q_norm", "k_norm") or name.endswith(("_lora_A", "_lora_B")) or group.sequence_parallel
        return weight.to_local(grad_placements=[Partial() if partial else Replicate()])


class ShardedRoot(nn.Module):
    """Embeddings, layers, final norm, and the policy's or the critic's head."""

    def __init__(self, weights: Mapping[str, nn.Parameter], layers: Sequence[ShardedLayer], *, shape: Shape):
        super().__init__()
        self.shape = shape
        for name, weight in weights.items():
            self.register_parameter(name, weight)
        self.layers = nn.ModuleList(layers)

    def forward(self, work: Work) -> tuple[Tensor, ...]:
        """The token statistics (or the values), [M] each, the same on every rank of a tensor group."""
        group, count = self.shape.group, len(work.token_ids)
        weights: dict[str, Any] = self._parameters
        x = F.embedding(group.own_part(work.token_ids), weights["embed"])
        if not group.sequence_parallel:
            x = group.join_parts(x, count)
        for layer in self.layers:
            x = layer(x, work)
        # Each rank of a tensor group takes its part of the rows from here on, so its gradients are its own share.
        rows = group.own_part(work.logit_index)
        hidden = rms_norm(group.enter(x, count).index_select(0, rows), weights["norm"], self.shape.eps)
        if "head" in weights:
            out = (F.linear(hidden, weights["head"], weights["head_bias"])[:, 0].float(),)
        else:
            lm_head = weights.get("lm_head", weights["embed"])
            out = token_stats(hidden, lm_head, group.own_part(work.targets), temperature=work.temperature)
        # Copied: FSDP hooks its backward to what comes out here, and the statistics are views of one tensor.
        return tuple(group.join_parts(part, len(work.targets)).clone() for part in out)
