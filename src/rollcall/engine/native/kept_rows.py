"""Session KV that the CPU runner keeps outside its dense rows.

Rows that end together are copied together into a bundle, which stores them side by side, in the same columns as before. So saving and
restoring many rows takes one copy per layer. If all rows end together, as with fast environments, the bundle takes over their memory. If
all of them are resumed together, the bundle's memory becomes the rows again. A row that is taken out of its bundle leaves a hole, which
still takes up memory. When memory is short, bundles with many holes are copied without the holes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from rollcall.base.types import Ints
from rollcall.engine.native.runner import Kept, Sequence


class Plane(NamedTuple):
    """One layer's keys or values in memory order: [rows, Hkv, then D and columns in either order]."""

    tensor: Tensor
    dim: int  # the dimension of the columns

    def columns(self, start: int, end: int) -> Tensor:
        return self.tensor.narrow(self.dim, start, end - start)


@dataclass(slots=True, kw_only=True, eq=False)
class Bundle:
    planes: list[Plane]
    num_columns: int
    rows: set[KeptRow] = field(default_factory=set)
    num_taken: int = 0  # rows that are about to be copied back

    @property
    def num_rows(self) -> int:
        return len(self.planes[0].tensor)

    @property
    def num_holes(self) -> int:
        return self.num_rows - len(self.rows)

    @property
    def num_tokens(self) -> int:
        """The bundle's memory, in tokens of KV. Taken rows are not included, because they are counted where they are copied to."""
        return self.num_columns * (self.num_rows - self.num_taken)


