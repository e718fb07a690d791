"""Ranks laid out on named axes: who shares a shard with whom. Pure: numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


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
            raise ValueError(f"a layout holds ranks, which are whole numbers; got {ranks.dtype} in {layout!r}")
        if ranks.ndim != len(names) or len(set(names)) < len(names):
            raise ValueError(f"the layout has {ranks.ndim} axes and the names {list(names)}; name each axis once")
        if ranks.size == 0:
            raise ValueError(f"a layout needs at least one rank; its shape is {ranks.shape}")
        if len(np.unique(ranks)) < ranks.size:
            values, counts = np.unique(ranks, return_counts=True)
            raise ValueError(
                f"rank {values[counts > 1][0]} is in the layout {counts.max()} times; each rank has one place"
            )
        self._layout: NDArray[np.int64] = ranks.astype(np.int64)
        self._names = tuple(names)
        # Looked up for every rank of every call.
        self._coords = {int(rank): place for place, rank in np.ndenumerate(self._layout)}
        self._ranks = sorted(self._coords)

    @classmethod
    def default(cls, num_workers: int) -> NamedSharding:
        """Put all workers on ``batch``, and one on ``model``."""
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
        place = self._coords.get(worker_id)
        if place is None:
            raise ValueError(
                f"rank {worker_id} is not in the layout; its ranks are {self.ranks[0]} to {self.ranks[-1]}"
            )
        return dict(zip(self._names, place, strict=True))

    def shard_index(self, rank: int, axes: Sequence[str]) -> int:
        """Return which shard a rank gets when data is split over ``axes``, the first of them outermost."""
        coords, shape = self.get_worker_coords(rank), self.shape
        index = 0
        for axis in axes:
            index = index * shape[axis] + coords[axis]
        return index

    def num_shards(self, axes: Iterable[str]) -> int:
        shape = self.shape
        return int(np.prod([shape[axis] for axis in axes], dtype=np.int64))

    def check_axes(self, names: Iterable[str], *, argument: str = "axis", also: Sequence[str] = ()) -> None:
        """Refuse a name that is neither an axis nor one of ``also``."""
        for name in names:
            if name not in self._names and name not in also:
                raise ValueError(f"{argument}: {name!r} is not one of {', '.join(map(repr, [*self._names, *also]))}")

    def __repr__(self) -> str:
        return f"NamedSharding(shape={self.shape}, layout={self._layout.tolist()})"
