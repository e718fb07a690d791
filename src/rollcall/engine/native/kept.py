"""The KV that is kept between the requests of a session, and the tokens that it belongs to.

A session is only a cache. A new request takes over the KV that the previous request of its session left behind, up to the first token
that differs. When the request ends, its own KV is kept for the next one. As a result, sessions are sorted by when they were last used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from rollcall.base.types import Ints
from rollcall.engine.sequence import Sequence

KV = TypeVar("KV")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Generic[KV]):
    session: str
    ids: Ints  # the tokens whose KV this is
    kv: KV

    def num_shared(self, sequence: Sequence) -> int:
        """Return how many of the sequence's tokens can use this KV: the tokens up to the first difference, but never the last token (it
        is the next input)."""
        ids = sequence.all_ids()[:-1]
        length = min(len(ids), len(self.ids))
        different = np.flatnonzero(ids[:length] != self.ids[:length])
        return int(different[0]) if len(different) else length


class KeptSessions(Generic[KV]):
    """The kept KV by session, oldest first."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept[KV]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept[KV]]:
        return iter(self._kept.values())

    def put(self, kept: Kept[KV]) -> Kept[KV] | None:
        """Add this KV as the newest. Return the KV that was previously kept for this session, if any."""
        before = self._kept.pop(kept.session, None)
        self._kept[kept.session] = kept
        return before

    def take(self, session: str | None) -> Kept[KV] | None:
        return None if session is None else self._kept.pop(session, None)

    def take_oldest(self) -> Kept[KV] | None:
        return self._kept.pop(next(iter(self._kept))) if self._kept else None

    def take_all(self) -> list[Kept[KV]]:
        taken, self._kept = list(self._kept.values()), {}
        return taken