@dataclass(slots=True, kw_only=True, eq=False)
class KeptRow:
    bundle: Bundle
    index: int  # the row in the bundle
    start: int  # the row's first column


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A row whose KV is kept."""

    session: str
    ids: Ints  # the tokens whose KV is kept
    row: int
    past: int  # number of columns from the row's first column to the column where all rows end


@dataclass(frozen=True, slots=True, kw_only=True)
class Returning:
    """Kept KV that becomes the beginning of a row."""

    kept: Kept[KeptRow]
    num_tokens: int  # tokens of the kept KV that are used
    row: int
    column: int  # the column of the first token


class KeptRows:
    """The kept rows of all sessions. The counts are updated on each change, because every turn reads them and there may be many
    sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str | None, Kept[KeptRow]] = {}  # least recently used first
        self._holed: dict[Bundle, None] = {}  # bundles with many holes, oldest first
        self.num_tokens = 0  # memory in use, in tokens of KV
        self.longest = 0  # number of columns of the longest row kept since this was last empty

    def put(self, rows: list[Leaving], planes: list[Plane], *, end: int) -> None:
        """Keep copies of these rows, which all end at column ``end``."""
        width = max(row.past for row in rows)
        which = places([row.row for row in rows])
        copies = [Plane(_copied(plane.columns(end - width, end), which), plane.dim) for plane in planes]
        self._put(rows, Bundle(planes=copies, num_columns=width), indices=range(len(rows)), end=width)

    def put_all(self, rows: list[Leaving], planes: list[Plane], *, end: int) -> None:
        """Like ``put``, but for all rows at once: take over their memory without a copy."""
        bundle = Bundle(planes=planes, num_columns=planes[0].tensor.shape[planes[0].dim])
        self._put(rows, bundle, indices=[row.row for row in rows], end=end)

    def _put(self, rows: list[Leaving], bundle: Bundle, *, indices: Iterable[int], end: int) -> None:
        self.num_tokens += bundle.num_tokens
        self.longest = max(self.longest, max(row.past for row in rows))
        for index, row in zip(indices, rows, strict=True):
            kv = KeptRow(bundle=bundle, index=index, start=end - row.past)
            bundle.rows.add(kv)
            self._add(Kept(session=row.session, ids=row.ids, kv=kv))

    def _add(self, kept: Kept[KeptRow]) -> None:
        self.forget(kept.session)
        self._sessions[kept.session] = kept

    def take(self, sequence: Sequence) -> tuple[Kept[KeptRow], int] | None:
        """Take out the KV of the sequence's session, so that it no longer counts as kept. Return it with the number of its tokens that
        can be used. The caller must then call ``restore`` or ``put_back``."""
        kept = self._sessions.pop(sequence.request.session, None)
        if kept is None:
            return None
        num_tokens = kept.num_shared(sequence)
        if not num_tokens:
            self._release(kept.kv)
            return None
        self._take_out(kept.kv, 1)
        return kept, num_tokens

    def put_back(self, kept: Kept[KeptRow]) -> None:
        self._take_out(kept.kv, -1)
        self._add(kept)

    @torch.inference_mode()
    def restore(self, returning: list[Returning], planes: list[Plane], *, home: Bundle | None = None) -> None:
        """Copy the taken KV into rows and drop it from the bundles. Other columns that are copied with it are masked or overwritten.
        ``home`` is the bundle that these planes were taken over from, if there is one."""

        def alike(one: Returning) -> tuple[int, int]:
            return id(one.kept.kv.bundle), one.column - one.kept.kv.start

        for (_, shift), group in groupby(sorted(returning, key=alike), key=alike):
            members = list(group)
            bundle = members[0].kept.kv.bundle
            if bundle is home and not shift:
                continue  # they are already in place
            start = min(one.kept.kv.start for one in members)
            end = max(one.kept.kv.start + one.num_tokens for one in members)
            runs = side_by_side([(one.row, one.kept.kv.index) for one in members])
            for plane, kept in zip(planes, bundle.planes, strict=True):
                there, here = plane.columns(start + shift, end + shift), kept.columns(start, end)
                for row, index, count in runs:  # an indexed copy takes several times as long
                    source = here[index : index + count]
                    there[row : row + count].copy_(source.clone() if bundle is home else source)
        for one in returning:
            self._take_out(one.kept.kv, -1)
            self._release(one.kept.kv)

    def forget(self, session: str | None) -> None:
        """Drop the KV of this session, or of all sessions."""
        for name in list(self._sessions) if session is None else [session]:
            if name in self._sessions:
                self._release(self._sessions.pop(name).kv)

    def give_way(self) -> bool:
        """Free some memory: compact a bundle with many holes, or drop the oldest session. Return False if there is nothing left to
        free."""
        if self._holed:
            bundle = next(iter(self._holed))
            del self._holed[bundle]
            self.num_tokens -= bundle.num_columns * bundle.num_holes
            rows = sorted(bundle.rows, key=lambda row: row.index)
            which = places([row.index for row in rows])
            bundle.planes = [Plane(_copied(plane.tensor, which), plane.dim) for plane in bundle.planes]
            for index, row in enumerate(rows):
                row.index = index
            return True
        if not self._sessions:
            return False
        self.forget(next(iter(self._sessions)))
        return True

    def _take_out(self, row: KeptRow, count: int) -> None:
        row.bundle.num_taken += count
        self.num_tokens -= count * row.bundle.num_columns

    def _release(self, row: KeptRow) -> None:
        bundle = row.bundle
        bundle.rows.remove(row)
        if not bundle.rows:
            self._holed.pop(bundle, None)
            self.num_tokens -= bundle.num_tokens
            if not self.num_tokens:
                self.longest = 0
        elif 4 * bundle.num_holes >= bundle.num_rows:  # many holes: at least one row in four
            self._holed[bundle] = None


def bundle_of_all(rows: Mapping[int, KeptRow]) -> Bundle | None:
    """Return the bundle that contains exactly these rows, each at the same index as in the bundle, or None if there is no such bundle."""
    bundles = {id(row.bundle): row.bundle for row in rows.values()}
    if len(bundles) != 1:
        return None
    (bundle,) = bundles.values()
    in_place = all(place == row.index for place, row in rows.items())
    return bundle if in_place and len(bundle.rows) == len(rows) else None


def _copied(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    if isinstance(rows, Tensor):
        return tensor.index_select(0, rows)  # more than twice as fast as tensor[rows]
    return tensor[rows].clone(memory_format=torch.contiguous_format)


def side_by_side(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Group pairs of rows into runs in which both numbers increase by one. Each run is (first, first, length).

    >>> side_by_side([(4, 0), (5, 1), (2, 7), (6, 3)])
    [(2, 7, 1), (4, 0, 2), (6, 3, 1)]
    """
    runs: list[tuple[int, int, int]] = []
    for one, other in sorted(pairs):
        if runs and (one, other) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((one, other, 1))
    return runs


def places(rows: list[int]) -> slice | Tensor:
    """Return a slice if the rows are consecutive, because a slice is read without copying."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)
