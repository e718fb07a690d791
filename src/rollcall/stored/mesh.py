"""Which block of a tensor a process of a mesh holds, from the pickled layout of a DTensor.

A mesh has one or more dimensions (ddp, fsdp, tp); a placement for each says whether the tensor is cut along one of its own
dimensions there, or the same in all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rollcall.stored.torch_file import View, view_of
from rollcall.stored.unpickle import Thing


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The sizes of a mesh's dimensions, and where a process stands in each."""

    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a process stands in the mesh of a tensor and how the tensor is cut there."""

    position: Position
    # For each dimension of the mesh, the tensor's dimension and the split factor (1: none); None: the same in all.
    cuts: tuple[tuple[int, int] | None, ...]
    shape: tuple[int, ...]  # of the whole tensor

    @property
    def layout(self) -> tuple[Any, ...]:
        """The part that all processes must agree on."""
        return self.position.sizes, self.cuts, self.shape

    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where the process's block begins, and its shape.

        A dimension may be cut by several of the mesh's: the outer first, but one with a split factor after those behind it.
        Six rows over a mesh of 2 x 3, cut by both: process (1, 0) has row 3. With a split factor of 3 at the first (as FSDP
        puts it over tensor parallel), it has row 1.
        """
        start, shape = [0] * len(self.shape), list(self.shape)
        for strided in (False, True):
            for size, at, cut in zip(self.position.sizes, self.position.coordinates, self.cuts, strict=True):
                if cut is None or (cut[1] > 1) is not strided:
                    continue
                dim = cut[0]
                each = -(-shape[dim] // size)  # as torch.chunk cuts: the last may be smaller, or empty
                begin = min(at * each, shape[dim])
                start[dim] += begin
                shape[dim] = min(each, shape[dim] - begin)
        return tuple(start), tuple(shape)


def placed(placements: Any, position: Position, *, shape: tuple[int, ...]) -> Placed:
    """``placements`` as the pickle has them; any error: they cannot be read."""
    cuts = tuple(_cut(one, num_dims=len(shape)) for one in placements)
    if len(cuts) != len(position.sizes):
        raise ValueError(f"{len(cuts)} placements for a mesh of {len(position.sizes)} dimensions")
    for number, cut in enumerate(cuts):
        if cut is not None and cut[1] > 1:
            rest = list(zip(position.sizes, cuts, strict=True))[number + 1 :]
            parts = prod(size for size, other in rest if other is not None and other[0] == cut[0])
            if cut[1] != parts:
                raise ValueError(f"a split factor of {cut[1]} over {parts} parts")
    return Placed(position=position, cuts=cuts, shape=shape)


def _cut(placement: Any, *, num_dims: int) -> tuple[int, int] | None:
    kind = placement.name if isinstance(placement, Thing) else type(placement).__name__
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "_StridedShard"):
        raise ValueError(f"a placement {kind}, which is not a share of the numbers")
    dim = int(placement.fields["dim"] if "dim" in placement.fields else placement.args[0])
    dim += num_dims if dim < 0 else 0
    if not 0 <= dim < num_dims:
        raise ValueError(f"a cut along dimension {dim} of {num_dims}")
    return dim, int(placement.fields.get("split_factor") or 1)


def position_of(mesh: Mapping[str, Any], *, rank: int, numbers: Callable[[View], list[int]]) -> Position:
    """Where ``rank`` stands in the mesh with these fields. ``numbers`` reads a small tensor; any error: the mesh cannot be read."""
    ranks = mesh.get("mesh", mesh.get("_rank_map", mesh.get("_flatten_rank_map")))
    if view := view_of(ranks):
        ranks = numbers(view)
    if view and "mesh" in mesh:  # torch before 2.10: a tensor of ranks, and no layout
        strides = [prod(view.shape[dim + 1 :]) for dim in range(len(view.shape))]
        axes = [((size, stride),) for size, stride in zip(view.shape, strides, strict=True)]
    else:
        layout = mesh["_layout"].fields
        if "axes" in layout:
            axes = [_pairs(axis.fields["shape"], axis.fields["stride"]) for axis in layout["axes"]]
        elif isinstance(layout["shape"], int):
            axes = [_pairs(layout["shape"], layout["stride"])]
        else:
            axes = [_pairs(*one) for one in zip(layout["shape"], layout["stride"], strict=True)]
    if rank not in ranks:
        raise ValueError(f"a mesh without rank {rank}")
    index = ranks.index(rank)
    coordinates = []
    for axis in axes:
        at = 0
        for size, stride in axis:  # several where dimensions were flattened into one
            at = at * size + ((index // stride) % size if size > 1 else 0)
        coordinates.append(at)
    return Position(sizes=tuple(prod(size for size, _ in axis) for axis in axes), coordinates=tuple(coordinates))


def _pairs(shape: Any, stride: Any, *, depth: int = 0) -> tuple[tuple[int, int], ...]:
    if isinstance(shape, int):
        if shape < 1 or not isinstance(stride, int) or stride < 1:
            raise ValueError(f"a mesh of {shape} processes")
        return ((shape, stride),)
    if depth == 3 or len(shape) > 16:  # a mesh has a few, and a pickle can hold tuples in tuples without an end
        raise ValueError("a mesh with more dimensions than there are")
    return tuple(pair for a, b in zip(shape, stride, strict=True) for pair in _pairs(a, b, depth=depth + 1))
