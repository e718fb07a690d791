"""torch's process groups for a model that a gang divides (``plan/mesh.py`` says how)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollcall.plan.mesh import ModelSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """torch's view of a split. Weights that tensor parallel does not cut are sharded over its ranks too."""

    data: Any  # DeviceMesh [shard], or [replicate, shard]
    tensor: Any  # DeviceMesh [tensor]
    every: Any  # DeviceMesh [shard x tensor], or [replicate, shard x tensor]
    shard_group: Any  # ProcessGroup
    every_group: Any
    tensor_group: Any
    kv_group: Any  # of the neighbours in a tensor group that have the same key/value head, if any do


def make_meshes(
    split: ModelSplit, *, device_type: str, greet: Callable[[Any, str], None], kv_copies: int = 1
) -> Meshes:
    """Makes process groups: every rank of the gang calls this at the same point. ``greet`` is the gang's."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if split.num_lanes * split.tensor == 1 and not dist.is_initialized():
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
        sizes = (split.num_lanes * split.tensor // kv_copies, kv_copies)
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
