"""Checkpoints from verl's FSDP trainer: ``model_world_size_W_rank_R.pt`` for each process, config and tokenizer in ``huggingface/``.

Each file is a state dict of DTensors, which contain the process's block of each tensor, and the mesh. A mesh has one or more dimensions
(ddp, fsdp, tp). For each of them, a placement says whether the tensor is sharded along one of its own dimensions, or replicated. Each
process has a complete copy of a tensor that is not a DTensor, such as a buffer, or any tensor in a run without sharding. If several
processes have the same block, the first copy is read, and the other copies must have the same checksum.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rollcall.model.stored.files import StoredError, StoredFile, plain_damage
from rollcall.model.stored.find import config_folder
from rollcall.model.stored.tensors import Piece, Stored, StoredTensor, stored_of
from rollcall.model.stored.torch_file import TorchFile, TorchTensor, fields_of, is_named, open_torch_file, whole_numbers

Mesh = tuple[tuple[int, int], ...]  # for each dimension, its size and one process's index in it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """One process's share of a tensor. The mesh of a plain tensor has no dimensions."""

    rank: int
    tensor: TorchTensor
    shape: tuple[int, ...]  # of the full tensor
    mesh: Mesh
    # For each mesh dimension, the tensor dimension and the split factor (1: none), or None if the tensor is replicated.
    cuts: tuple[tuple[int, int] | None, ...]

    @property
    def layout(self) -> Any:
        """The properties on which all processes must agree."""
        return self.tensor.dtype, [size for size, _ in self.mesh], self.cuts, self.shape

    def __str__(self) -> str:
        mesh = f"mesh {[size for size, _ in self.mesh]}, whole shape {list(self.shape)}" if self.mesh else "no mesh"
        return f"{self.tensor.dtype} {list(self.tensor.shape)}, {mesh}"

    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the start and the shape of the process's block.

        Several mesh dimensions may split the same tensor dimension. The outer one splits it first, unless it has a split factor. In that
        case, it splits last. Example: six rows are split along both dimensions of a 2 x 3 mesh. Process (1, 0) has row 3. If the first
        mesh dimension has a split factor of 3 (as with FSDP on top of tensor parallelism), process (1, 0) has row 1.
        """
        start, shape = [0] * len(self.shape), list(self.shape)
        for strided in (False, True):
            for (size, at), cut in zip(self.mesh, self.cuts, strict=True):
                if cut is None or (cut[1] > 1) is not strided:
                    continue
                dim = cut[0]
                each = -(-shape[dim] // size)  # like torch.chunk: the last chunk may be smaller or empty
                begin = min(at * each, shape[dim])
                start[dim] += begin
                shape[dim] = min(each, shape[dim] - begin)
        return tuple(start), tuple(shape)


def open_verl(folder: Path) -> Stored:
    files: list[TorchFile] = []
    held: dict[str, list[_Local]] = {}
    for rank, path in enumerate(_rank_files(folder)):
        file, content = open_torch_file(path)
        files.append(file)
        for name, local in _locals(file, content, rank=rank):
            held.setdefault(name, []).append(local)
    for name, locals_ in held.items():
        if len(locals_) != len(files):
            there = {one.rank for one in locals_}
            lacking = next(file for rank, file in enumerate(files) if rank not in there)
            raise StoredError(
                f"{locals_[0].tensor.file} contains {name}, but {lacking.path} does not: they do not belong to the same checkpoint"
            )
    steps = [int(match[1]) for one in folder.parts if (match := re.fullmatch(r"global_step_(\d+)", one))]
    return stored_of(
        [_joined(name, locals_) for name, locals_ in held.items()],
        files=[
            StoredFile(path=file.path, size=file.path.stat().st_size, records=tuple(file.records.values()))
            for file in files
        ],
        origin=str(folder),
        folder=config_folder(folder),
        kind="verl checkpoint",
        facts={"step": steps[-1]} if steps else {},
    )


def _rank_files(folder: Path) -> list[Path]:
    """Return one file per process, in rank order."""
    found: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := re.fullmatch(r"model_world_size_(\d+)_rank_(\d+)\.pt", path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    if len(found) != 1:
        sizes = " and ".join(map(str, sorted(found))) or "an unknown number of"
        raise StoredError(
            f"{folder} contains shards of {sizes} processes; keep only those of one checkpoint, named model_world_size_W_rank_R.pt"
        )
    ((size, ranks),) = found.items()
    first = next((rank for rank in range(size) if rank not in ranks), None)
    if first is not None:
        raise StoredError(
            f"{folder} lacks model_world_size_{size}_rank_{first}.pt: it has {len(ranks)} of the {size} shards; copy the missing shards "
            "from their nodes"
        )
    return [ranks[rank] for rank in range(size)]


def _locals(file: TorchFile, content: Any, *, rank: int) -> Iterable[tuple[str, _Local]]:
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise StoredError(f"{file.path} does not contain a state dict; use the model's shards")
    meshes: dict[int, Mesh] = {}  # the tensors in a file share mesh objects
    for name, value in content.items():
        if isinstance(value, int | float | str | type(None)):
            continue  # not a tensor, so not a weight
        whole, mesh, cuts = None, (), ()
        with plain_damage(f"{file.path}: the layout of {name} cannot be read"):
            if is_named(value, "_rebuild_from_type_v2") and is_named(value.args[1], "DTensor"):
                _, _, (_, _, shape, *_), state = value.args
                fields = fields_of(state)
                spec, value = fields["_spec"].fields, fields["_local_tensor"]
                pickled = spec["mesh"]
                if (own := pickled.fields.get("_rank", rank)) != rank:
                    raise StoredError(
                        f"{file.path} should contain the shard of rank {rank}, but contains that of rank {own}; restore the correct file"
                    )
                if id(pickled) not in meshes:
                    meshes[id(pickled)] = _mesh_of(pickled.fields, rank=rank, file=file)
                whole, mesh = whole_numbers(shape), meshes[id(pickled)]
                cuts = _cuts(spec["placements"], mesh, num_dims=len(whole))
            tensor = file.tensor(value, name=name)
        if tensor is None:
            raise StoredError(f"{file.path}: {name} is neither a tensor nor a DTensor; use the model's shards")
        shape = tensor.shape if whole is None else whole
        yield name, _Local(rank=rank, tensor=tensor, shape=shape, mesh=mesh, cuts=cuts)


def _joined(name: str, locals_: list[_Local]) -> StoredTensor:
    """Join the processes' blocks into one tensor."""
    first = locals_[0]
    taken: dict[tuple[int, ...], tuple[_Local, Piece]] = {}
    for one in locals_:
        if one.layout != first.layout:
            raise StoredError(
                f"{first.tensor.file} and {one.tensor.file} do not belong to the same checkpoint: {name} is {first} in the first and "
                f"{one} in the second"
            )
        start, wanted = one.block()
        if wanted != one.tensor.shape:
            raise StoredError(
                f"{one.tensor.file}: its share of {name} has shape {list(one.tensor.shape)}, but rank {one.rank} of its mesh should have "
                f"{list(wanted)}, so the file belongs to another checkpoint"
            )
        if 0 in wanted:
            continue
        piece = one.tensor.piece(start=start)
        same, _ = taken.setdefault(start, (one, piece))
        if None not in (sums := (same.tensor.crc32, one.tensor.crc32)) and sums[0] != sums[1]:
            raise StoredError(
                f"{same.tensor.file} and {one.tensor.file} should contain the same values of {name}, but do not: they do not belong "
                "to the same checkpoint"
            )
    pieces = tuple(piece for _, piece in taken.values())
    return StoredTensor(name=name, dtype=first.tensor.dtype, shape=first.shape, pieces=pieces)


