"""Ranks on named axes: which rows each worker gets, and which results are returned. Pure functions, which need numpy but not torch.

Rows are split as evenly as possible, in order: 10 rows become 3, 3, 2 and 2 rows for 4 workers. With fewer rows than workers, the last
workers get an empty part. They are still called because every worker has to take part in a collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

SETUP = "setup"  # in run_rank_0_only_axes: call only rank 0

# What a worker leaves out of its answer: nothing, some fields, or (None) everything.
Drop = tuple[str, ...] | None


class NamedSharding:
    """An array of ranks with a name for each of its axes.

    >>> sharding = NamedSharding([[0, 1], [2, 3]], names=["batch", "model"])
    >>> sharding.shape
    {'batch': 2, 'model': 2}
    >>> sharding.get_worker_coords(2)
    {'batch': 1, 'model': 0}
    """

    def __init__(self, layout: ArrayLike, *, names: Sequence[str]) -> None:
        ranks = np.asarray(layout)
        if ranks.dtype.kind not in "iu":
            raise ValueError(f"a layout contains ranks, which are integers; got {ranks.dtype} in {layout!r}")
        if ranks.ndim != len(names) or len(set(names)) < len(names):
            raise ValueError(
                f"the layout has {ranks.ndim} axes, but the names are {list(names)}; give each axis one unique name"
            )
        if ranks.size == 0:
            raise ValueError(f"a layout needs at least one rank; its shape is {ranks.shape}")
        values, counts = np.unique(ranks, return_counts=True)
        if counts.max() > 1:
            raise ValueError(
                f"rank {values[counts > 1][0]} is in the layout {counts.max()} times; each rank must appear once"
            )
        self._layout: NDArray[np.int64] = ranks.astype(np.int64)
        self._names = tuple(names)
        # Computed once, because it is used for every rank of every call.
        self._coords = {int(rank): place for place, rank in np.ndenumerate(self._layout)}
        self._ranks = sorted(self._coords)

    @classmethod
    def default(cls, num_workers: int) -> NamedSharding:
        """Put all workers on the axis ``batch``; the axis ``model`` has size 1."""
        return cls(np.arange(num_workers).reshape(num_workers, 1), names=["batch", "model"])

    @property
    def names(self) -> list[str]:
        return list(self._names)

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(self._names, self._layout.shape, strict=True))

    @property
    def ranks(self) -> list[int]:
        """All ranks in ascending order."""
        return list(self._ranks)

    def get_axis_size(self, name: str) -> int:
        self.check_axes([name])
        return self.shape[name]

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Return a rank's position on each axis."""
        if (place := self._coords.get(worker_id)) is None:
            raise ValueError(
                f"rank {worker_id} is not in the layout; its ranks are {self.ranks[0]} to {self.ranks[-1]}"
            )
        return dict(zip(self._names, place, strict=True))

    def shard_index(self, rank: int, axes: Sequence[str]) -> int:
        """Return the index of the shard that a rank gets when data is split over ``axes``; the first axis is the outermost."""
        coords, shape = self.get_worker_coords(rank), self.shape
        index = 0
        for axis in axes:
            index = index * shape[axis] + coords[axis]
        return index

    def num_shards(self, axes: Iterable[str]) -> int:
        return math.prod(self.shape[axis] for axis in axes)

    def check_axes(self, names: Iterable[str], *, argument: str = "axis", also: Sequence[str] = ()) -> None:
        """Refuse a name that is neither an axis nor one of ``also``."""
        for name in names:
            if name not in self._names and name not in also:
                raise ValueError(f"{argument}: {name!r} is not one of {', '.join(map(repr, [*self._names, *also]))}")

    def __repr__(self) -> str:
        return f"NamedSharding(shape={self.shape}, layout={self._layout.tolist()})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One worker's part in a sharded call."""

    rank: int
    shard: int
    drop: Drop


def routes(
    sharding: NamedSharding,
    *,
    in_sharded_axes: tuple[str, ...],
    replicate_on_axes: tuple[str, ...],
    output_is_replicated: tuple[str, ...],
) -> tuple[Route, ...]:
    """Return the workers to call, by rank. On an axis that is in neither list of input axes, only the first worker is called."""
    sharding.check_axes(in_sharded_axes, argument="in_sharded_axes")
    sharding.check_axes(replicate_on_axes, argument="replicate_on_axes")
    if both := [axis for axis in in_sharded_axes if axis in replicate_on_axes]:
        raise ValueError(
            f"axis {both[0]!r} is in in_sharded_axes and in replicate_on_axes; name it in only one of them"
        )
    free = [axis for axis in sharding.names if axis not in in_sharded_axes and axis not in replicate_on_axes]
    silent = [name for name in output_is_replicated if name in sharding.names]
    result_fields = tuple(name for name in output_is_replicated if name not in sharding.names)
    found: list[Route] = []
    for rank in sharding.ranks:
        coords = sharding.get_worker_coords(rank)
        if any(coords[axis] for axis in free):
            continue
        first = all(route.drop is None for route in found)
        drop = None if any(coords[axis] for axis in silent) else () if first else result_fields
        found.append(Route(rank=rank, shard=sharding.shard_index(rank, in_sharded_axes), drop=drop))
    return tuple(found)


