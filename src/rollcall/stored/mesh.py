"""Which block of a tensor a process of a mesh holds, from the pickled layout of a DTensor.

A mesh has one or more dimensions (ddp, fsdp, tp); a placement for each says whether the tensor is cut along one of its own
dimensions there, or the same in all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from rollcall.stored.unpickle import Thing, View

MOST_DIMENSIONS = 16  # of a mesh
MOST_FLATTENED = 3  # dimensions in dimensions of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a process stands in the mesh of a tensor and how the tensor is cut there."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]
    # For each dimension of the mesh, the tensor's dimension and the split factor (1: none); None: the same in all.
    cuts: tuple[tuple[int, int] | None, ...]
    shape: tuple[int, ...]  # of the whole tensor

    def is_copy_of(self, other: Placed) -> bool:
        """Whether two processes hold the same block: they stand at the same place wherever the mesh cuts the tensor."""
        places = zip(self.coordinates, other.coordinates, self.cuts, strict=True)
        return self.layout == other.layout and all(mine == its for mine, its, cut in places if cut is not None)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What all processes must agree on."""
        return self.names, self.sizes, self.cuts, self.shape

    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where the process's block begins, and its shape.

        A dimension may be cut by several of the mesh's: the outer first, but one with a split factor after those behind it.
        Six rows over a mesh of 2 x 3, cut by both: process (1, 0) has row 3. With a split factor of 3 at the first (as FSDP
        puts it over tensor parallel), it has row 1.
        """
        start, shape = [0] * len(self.shape), list(self.shape)
        for strided in (False, True):
            for size, at, cut in zip(self.sizes, self.coordinates, self.cuts, strict=True):
                if cut is None or (cut[1] > 1) is not strided:
                    continue
                dim = cut[0]
                each = -(-shape[dim] // size)  # as torch.chunk cuts: the last may be smaller, or empty
                begin = min(at * each, shape[dim])
                start[dim] += begin
                shape[dim] = min(each, shape[dim] - begin)
        return tuple(start), tuple(shape)


def placed(
    tensor: Thing,
    *,
    rank: int,
    numbers: Callable[[View], list[int]],
    positions: dict[int, tuple[tuple[int, ...], tuple[int, ...]]],
) -> Placed:
    """``numbers`` reads a small tensor; ``positions`` keeps what is known of the file's meshes, which its tensors share.
    ValueError: a layout that cannot be read."""
    spec = tensor.fields["_spec"]
    mesh = spec.mesh
    shape = tuple(int(size) for size in tensor.fields["shape"])
    if id(mesh) not in positions:
        positions[id(mesh)] = _position(mesh, rank=rank, numbers=numbers)
    sizes, coordinates = positions[id(mesh)]
    cuts = tuple(_cut(one, rank_of_tensor=len(shape)) for one in spec.placements)
    if len(cuts) != len(sizes):
        raise ValueError(f"{len(cuts)} placements for a mesh of {len(sizes)} dimensions")
    for number, cut in enumerate(cuts):
        behind = [
            size for size, other in zip(sizes[number + 1 :], cuts[number + 1 :], strict=True) if _same(cut, other)
        ]
        if cut is not None and cut[1] > 1 and cut[1] != prod(behind):
            raise ValueError(f"a split factor of {cut[1]} over {prod(behind)} parts")
    names = tuple(mesh.fields.get("_mesh_dim_names") or mesh.fields.get("mesh_dim_names") or ())
    return Placed(names=names, sizes=sizes, coordinates=coordinates, cuts=cuts, shape=shape)


def _same(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return one is not None and other is not None and one[0] == other[0]


def _cut(placement: Any, *, rank_of_tensor: int) -> tuple[int, int] | None:
    kind = getattr(placement, "kind", None)
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "_StridedShard"):
        raise ValueError(f"a placement {kind or type(placement).__name__}, which is not a share of the numbers")
    dim = placement.fields["dim"] if "dim" in placement.fields else placement.args[0]
    factor = placement.fields.get("split_factor") or 1
    dim = int(dim) + rank_of_tensor if dim < 0 else int(dim)
    if not 0 <= dim < rank_of_tensor:
        raise ValueError(f"a cut along dimension {dim} of {rank_of_tensor}")
    return dim, int(factor)


def _position(
    mesh: Thing, *, rank: int, numbers: Callable[[View], list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The mesh's sizes, and where ``rank`` stands in it."""
    if isinstance(view := mesh.fields.get("mesh"), View):  # torch before 2.10: a tensor of ranks
        ranks, axes = (
            numbers(view),
            [((size, stride),) for size, stride in zip(view.shape, _strides(view.shape), strict=True)],
        )
    else:
        flat = mesh.fields.get("_rank_map", mesh.fields.get("_flatten_rank_map"))
        ranks = numbers(flat) if isinstance(flat, View) else [int(one) for one in flat or ()]
        axes = _axes(mesh.fields["_layout"])
    if rank not in ranks:
        raise ValueError(f"a mesh without rank {rank}")
    index = ranks.index(rank)
    sizes, coordinates = [], []
    for axis in axes:
        at = 0
        for size, stride in axis:  # several where dimensions were flattened into one
            at = at * size + ((index // stride) % size if size > 1 else 0)
        sizes.append(prod(size for size, _ in axis))
        coordinates.append(at)
    return tuple(sizes), tuple(coordinates)


def _axes(layout: Thing) -> list[tuple[tuple[int, int], ...]]:
    fields = layout.fields
    if "axes" in fields:
        return [_pairs(axis.fields["shape"], axis.fields["stride"]) for axis in fields["axes"]]
    shape, stride = fields["shape"], fields["stride"]
    if isinstance(shape, int):
        return [_pairs(shape, stride)]
    return [_pairs(a, b) for a, b in zip(shape, stride, strict=True)]


def _pairs(shape: Any, stride: Any, *, depth: int = 0) -> tuple[tuple[int, int], ...]:
    if isinstance(shape, int):
        if shape < 1 or not isinstance(stride, int) or stride < 1:
            raise ValueError(f"a mesh of {shape} processes")
        return ((shape, stride),)
    if depth == MOST_FLATTENED or len(shape) > MOST_DIMENSIONS:
        raise ValueError("a mesh with more dimensions than there are")
    return tuple(pair for a, b in zip(shape, stride, strict=True) for pair in _pairs(a, b, depth=depth + 1))


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]
