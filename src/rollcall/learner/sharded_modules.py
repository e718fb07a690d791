"""The modules of a sharded model: the computation of one rank with its part of the weights (``sharded.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from rollcall.config.lora import LoraSection
from rollcall.learner.body import Work, head_outputs
from rollcall.learner.tensor_parallel import SHARED_HEADS, TensorGroup, cut_dim
from rollcall.model.layer import Layer, Shape
from rollcall.model.low_rank import LayerAdapter, a_of, b_of, fuse

LAYER_TENSORS = tuple(field.name for field in fields(Layer) if field.name not in ("window", "lora"))


class ShardedLayer(nn.Module):
    """One decoder layer. The code that creates it registers its weights under the names in ``Layer``, and an adapter's weights under
    the names in ``low_rank.py``."""

    def __init__(self, *, index: int, window: int, shape: Shape, group: TensorGroup, lora: LoraSection | None = None):
        super().__init__()
        self.index, self.window, self.shape, self.group, self.lora = index, window, shape, group, lora

    def forward(self, x: Tensor, work: Work) -> Tensor:
        return work.layers.layer(x, self.index, partial(self._layer, plain=work.plain))

    def _layer(self, *, plain: bool) -> Layer:
        weights = {name: self._local(name, getattr(self, name)) for name in LAYER_TENSORS}
        lora = None if self.lora is None or plain else self._adapter(self.lora, half=len(weights["gate_up"]) // 2)
        return Layer(**weights, window=self.window, lora=lora)

    def _adapter(self, section: LoraSection, *, half: int) -> LayerAdapter:
        names = [name for module in section.modules for name in (a_of(module), b_of(module))]
        tensors = {name: self._local(name, getattr(self, name)) for name in names}
        q, kv = self.shape.q_width, self.shape.kv_width
        rows = {"qkv": (q, kv, kv), "gate_up": (half, half), "out": (), "down": ()}
        return fuse(tensors, rows=rows, gain=section.gain, dropout=section.dropout)

    def _local(self, name: str, weight: Any) -> Any:
        if not isinstance(weight, DTensor):
            return weight
        if name in ("qkv", "qkv_bias"):
            return self.group.with_kv_copies(weight.to_local(), num_own=self.shape.q_width)
        if name in SHARED_HEADS:
            return self.group.with_kv_copies(weight.to_local(), num_own=0)
        if cut_dim(name) is not None:
            return weight.to_local()
        # All ranks have this weight. A rank computes a part of its gradient: for its heads or columns, or with sequence parallelism
        # for its tokens.
        is_partial = (
            name in ("q_norm", "k_norm") or name.endswith(("_lora_A", "_lora_B")) or self.group.sequence_parallel
        )
        return weight.to_local(grad_placements=[Partial() if is_partial else Replicate()])


class ShardedRoot(nn.Module):
    """Embeddings, layers, final norm, and the policy's or the critic's head."""

    def __init__(self, weights: Mapping[str, nn.Parameter], layers: Sequence[ShardedLayer], *, group: TensorGroup):
        super().__init__()
        self.group = group
        for name, weight in weights.items():
            self.register_parameter(name, weight)
        self.layers = nn.ModuleList(layers)

    def forward(self, work: Work) -> tuple[Tensor, ...]:
        """Return the token statistics (or the values), [M] each, the same on every rank of a tensor group."""
        group, count = self.group, len(work.token_ids)
        weights: dict[str, Any] = self._parameters
        x = F.embedding(group.own_part(work.token_ids), weights["embed"])
        if not group.sequence_parallel:
            x = group.join_parts(x, count)
        for layer in self.layers:
            x = layer(x, work)
        # Each rank of a tensor group takes its part of the rows from here on, so its gradients are its own share.
        rows = group.own_part(work.logit_index)
        hidden = work.layers.ops.norm(group.enter(x, count).index_select(0, rows), weights["norm"])
        out = head_outputs(hidden, weights, group.own_part(work.targets), temperature=work.temperature)
        # Clone the outputs: FSDP hooks its backward to them, and the statistics are views of one tensor.
        return tuple(group.join_parts(part, len(work.targets)).clone() for part in out)
