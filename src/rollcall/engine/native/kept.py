"""KV that stays between the requests of a session: which sessions have it, and of which tokens.

A session is only a cache. A request takes what its session left, as far as the tokens agree; what it takes is its own, and its
end leaves something again. So the order of leaving is the order of last use.
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
    ids: Ints  # the tokens that the KV is of
    kv: KV

    def num_shared(self, sequence: Sequence) -> int:
        """How many tokens of the sequence this KV serves: those that agree, and not its last, which is fed next."""
        ids = sequence.all_ids()[:-1]
        length = min(len(ids), len(self.ids))
        different = np.flatnonzero(ids[:length] != self.ids[:length])
        return int(different[0]) if len(different) else length


class KeptSessions(Generic[KV]):
    """Oldest first."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept[KV]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept[KV]]:
        return iter(self._kept.values())

    def put(self, kept: Kept[KV]) -> Kept[KV] | None:
        """The newest; returns what the session had before."""
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
