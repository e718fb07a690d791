"""The rewards of a run, as its groups await them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rollcall.loop.aside import in_thread
from rollcall.observe.calls import BusySpans
from rollcall.observe.live import REWARDS
from rollcall.reward.scorer import Scorer
from rollcall.types import Completion, Prompt, Score


class Rewards:
    """``is_remote``: reward models are in other processes, so asking them only waits. ``spans`` is told when reward functions are busy."""

    def __init__(self, *, is_remote: bool = False, spans: BusySpans | None = None) -> None:
        self._ask_model = self._ask if is_remote else None
        self._spans = spans or BusySpans(REWARDS)
        self._num_scored = self._num_generated = 0  # groups at this moment
        self._one_asks = asyncio.Lock()
        self._seconds, self._since = 0.0, time.perf_counter()

    async def score(self, scorer: Scorer, prompt: Prompt, completions: tuple[Completion, ...]) -> tuple[Score, ...]:
        self._count(scored=1)
        try:
            return await scorer.score(prompt, completions, ask_model=self._ask_model)
        finally:
            self._count(scored=-1)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A group is generated while the block runs."""
        self._count(generated=1)
        try:
            yield
        finally:
            self._count(generated=-1)

    def take_seconds(self) -> float:
        """How long groups were scored while none was generated, since this was last asked."""
        self._count()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _count(self, *, scored: int = 0, generated: int = 0) -> None:
        now = time.perf_counter()
        if self._num_scored and not self._num_generated:
            self._seconds += now - self._since
        self._since = now
        self._num_scored += scored
        self._num_generated += generated
        self._spans.note(bool(self._num_scored))

    async def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Ask a model in another process, for one group at a time."""
        async with self._one_asks:
            return await in_thread(function, *args)
