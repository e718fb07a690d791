"""Maps the n-th draw of a run to a prompt. The prompt depends only on n and the settings, so a resumed run only needs to know which draws
come next."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rollcall.base.types import Longs


class DataOrder:
    """Visits every prompt exactly once per epoch, in an order that depends only on the seed and the epoch."""

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool) -> None:
        self.num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._permutation = lru_cache(2)(self._permute)  # a run that samples ahead can straddle two epochs

    def index(self, draw: int) -> int:
        """Return the prompt index for this draw. Draws are counted from 0 over the whole run."""
        epoch, position = divmod(draw, self.num_prompts)
        return int(self._permutation(epoch)[position]) if self._shuffle else position

    def _permute(self, epoch: int) -> Longs:
        # Sort raw draws, because numpy guarantees the stream of a bit generator but not the result of `Generator.permutation`, and a
        # run may resume under a different numpy version.
        draws = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self.num_prompts)
        return np.argsort(draws, kind="stable")
