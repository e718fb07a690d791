"""How a gang divides one model.

Ranks count along three axes, the last the fastest: ``replicate`` (copies of the state), ``shard`` (FSDP: ranks that hold
a part of each weight), ``tensor`` (ranks that hold other heads and columns). Ranks of one tensor group work on the same
rows; all others on rows of their own, so a gang has replicate x shard data ranks. A whole copy on every rank, as
``sharding: replicate`` has it, needs no ``ModelSplit``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rollcall.config import OptimizerSection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    replicate: int
    shard: int
    tensor: int
    rank: int  # in the gang

    @property
    def num_data(self) -> int:
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor

    @property
    def shard_rank(self) -> int:
        return self.data_rank % self.shard

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor


def is_split(section: OptimizerSection, *, num_ranks: int) -> bool:
    """Whether the ranks hold parts of the model, and so have to run every forward together."""
    shards = section.sharding != "replicate" and num_ranks > section.tensor_parallel_size
    return shards or section.tensor_parallel_size > 1 or section.cpu_offload


def split_of(
    section: OptimizerSection, *, rank: int, nodes: Sequence[Hashable], name: str = "actor"
) -> ModelSplit | None:
    """``nodes`` has the node of each rank of the gang. The result is None if every rank has the whole model."""
    num_ranks, tensor = len(nodes), section.tensor_parallel_size
    if num_ranks % tensor:
        have = f"{num_ranks} processes" if num_ranks > 1 else "one process"
        hint = f"use a divisor of {num_ranks}" if num_ranks > 1 else "give the run a cluster of several slots, or use 1"
        raise ValueError(f"{name}.tensor_parallel_size={tensor}, but {name} has {have}; {hint}")
    if not is_split(section, num_ranks=num_ranks):
        return None
    num_data = num_ranks // tensor
    match section.sharding:
        case "replicate":
            shard = 1
        case "fsdp":
            shard = num_data
        case "hsdp":
            shard = section.sharding_group_size or _data_ranks_of_a_node(nodes, tensor=tensor, name=name)
            if num_data % shard:
                raise ValueError(
                    f"{name}.sharding_group_size={shard} does not divide the {num_data} data ranks of {name} ({num_ranks} "
                    f"processes / tensor_parallel_size {tensor}); use a divisor of {num_data}"
                )
    return ModelSplit(replicate=num_data // shard, shard=shard, tensor=tensor, rank=rank)


def _data_ranks_of_a_node(nodes: Sequence[Hashable], *, tensor: int, name: str) -> int:
    counts = sorted(set(Counter(nodes).values()))
    if len(counts) > 1 or counts[0] % tensor:
        raise ValueError(
            f"{name}.sharding=hsdp keeps one copy of the state per node, but the nodes have {' and '.join(map(str, counts))} "
            f"processes of {name} (tensor_parallel_size {tensor}); set {name}.sharding_group_size, or use sharding=fsdp"
        )
    return counts[0] // tensor


def split_problems(sections: Mapping[str, OptimizerSection], nodes: Mapping[str, Sequence[Hashable]]) -> list[str]:
    """Why these learners cannot be divided over their processes, each of which runs on one of ``nodes``."""
    problems: list[str] = []
    for name in nodes:
        try:
            split_of(sections[name], rank=0, nodes=nodes[name], name=name)
        except ValueError as error:
            problems.append(str(error))
    return problems
