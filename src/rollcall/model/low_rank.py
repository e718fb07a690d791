"""Low-rank adapters (LoRA) add ``gain * B (A x)`` to the products of a layer.

An adapter has an A and a B for each module that transformers knows (q_proj, gate_proj, ...), and the decoder computes several modules
in one product (``qkv``, ``gate_up``). ``fuse`` puts the modules of one product together: their A below each other, their B along a
diagonal. So an adapter is two small products for each large one, whatever modules it has:

    x [N, C] --A [K, C]--> [N, K] --gain--> [N, K] --B [out, K]--> added to [N, out]

Several adapters in one batch are the same two products: K runs over the adapters one after the other, and ``gain`` [N, adapters] is 0
for each token but at its own adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# The modules of each product, in the order of its rows.
MODULES = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
PATHS = {
    name: f"{'self_attn' if field in ('qkv', 'out') else 'mlp'}.{name}"
    for field, names in MODULES.items()
    for name in names
}
FIELDS = {name: field for field, names in MODULES.items() for name in names}


def a_of(module: str) -> str:
    """The name of a module's A among the tensors of a layer."""
    return f"{module}_lora_A"


def b_of(module: str) -> str:
    return f"{module}_lora_B"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The adapter of one product."""

    a: Tensor  # [K, in]
    b: Tensor  # [out, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdapter:
    """The adapter of one layer. A product of which no module has one has None."""

    qkv: LowRank | None = None
    out: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None
    gain: float | Tensor = 1.0  # one number, or float32 [N, adapters]
    dropout: float = 0.0  # only where gradients are computed


def add_low_rank(out: Tensor, x: Tensor, pair: LowRank | None, adapter: LayerAdapter) -> Tensor:
    """``out`` [N, out], a product of ``x`` [N, in], with what the adapter adds to it."""
    if pair is None:
        return out
    if adapter.dropout and torch.is_grad_enabled():
        x = F.dropout(x, adapter.dropout)
    inner, gain = F.linear(x, pair.a), adapter.gain
    if isinstance(gain, Tensor):
        # In float32 and rounded once, as a plain number is multiplied.
        inner = (inner.view(len(x), gain.shape[1], -1).float() * gain[:, :, None]).to(x.dtype).view(len(x), -1)
    else:
        inner = inner * gain
    return torch.addmm(out, inner, pair.b.t())


def fuse(
    tensors: Mapping[str, Tensor | None], *, rows: Mapping[str, Sequence[int]], gain: float, dropout: float
) -> LayerAdapter:
    """One adapter of a layer from its tensors by name (``a_of``, ``b_of``). ``rows`` of each module of a product."""
    return LayerAdapter(
        **{field: fuse_product(tensors, field, rows=rows[field]) for field in MODULES}, gain=gain, dropout=dropout
    )


def fuse_product(tensors: Mapping[str, Tensor | None], field: str, *, rows: Sequence[int]) -> LowRank | None:
    pairs = [(tensors.get(a_of(module)), tensors.get(b_of(module))) for module in MODULES[field]]
    there = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not there:
        return None
    if len(pairs) == 1:
        return LowRank(a=there[0][0], b=there[0][1])
    like = there[0][1]
    blocks = [like.new_empty(count, 0) if b is None else b for (_, b), count in zip(pairs, rows, strict=True)]
    return LowRank(a=torch.cat([a for a, _ in there]), b=torch.block_diag(*blocks))
