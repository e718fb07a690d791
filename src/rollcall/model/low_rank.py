"""Low-rank adapters (LoRA) add ``gain * B (A x)`` to a layer's products.

An adapter has an A and a B for each transformers module (q_proj, gate_proj, ...), but the decoder computes several modules in
one product (``qkv``, ``gate_up``). ``fuse`` combines the modules of one product: it stacks their A matrices and puts their B
matrices on a block diagonal. So an adapter needs two small products for each large one, whatever modules it has:

    x [N, C] --A [K, C]--> [N, K] --gain--> [N, K] --B [out, K]--> added to [N, out]

Several adapters in one batch also need only two products: K then covers all adapters, one after another, and each token's row of
``gain`` [N, adapters] is 0 except in the column of the token's adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# The modules in each fused product, in row order.
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
    """Return the name of a module's A matrix among the layer's tensors."""
    return f"{module}_lora_A"


def b_of(module: str) -> str:
    return f"{module}_lora_B"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The adapter for one fused product."""

    a: Tensor  # [K, in]
    b: Tensor  # [out, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdapter:
    """The adapter for one layer. A product is None if the adapter targets none of its modules."""

    qkv: LowRank | None = None
    out: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None
    gain: float | Tensor = 1.0  # one number, or float32 [N, adapters]
    dropout: float = 0.0  # only while gradients are enabled


def add_low_rank(out: Tensor, x: Tensor, pair: LowRank | None, adapter: LayerAdapter) -> Tensor:
    """Add the adapter's contribution to ``out`` [N, out], a product of ``x`` [N, in]."""
    if pair is None:
        return out
    if adapter.dropout and torch.is_grad_enabled():
        x = F.dropout(x, adapter.dropout)
    inner, gain = F.linear(x, pair.a), adapter.gain
    if isinstance(gain, Tensor):
        # Multiply in float32 and round once, as torch does with a plain number.
        inner = (inner.view(len(x), gain.shape[1], -1).float() * gain[:, :, None]).to(x.dtype).view(len(x), -1)
    else:
        inner = inner * gain
    return torch.addmm(out, inner, pair.b.t())


def fuse(
    tensors: Mapping[str, Tensor | None], *, rows: Mapping[str, Sequence[int]], gain: float, dropout: float
) -> LayerAdapter:
    """Build a layer's adapter from its tensors by name (``a_of``, ``b_of``). ``rows`` gives the row counts of each product's modules."""
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
