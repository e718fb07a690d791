"""Maps the n-th draw of a run to a prompt. The prompt depends only on n and the settings, so a resumed run only needs to know which draws
come next."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rollcall.base.types import Longs


def prompt_index(draw: int, *, num_prompts: int, seed: int, shuffle: bool) -> int:
    """Return the prompt index for this draw. Draws are counted from 0 over the whole run. Each epoch visits every prompt exactly once, in
    an order that depends only on the seed and the epoch."""
    epoch, position = divmod(draw, num_prompts)
    return int(_permutation(num_prompts, seed, epoch)[position]) if shuffle else position


@lru_cache(2)  # a run that samples ahead can straddle two epochs
def _permutation(num_prompts: int, seed: int, epoch: int) -> Longs:
    # Sort raw draws, because numpy guarantees the stream of a bit generator but not the result of `Generator.permutation`, and a run may
    # resume under a different numpy version.
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_prompts)
    return np.argsort(draws, kind="stable")