def leaders(sharding: NamedSharding, rank_0_only_axes: Sequence[str]) -> list[int]:
    """Return the ranks to call if only the first rank along these axes is called."""
    sharding.check_axes(rank_0_only_axes, argument="run_rank_0_only_axes", also=[SETUP])
    if SETUP in rank_0_only_axes and SETUP not in sharding.names:
        return sharding.ranks[:1]
    return [
        rank for rank in sharding.ranks if not any(sharding.get_worker_coords(rank)[axis] for axis in rank_0_only_axes)
    ]


def trim(result: Any, drop: Drop) -> Any:
    """Return a worker's answer without the fields that the caller does not want."""
    if drop is None:
        return None
    if not drop or not isinstance(result, Mapping):
        return result
    return {name: value for name, value in result.items() if name not in drop}


def check_fields(first: Any, names: Sequence[str], *, axes: Sequence[str]) -> None:
    """Refuse a name in ``output_is_replicated`` that is not a field of the first worker's result."""
    given = list(first) if isinstance(first, Mapping) else None
    for name in names:
        if given is None or name not in given:
            has = f"a {type(first).__name__} without fields" if given is None else ", ".join(map(str, given))
            raise ValueError(
                f"output_is_replicated: {name!r} is neither an axis ({', '.join(axes)}) nor a field of the result ({has})"
            )


def split_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, num_parts: int
) -> list[tuple[list[Any], dict[str, Any]]]:
    """Split each argument into ``num_parts`` parts. All arguments must have the same number of rows, so that rows stay together."""
    named = {f"argument {number}": value for number, value in enumerate(args)} | dict(kwargs)
    rows = {name: num_rows(value, name=name) for name, value in named.items()}
    if len(set(rows.values())) > 1:
        sizes = ", ".join(f"{name} has {count}" for name, count in rows.items())
        raise ValueError(f"arguments of different lengths cannot be split together: {sizes} rows; use common_kwargs for "
                         "an argument that every worker should get unsplit")  # fmt: skip
    parts = {name: split_rows(value, num_parts=num_parts) for name, value in named.items()}
    positional = [parts[f"argument {number}"] for number in range(len(args))]
    return [
        ([part[index] for part in positional], {name: parts[name][index] for name in kwargs})
        for index in range(num_parts)
    ]


def num_rows(value: Any, *, name: str) -> int:
    """Count the rows along the first dimension."""
    if isinstance(value, Mapping):
        rows = {key: num_rows(item, name=f"{name}[{key!r}]") for key, item in value.items()}
        if len(set(rows.values())) > 1:
            sizes = ", ".join(f"{key!r}: {count}" for key, count in rows.items())
            raise ValueError(f"the fields of {name} have different numbers of rows ({sizes})")
        return next(iter(rows.values()), 0)
    if isinstance(value, str | bytes) or not hasattr(value, "__getitem__") or getattr(value, "shape", None) == ():
        raise ValueError(
            f"{name} is a {type(value).__name__} and cannot be split into rows; give a sequence, an array, a tensor or a dict "
            "of these, or pass it in common_kwargs to give it to every worker"
        )
    return len(value)


def split_rows(value: Any, *, num_parts: int) -> list[Any]:
    """Split into consecutive parts whose sizes differ by at most one.

    >>> split_rows([1, 2, 3, 4, 5], num_parts=3)
    [[1, 2], [3, 4], [5]]
    """
    if isinstance(value, Mapping):
        parts = {key: split_rows(item, num_parts=num_parts) for key, item in value.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(num_parts)]
    small, more = divmod(len(value), num_parts)
    edges = [index * small + min(index, more) for index in range(num_parts + 1)]
    return [_rows(value, start, end) for start, end in zip(edges, edges[1:], strict=False)]


def _rows(value: Any, start: int, end: int) -> Any:
    if start == 0 and end == len(value):
        return value
    try:
        part = value[start:end]
    except TypeError:  # a sequence that cannot be sliced, such as a deque
        return [value[index] for index in range(start, end)]
    # Pickling a view of a tensor would write the whole tensor.
    return part.clone() if hasattr(part, "untyped_storage") else part
