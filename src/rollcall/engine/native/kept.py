"""KV that stays between the requests of a session: which sessions have it, and of which tokens.

A session is only a cache. A request takes what its session left, as far as the tokens agree; what it takes is its own, and its
end leaves something again. So the order of leaving is the order of last use.
"""

from __future__ import annotations

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
