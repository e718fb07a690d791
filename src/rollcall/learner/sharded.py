"""A model whose weights are split across the ranks of a gang: FSDP2 across the data ranks, and tensor parallelism within each of them.

Each decoder layer is a module that owns its fused weights (``ShardedLayer``). The root is a module with embeddings, final norm and output
head (``ShardedRoot``). FSDP gathers a module's weights before its forward and its backward pass, and frees them afterwards. It gives
each rank its part of the gradient sum over all ranks. Loss weights are global, so gradients are summed and never divided.

All ranks must run the same forward and backward passes together. A rank with fewer micro-batches runs idle ones, whose gradient is
zero (``fit.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from rollcall.config import OptimizerSection
from rollcall.config.lora import LoraSection
from rollcall.learner.body import BodyBase, Work, head_outputs
from rollcall.learner.context_parallel import join_context
from rollcall.learner.gang import Gang, Meshes, make_meshes
from rollcall.learner.layout import WeightSplit, fused_rows, read_part
from rollcall.learner.optimizer import Optimizer
from rollcall.learner.tensor_parallel import (
    SHARED_HEADS,
    TensorGroup,
    TensorOps,
    all_gather,
    cut_dim,
    pad_rows,
    split_order,
)
from rollcall.model.adapter import Adapter
from rollcall.model.decoder import Decoder, Rope, module_names
from rollcall.model.layer import Layer, Ops, Shape
from rollcall.model.load import non_finite_of, refuse_diverged
from rollcall.model.low_rank import LayerAdapter, a_of, b_of, fuse
from rollcall.model.stored.tensors import Stored
from rollcall.plan.mesh import ModelSplit

LAYER_TENSORS = tuple(field.name for field in fields(Layer) if field.name not in ("window", "lora"))


class ShardedLayer(nn.Module):
    """One decoder layer. Its creator registers the layer's weights under the names in ``Layer``, and an adapter's weights under
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
        # All ranks have this weight. A rank computes a part of its gradient: the part for its heads or columns or, with sequence
        # parallelism, for its tokens.
        is_partial = name.endswith(("q_norm", "k_norm", "_lora_A", "_lora_B")) or self.group.sequence_parallel
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
        # From now on, each rank of a tensor group has only its part of the rows, so its gradients are its own share.
        rows = group.own_part(work.logit_index)
        hidden = work.layers.ops.norm(group.enter(x, count).index_select(0, rows), weights["norm"])
        out = head_outputs(hidden, weights, group.own_part(work.targets), temperature=work.temperature)
        # Clone the outputs: FSDP attaches its backward hooks to them, and the statistics are views of one tensor.
        return tuple(group.join_parts(part, len(work.targets)).clone() for part in out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The place where this rank keeps its part of one weight."""

    module: nn.Module
    field: str
    layout: WeightSplit

    @property
    def parameter(self) -> Any:
        return self.module._parameters[self.field]

    @property
    def local(self) -> Tensor:
        """This rank's part, as a plain tensor that shares the parameter's memory."""
        with torch.no_grad():
            return self.parameter.detach().to_local()


class Sharded(BodyBase):
    """One rank's part of a model, and the forward pass that all ranks run together."""

    in_parts = together = True

    def __init__(
        self,
        decoder: Decoder,
        section: OptimizerSection,
        *,
        gang: Gang,
        split: ModelSplit,
        device: torch.device,
        heads: Mapping[str, Tensor] | None = None,
        frozen: bool = False,
        unread: Stored | None = None,
        adapter: Adapter | None = None,
    ):
        """``decoder`` has the full weights, on any device, and is not kept. If it is on the meta device, this rank reads its part from
        ``unread``; without ``unread``, the first rank sends the weights. ``heads`` are a critic's heads, which replace the output head.
        Every rank has the full ``adapter``. With an adapter, only the adapter is trained."""
        tensor, whole = split.tensor, decoder.shape
        kv_copies = max(1, tensor // whole.kv_heads)
        if (split, kv_copies) not in gang.meshes:
            gang.meshes[split, kv_copies] = make_meshes(gang, split, device_type=device.type, kv_copies=kv_copies)
        meshes: Meshes = gang.meshes[split, kv_copies]
        # A copy, because the model's weights may be freed. On the meta device, it is created from the config.
        rotary: Any = decoder.rope.rotary
        rotary = type(rotary)(rotary.config) if decoder.device.type == "meta" else copy.deepcopy(rotary)
        super().__init__(
            decoder,
            shape=replace(whole, heads=whole.heads // tensor, kv_heads=max(1, whole.kv_heads // tensor)),
            rope=Rope(rotary.to(device), like=torch.empty(1, device=device, dtype=decoder.dtype)),
            device=device,
            gang=gang,
            context=join_context(gang, size=split.context, tensor=tensor),
            adapter=adapter,
        )
        self.split, self.section, self.frozen = split, section, frozen
        # The ranks of a tensor group or a context group work on the same rows.
        self.counts = split.tensor_rank == split.context_rank == 0
        self.place = (split.data_rank, split.num_lanes // split.context)
        self.num_tensor = tensor
        self.kv_copies, self.meshes = kv_copies, meshes
        self.group = TensorGroup(
            group=meshes.tensor.get_group(),
            rank=split.tensor_rank,
            size=tensor,
            sequence_parallel=section.sequence_parallel,
            kv_group=meshes.kv_group,
            kv_copies=kv_copies,
        )
        self._first_gives = any(gang.gather(decoder.device.type == "meta" and unread is None))
        if len({str(names) for names in gang.gather(list(decoder.named_tensors()))}) > 1:
            raise ValueError(
                "the processes that run this model have different weights: config.json ties the output head to the embeddings, but "
                "the weight file has a different head; set tie_word_embeddings to false in config.json"
            )
        self.homes: dict[str, Home] = {}
        self._build(decoder, heads or {})
        trained = list(self.homes if adapter is None else adapter.named_tensors())
        self.named = {name: self.homes[name].local for name in trained}
        self.base_names = [name for name in self.homes if adapter is None or name not in self.named]
        origins = gang.gather(None if unread is None else unread.origin)
        if any(origins):
            self._read(unread, made=heads or {}, path=next(filter(None, origins)))

    def _read(self, unread: Stored | None, *, made: Collection[str], path: str) -> None:
        """Read this rank's parts from the files, except the weights in ``made``. All ranks call this, even if they already have
        values."""
        base = {name: self.local(name) for name in self.base_names}
        if unread is not None:
            for name, local in base.items():
                if name not in made:
                    read_part(local, self.layout(name), unread, rounded_to=self.dtype)
        bad = self.gang.names_of_all(non_finite_of(base, dtype=self.dtype))
        refuse_diverged(path, [one for name in bad for one in module_names(name)])

    def _build(self, decoder: Decoder, heads: Mapping[str, Tensor]) -> None:
        layers = [self._layer(decoder, index) for index in range(len(decoder.layers))]
        around = {
            name: tensor
            for name, tensor in decoder.named_tensors().items()
            if "." not in name and not (heads and name == "lm_head")
        }
        around |= heads
        trained = self.adapter is None
        parameters = {name: self._parameter(self._whole(tensor), trained=trained) for name, tensor in around.items()}
        root = ShardedRoot(parameters, layers, group=self.group)
        self.root = self._shard(root, self.meshes.every, is_root=True)
        body = {
            name: Home(module=root, field=name, layout=self._layout(decoder, name, tensor.shape, is_root=True))
            for name, tensor in around.items()
        }
        last = {name: body.pop(name) for name in heads}
        self.homes = {**body, **self.homes, **last}  # in the order of Decoder.named_tensors

    def _layer(self, decoder: Decoder, index: int) -> ShardedLayer:
        layer = decoder.layers[index]
        lora = None if self.adapter is None else self.adapter.section
        module = ShardedLayer(index=index, window=layer.window, shape=self.shape, group=self.group, lora=lora)
        wholes = {field: getattr(layer, field) for field in LAYER_TENSORS}
        low_rank = {} if self.adapter is None else self.adapter.layers[index]
        for field, whole in (wholes | low_rank).items():
            if whole is None:
                module.register_parameter(field, None)
                continue
            order = split_order(
                field, heads=decoder.shape.heads, kv_heads=decoder.shape.kv_heads, dim=decoder.shape.head_dim,
                intermediate=len(layer.gate_up) // 2, tensor=self.split.tensor,
            )  # fmt: skip
            name = f"layers.{index}.{field}"
            layout = self._layout(decoder, name, whole.shape, dim=cut_dim(field), order=order)
            self.homes[name] = Home(module=module, field=field, layout=layout)
            part = layout.tensor_part(whole if field in low_rank else self._whole(whole))
            trained = self.adapter is None or field in low_rank
            module.register_parameter(field, self._parameter(part, dim=layout.dim, is_root=False, trained=trained))
        self._shard(module, self.meshes.data, is_root=False)
        return module

    def _layout(self, decoder: Decoder, name: str, shape: torch.Size, **how: Any) -> WeightSplit:
        rows = fused_rows(name, shape[0], heads=decoder.shape.heads, kv_heads=decoder.shape.kv_heads)
        return WeightSplit(name=name, shape=shape, rows=rows, split=self.split, **how)

    def _whole(self, tensor: Tensor) -> Tensor:
        """Return a decoder weight with its values. The first rank may have to send them to the others."""
        if not self._first_gives:
            return tensor
        if self.gang.rank == 0:
            given = tensor.detach().to(self.device, self.dtype).contiguous()
        else:
            given = torch.empty(tensor.shape, device=self.device, dtype=self.dtype)
        dist.broadcast(given, src=0)
        return given

    def _parameter(
        self, tensor: Tensor, *, dim: int | None = None, is_root: bool = True, trained: bool = True
    ) -> nn.Parameter:
        """Create a parameter for this rank. It is float32 if it serves as the master weight, because FSDP rounds what it gathers."""
        trained = trained and not self.frozen
        dtype = torch.float32 if self.section.master_weights and trained else self.dtype
        if tensor.is_meta:  # FSDP keeps only this rank's part, whose values are read from the files later
            kept = torch.empty(tensor.shape, device=self.device, dtype=dtype)
        else:
            kept = tensor.detach().to(self.device, dtype).contiguous()
            if kept.data_ptr() == tensor.data_ptr():
                kept = kept.clone()
        if not is_root and self.split.tensor > 1:
            placement = Replicate() if dim is None else Shard(dim)
            kept = DTensor.from_local(kept, self.meshes.tensor, [placement], run_check=False)
        return nn.Parameter(kept, requires_grad=trained)

    def _shard(self, module: nn.Module, mesh: Any, *, is_root: bool) -> Any:
        rounds = self.dtype != torch.float32
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32) if rounds else None
        sharded: Any = fully_shard(
            module,
            mesh=mesh,
            # The root's backward follows directly after its forward.
            reshard_after_forward=not is_root,
            mp_policy=policy or MixedPrecisionPolicy(),
            offload_policy=CPUOffloadPolicy() if self.section.cpu_offload else OffloadPolicy(),
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        return sharded

    def compile(self) -> None:
        """Compile only without tensor parallelism, which needs a collective every few operations."""
        if self.num_tensor == 1:
            super().compile()

    # The forward pass

    def _ops(self, cos: Tensor, sin: Tensor) -> Ops:
        if self.num_tensor == 1:
            return super()._ops(cos, sin)
        return TensorOps(shape=self.shape, cos=cos, sin=sin, group=self.group)

    def _run(self, work: Work) -> tuple[Tensor, ...]:
        out = self.root(work)
        if not torch.is_grad_enabled():
            self.root.reshard()  # no backward pass will free the gathered weights, which would be stale after an update
        return out

    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        loss.backward()
        gradients: list[Tensor | None] = []
        for home in map(self.homes.__getitem__, self.named):
            gradient = home.parameter.grad
            gradients.append(None if gradient is None else gradient.to_local())
            home.parameter.grad = None
        return gradients

    def norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Compute the norm of all tensors together. Each rank has parts, and some parts are on several ranks."""
        own = {name: self._once(name, tensor) for name, tensor in tensors.items() if tensor.numel()}
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if own:
            squares = torch.stack(torch._foreach_norm(list(own.values()))).double().square()
            is_cut = [layout.is_root or layout.dim is not None for layout in map(self.layout, own)]
            copies = [self.split.replicate * (1 if cut else self.split.tensor) for cut in is_cut]
            total += (squares / torch.tensor(copies, device=squares.device)).sum().to(self.device)
        self.gang.sum_over(total)
        return total.sqrt()

    def _once(self, name: str, tensor: Tensor) -> Tensor:
        """Scale down the rows of shared key/value heads, so that all copies together count once."""
        order = self.layout(name).order
        if self.kv_copies == 1 or order is None or not name.endswith(("qkv", "qkv_bias", *SHARED_HEADS)):
            return tensor
        own = self.cut(name, torch.bincount(order).to(tensor.device, tensor.dtype).rsqrt())
        return tensor * (own if tensor.ndim == 1 else own[:, None])

    # Full weights, and other tensors of the same shapes

    def local(self, name: str) -> Tensor:
        return self.homes[name].local

    def layout(self, name: str) -> WeightSplit:
        return self.homes[name].layout

    def gather(self, name: str, local: Tensor) -> Tensor:
        layout, split = self.layout(name), self.split
        mesh, axis = (self.meshes.every, "every") if layout.is_root else (self.meshes.data, "shard")
        size, group = layout.num_shards, mesh.get_group(axis)
        rows = layout.shape[0] if layout.order is None else len(layout.order)
        rows //= split.tensor if layout.dim == 0 else 1
        part = pad_rows(local.detach().to(self.device), -(-rows // size))
        whole = all_gather(part, group=group, size=size)[:rows]
        if layout.dim is not None and split.tensor > 1:
            parts = all_gather(whole, group=self.meshes.tensor.get_group(), size=split.tensor)
            whole = parts if layout.dim == 0 else torch.cat(parts.chunk(split.tensor), dim=1)
        if layout.order is not None:
            whole = whole.new_empty(layout.shape).index_copy_(0, layout.order.to(whole.device), whole)
        return whole

    def masters(self, optimizer: Optimizer) -> Mapping[str, Tensor]:
        """Return this rank's parts of the master weights."""
        return self.named if self.dtype != torch.float32 and self.section.master_weights else {}
