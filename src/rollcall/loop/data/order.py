"""Which prompt the n-th draw of a run is: a pure function, so the cursor of a run is one integer."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rollcall.base.types import Longs


class DataOrder:
    """Each epoch visits every prompt exactly once, in an order that depends only on the seed and the epoch."""

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool) -> None:
        self.num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._permutation = lru_cache(2)(self._permute)  # draws of a run that looks ahead straddle the end of an epoch

    def index(self, draw: int) -> int:
        """The prompt of this draw, counted from 0 over the whole run."""
        epoch, position = divmod(draw, self.num_prompts)
        return int(self._permutation(epoch)[position]) if self._shuffle else position

    def _permute(self, epoch: int) -> Longs:
        # Sorting raw draws: numpy promises that a bit generator's stream never changes, and does not promise it of
        # `Generator.permutation`; a run may resume under another numpy.
        draws = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self.num_prompts)
        return np.argsort(draws, kind="stable")
