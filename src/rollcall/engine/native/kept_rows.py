"""KV of sessions outside a CPU's dense rows.

Rows that end together are copied together: a bundle has them side by side, in the columns that they had. So leaving and
coming back are one copy of a layer for many rows. A bundle that has lost half of its rows is copied to its size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from rollcall.engine.native.kept import Kept, KeptSessions
from rollcall.engine.native.runner import Sequence
from rollcall.types import Ints


class Plane(NamedTuple):
    """Keys or values of one layer, as they lie in memory: [rows, Hkv, D and columns]."""

    tensor: Tensor
    dim: int  # of the columns

    def columns(self, start: int, end: int) -> Tensor:
        return self.tensor.narrow(self.dim, start, end - start)


@dataclass(slots=True, kw_only=True, eq=False)
class Bundle:
    planes: list[Plane]
    num_columns: int
    rows: set[KeptRow] = field(default_factory=set)

    @property
    def num_rows(self) -> int:
        return len(self.planes[0].tensor)


@dataclass(slots=True, kw_only=True, eq=False)
class KeptRow:
    bundle: Bundle
    index: int  # its row
    start: int  # its first column

    @property
    def num_tokens(self) -> int:
        """What it takes of memory."""
        return self.bundle.num_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A row whose KV is kept."""

    session: str
    order: int  # of its sequence
    ids: Ints  # the tokens that are kept
    row: int
    past: int  # columns from its first to the end of all rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Returning:
    """Kept KV that a row begins with."""

    kept: Kept[KeptRow]
    num_tokens: int  # of it
    row: int
    column: int  # where its first token goes


class KeptRows:
    def __init__(self) -> None:
        self._sessions: KeptSessions[KeptRow] = KeptSessions()
        self.num_tokens = 0  # the memory that it takes, as tokens of KV

    @property
    def longest(self) -> int:
        """Columns of the longest row."""
        return max((kept.kv.num_tokens for kept in self._sessions), default=0)

    def put(self, rows: list[Leaving], planes: list[Plane], *, end: int) -> None:
        """Copy these rows, which all end at the column ``end``."""
        width = max(row.past for row in rows)
        which = places([row.row for row in rows])
        copies = [Plane(_copied(plane.columns(end - width, end), which), plane.dim) for plane in planes]
        bundle = Bundle(planes=copies, num_columns=width)
        for index, row in enumerate(rows):
            kv = KeptRow(bundle=bundle, index=index, start=width - row.past)
            bundle.rows.add(kv)
            self._add(Kept(session=row.session, order=row.order, ids=row.ids, kv=kv))

    def _add(self, kept: Kept[KeptRow]) -> None:
        self.num_tokens += kept.kv.num_tokens
        self._leave(self._sessions.put(kept))

    def began(self, session: str | None) -> int | None:
        return self._sessions.began(session)

    def take(self, sequence: Sequence) -> tuple[Kept[KeptRow], int] | None:
        """What the sequence's session left, and how many tokens of it serve; it no longer counts here."""
        kept = self._sessions.take(sequence.request.session)
        if kept is None:
            return None
        num_tokens = kept.num_shared(sequence)
        if not num_tokens:
            self._leave(kept)
            return None
        self.num_tokens -= kept.kv.num_tokens
        return kept, num_tokens

    def put_back(self, kept: Kept[KeptRow]) -> None:
        self._add(kept)

    def restore(self, returning: list[Returning], planes: list[Plane]) -> None:
        """Copy what was taken into rows, and forget it here. What is copied beside it is hidden by masks, or overwritten."""

        def alike(one: Returning) -> tuple[int, int]:
            return id(one.kept.kv.bundle), one.column - one.kept.kv.start

        for (_, shift), group in groupby(sorted(returning, key=alike), key=alike):
            members = list(group)
            bundle = members[0].kept.kv.bundle
            start = min(one.kept.kv.start for one in members)
            end = max(one.kept.kv.start + one.num_tokens for one in members)
            rows, indices = places([one.row for one in members]), places([one.kept.kv.index for one in members])
            for plane, kept in zip(planes, bundle.planes, strict=True):
                plane.columns(start + shift, end + shift)[rows] = kept.columns(start, end)[indices]
        for one in returning:
            self._release(one.kept.kv)

    def forget(self, session: str) -> None:
        self._leave(self._sessions.take(session))

    def forget_oldest(self) -> bool:
        oldest = self._sessions.take_oldest()
        self._leave(oldest)
        return oldest is not None

    def forget_all(self) -> None:
        self._sessions.take_all()
        self.num_tokens = 0

    def _leave(self, kept: Kept[KeptRow] | None) -> None:
        if kept is not None:
            self.num_tokens -= kept.kv.num_tokens
            self._release(kept.kv)

    def _release(self, row: KeptRow) -> None:
        bundle = row.bundle
        bundle.rows.remove(row)
        if bundle.rows and 2 * len(bundle.rows) < bundle.num_rows:
            _shrink(bundle)


def _shrink(bundle: Bundle) -> None:
    rows = list(bundle.rows)
    which = torch.tensor([row.index for row in rows])
    bundle.planes = [Plane(plane.tensor[which], plane.dim) for plane in bundle.planes]
    for index, row in enumerate(rows):
        row.index = index


def _copied(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    return (
        tensor[rows].contiguous()
        if isinstance(rows, Tensor)
        else tensor[rows].clone(memory_format=torch.contiguous_format)
    )


def places(rows: list[int]) -> slice | Tensor:
    """A slice where it can be one: it is read without a copy."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)
