"""How a gang divides one model.

Ranks count along three axes, the last the fastest: ``replicate`` (copies of the state), ``shard`` (FSDP: ranks that hold
a part of each weight), ``tensor`` (ranks that hold other heads and columns). Ranks of one tensor group work on the same
rows; all others on rows of their own, so a gang has replicate x shard data ranks. A whole copy on every rank, as
``sharding: replicate`` has it, needs none of this: there is no ``Split`` then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollcall.config import OptimizerSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """torch's view of a split. Weights that tensor parallel does not cut are sharded over its ranks too."""

    data: Any  # DeviceMesh [shard], or [replicate, shard]
    tensor: Any  # DeviceMesh [tensor]
    every: Any  # DeviceMesh [shard x tensor], or [replicate, shard x tensor]
    shard_group: Any  # ProcessGroup
    every_group: Any
    tensor_group: Any
    kv_group: Any  # of the neighbours in a tensor group that have the same key/value head; None: no two have


def is_split(section: OptimizerSection, *, num_ranks: int) -> bool:
    """Whether the ranks hold parts of the model, and so have to run every forward together."""
    shards = section.sharding != "replicate" and num_ranks > section.tensor_parallel_size
    return shards or section.tensor_parallel_size > 1 or section.cpu_offload


def split_of(section: OptimizerSection, *, rank: int, nodes: Sequence[Hashable], name: str = "actor") -> Split | None:
    """``nodes`` says for each rank of the gang where it runs; None: every rank has the whole model."""
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
    return Split(replicate=num_data // shard, shard=shard, tensor=tensor, rank=rank)


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


def make_meshes(split: Split, *, device_type: str, greet: Callable[[Any, str], None], kv_copies: int = 1) -> Meshes:
    """Makes process groups: every rank of the gang calls this at the same point. ``greet`` is the gang's."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if split.num_data * split.tensor == 1 and not dist.is_initialized():
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh(device_type, (split.replicate, split.shard, split.tensor), mesh_dim_names=names)
    flat = init_device_mesh(
        device_type, (split.replicate, split.shard * split.tensor), mesh_dim_names=("replicate", "every")
    )
    meshes = {"": mesh, "flat ": flat}
    kv_group = None
    if kv_copies > 1:
        sizes = (split.num_data * split.tensor // kv_copies, kv_copies)
        meshes["kv "] = init_device_mesh(device_type, sizes, mesh_dim_names=("others", "kv"))
        kv_group = meshes["kv "].get_group("kv")
    for kind, one in meshes.items():
        for name in one.mesh_dim_names or ():
            greet(
                one.get_group(name), f"{kind}{name} of {split.replicate} x {split.shard} x {split.tensor}, {kv_copies}"
            )
    several = split.replicate > 1
    return Meshes(
        data=mesh["replicate", "shard"] if several else mesh["shard"],
        tensor=mesh["tensor"],
        every=flat if several else flat["every"],
        shard_group=mesh.get_group("shard"),
        every_group=flat.get_group("every"),
        tensor_group=mesh.get_group("tensor"),
        kv_group=kv_group,
    )