def _mesh_of(mesh: dict[str, Any], *, rank: int, file: TorchFile) -> Mesh:
    """Build the mesh from these fields, as ``rank`` sees it. Fields that cannot be read may raise any kind of error."""
    ranks: Any = mesh.get("mesh", mesh.get("_rank_map", mesh.get("_flatten_rank_map")))
    if tensor := file.tensor(ranks, name="a mesh"):
        ranks = np.fromfile(tensor.file, tensor.dtype.name, count=prod(tensor.shape), offset=tensor.offset).tolist()
    if tensor and "mesh" in mesh:  # torch before 2.10: a tensor of ranks and no layout
        axes = [((size, prod(tensor.shape[dim + 1 :])),) for dim, size in enumerate(tensor.shape)]
    else:
        layout = mesh["_layout"].fields
        if "axes" in layout:
            axes = [_pairs(axis.fields["shape"], axis.fields["stride"]) for axis in layout["axes"]]
        elif isinstance(layout["shape"], int):
            axes = [_pairs(layout["shape"], layout["stride"])]
        else:
            axes = [_pairs(*one) for one in zip(layout["shape"], layout["stride"], strict=True)]
    index = ranks.index(rank)
    found = []
    for axis in axes:
        at = 0
        for size, stride in axis:  # several if dimensions were flattened into one
            at = at * size + ((index // stride) % size if size > 1 else 0)
        found.append((prod(size for size, _ in axis), at))
    return tuple(found)


def _pairs(shape: Any, stride: Any) -> tuple[tuple[int, int], ...]:
    """Return the sizes and strides of one mesh dimension, which may have been flattened from several."""
    if not isinstance(shape, int):
        return tuple(pair for one in zip(shape, stride, strict=True) for pair in _pairs(*one))
    if shape < 1 or not isinstance(stride, int) or stride < 1:
        raise ValueError(f"a mesh dimension cannot have shape {shape} and stride {stride}")
    return ((shape, stride),)


def _cuts(placements: Any, mesh: Mesh, *, num_dims: int) -> tuple[tuple[int, int] | None, ...]:
    """Convert pickled ``placements``. Placements that cannot be read may raise any kind of error."""
    cuts = tuple(_placement(one, num_dims=num_dims) for one in placements)
    if len(cuts) != len(mesh):
        raise ValueError(f"there are {len(cuts)} placements, but the mesh has {len(mesh)} dimensions")
    for number, cut in enumerate(cuts):
        if cut is not None and cut[1] > 1:
            rest = list(zip(mesh, cuts, strict=True))[number + 1 :]
            parts = prod(size for (size, _), other in rest if other is not None and other[0] == cut[0])
            if cut[1] != parts:
                raise ValueError(
                    f"the split factor is {cut[1]}, but the later mesh dimensions split the tensor into {parts} parts"
                )
    return cuts


def _placement(placement: Any, *, num_dims: int) -> tuple[int, int] | None:
    if is_named(placement, "Replicate"):
        return None
    if not is_named(placement, "Shard") and not is_named(placement, "_StridedShard"):
        raise ValueError(f"the placement {type(placement).__name__} is neither a shard nor a replica")
    dim = int(placement.fields["dim"] if "dim" in placement.fields else placement.args[0])
    dim += num_dims if dim < 0 else 0
    if not 0 <= dim < num_dims:
        raise ValueError(f"cannot shard along dimension {dim} of a tensor with {num_dims} dimensions")
    return dim, int(placement.fields.get("split_factor") or 1)
