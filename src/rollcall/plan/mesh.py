"""How a gang splits one model.

Ranks are numbered along three axes, the last one fastest: ``replicate`` (copies of the state), ``shard`` (FSDP: each rank has a
part of each weight) and ``tensor`` (each rank has different heads and columns). Ranks in a tensor group work on the same tokens.
A lane is a tensor group; there are replicate x shard lanes. Each set of neighbouring lanes (``context`` of them) splits the tokens of the same
rows. This does not affect how weights are split. It only reduces the number of data ranks, each with different rows, to lanes / context.
A full copy on every rank (``sharding: replicate``) needs no ``ModelSplit``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rollcall.config import OptimizerSection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    replicate: int
    shard: int
    tensor: int
    rank: int  # in the gang
    context: int = 1

    @property
    def num_lanes(self) -> int:
        return self.replicate * self.shard

    @property
    def lane(self) -> int:
        return self.rank // self.tensor

    @property
    def data_rank(self) -> int:
        return self.lane // self.context

    @property
    def shard_rank(self) -> int:
        return self.lane % self.shard

    @property
    def context_rank(self) -> int:
        return self.lane % self.context

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor


def is_split(section: OptimizerSection, *, num_ranks: int) -> bool:
    """Whether each rank has only a part of the model, so that all ranks have to run every forward pass together."""
    shards = section.sharding != "replicate" and num_ranks > section.tensor_parallel_size
    return shards or section.tensor_parallel_size > 1 or section.cpu_offload


def split_of(
    section: OptimizerSection, *, rank: int, nodes: Sequence[Hashable], name: str = "actor"
) -> ModelSplit | None:
    """Return the split for ``rank``, or None if every rank has the full model. ``nodes`` lists the node of each rank in the gang."""
    num_ranks, tensor, context = len(nodes), section.tensor_parallel_size, section.context_parallel_size
    if num_ranks % (tensor * context):
        have = f"{num_ranks} processes" if num_ranks > 1 else "one process"
        hint = (
            f"use a divisor of {num_ranks}"
            if num_ranks > 1
            else "give the run a cluster of several slots, or leave the size at 1"
        )
        raise ValueError(f"{product_of(name, tensor=tensor, context=context)}, but {name} has {have}; {hint}")
    if not is_split(section, num_ranks=num_ranks):
        return None
    num_lanes = num_ranks // tensor
    match section.sharding:
        case "replicate":
            shard = 1
        case "fsdp":
            shard = num_lanes
        case "hsdp":
            shard = section.sharding_group_size or _lanes_of_a_node(nodes, tensor=tensor, name=name)
            if num_lanes % shard:
                raise ValueError(
                    f"{name}.sharding_group_size={shard} does not divide the {num_lanes} data ranks of {name} ({num_ranks} "
                    f"processes / tensor_parallel_size {tensor}); use a divisor of {num_lanes}"
                )
    return ModelSplit(replicate=num_lanes // shard, shard=shard, tensor=tensor, rank=rank, context=context)


def product_of(name: str, *, tensor: int, context: int) -> str:
    """Describe the number of ranks that work on the same rows, in terms of run file keys.

    >>> product_of("actor", tensor=2, context=3)
    'actor.tensor_parallel_size=2 x actor.context_parallel_size=3 = 6'
    """
    sizes = {f"{name}.tensor_parallel_size": tensor, f"{name}.context_parallel_size": context}
    product = " x ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
    return f"{product} = {tensor * context}" if tensor > 1 and context > 1 else product


def indivisible_heads(*, heads: int, kv_heads: int, tensor: int, context: int, name: str) -> str | None:
    """Return why the ranks of a context group cannot split their heads evenly, or None if they can. With tensor parallelism, these are
    the heads of one tensor rank."""
    own, kv_own = heads // tensor, max(1, kv_heads // tensor)

    def fit(size: int) -> bool:
        # Neighbouring ranks may share a key/value head.
        return own % size == 0 and (kv_own % size == 0 or size % kv_own == 0)

    if fit(context):
        return None
    count, what = (own, "attention heads") if own % context else (kv_own, "key/value heads")
    each = f" on each rank of a tensor group ({name}.tensor_parallel_size={tensor})" if tensor > 1 else ""
    sizes = " or ".join(str(size) for size in range(1, context) if fit(size))
    return (
        f"{name}.context_parallel_size={context} does not divide the model's {count} {what}{each}: {count} = {context} x "
        f"{count // context} + {count % context}; use {sizes}"
    )


def _lanes_of_a_node(nodes: Sequence[Hashable], *, tensor: int, name: str) -> int:
    counts = sorted(set(Counter(nodes).values()))
    if len(counts) > 1 or counts[0] % tensor:
        raise ValueError(
            f"{name}.sharding=hsdp keeps one copy of the state per node, but the nodes have {' and '.join(map(str, counts))} "
            f"processes of {name} (tensor_parallel_size {tensor}); set {name}.sharding_group_size, or use sharding=fsdp"
        )
    return counts[0] // tensor
