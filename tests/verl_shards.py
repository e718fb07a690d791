"""Checkpoints as verl's FSDP trainer leaves them, made in one process: torch's own DTensors on a process group that sends nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@contextmanager
def as_rank(rank: int, *, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_verl(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    mesh: Sequence[int],
    names: Sequence[str] = ("fsdp",),
    plain: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    config: Path | None = None,
) -> Path:
    """``plain``: tensors that are whole in each process. ``dims``: along which dimension tensor parallel cuts one (else none)."""
    world_size = int(torch.tensor(mesh).prod())
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):
        with as_rank(rank, world_size=world_size):
            grid = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=tuple(names))
            at = dict(zip(names, grid.get_coordinate() or (), strict=True))
            state = {
                name: tensor if name in plain else _dtensor(tensor, grid, at, tp_dim=(dims or {}).get(name))
                for name, tensor in tensors.items()
            }
            torch.save(state, folder / f"model_world_size_{world_size}_rank_{rank}.pt")
    if config is not None:
        keep = [path for path in config.iterdir() if path.suffix != ".safetensors"]
        (folder / "huggingface").mkdir(exist_ok=True)
        for path in keep:
            shutil.copy(path, folder / "huggingface" / path.name)
    return folder


def _dtensor(tensor: torch.Tensor, grid: Any, at: Mapping[str, int], *, tp_dim: int | None) -> DTensor:
    """Tensor parallel cuts first, then FSDP the rows of what is left, as torch lays them out."""
    local, placements = tensor, {}
    sizes = dict(zip(grid.mesh_dim_names, grid.mesh.shape, strict=True))
    if "tp" in sizes:
        placements["tp"] = Replicate() if tp_dim is None else Shard(tp_dim)
        if tp_dim is not None:
            local = _share(local, tp_dim, count=sizes["tp"], at=at["tp"])
    for name in sizes.keys() - {"tp", "fsdp"}:
        placements[name] = Replicate()
    placements["fsdp"] = Shard(0) if tp_dim != 0 else _StridedShard(0, split_factor=sizes["tp"])
    local = _share(local, 0, count=sizes["fsdp"], at=at["fsdp"])
    return DTensor.from_local(
        local.clone(), grid, [placements[name] for name in grid.mesh_dim_names], run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip


def _share(tensor: torch.Tensor, dim: int, *, count: int, at: int) -> torch.Tensor:
    chunks = tensor.chunk(count, dim=dim)
    return chunks[at] if at < len(chunks) else tensor.narrow(dim, 0, 0)
