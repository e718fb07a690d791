"""The scores of groups, to await, and the time in which any were waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from rollcall.loop.aside import in_thread
from rollcall.observe.calls import BusySpans
from rollcall.observe.live import REWARDS
from rollcall.reward.scorer import Scorer
from rollcall.types import Completion, Prompt, Score


class Rewards:
    """``is_remote``: reward models are in other processes, so asking them only waits. ``spans`` is told when something is scored."""

    def __init__(self, *, is_remote: bool = False, spans: BusySpans | None = None) -> None:
        self._ask_model = self._ask_elsewhere if is_remote else None
        self._spans = spans or BusySpans(REWARDS)
        self._num_waiting = 0
        self._one_asks = asyncio.Lock()
        self._seconds, self._since = 0.0, 0.0

    async def score(self, scorer: Scorer, prompt: Prompt, completions: tuple[Completion, ...]) -> tuple[Score, ...]:
        if not self._num_waiting:
            self._since = time.perf_counter()
        self._num_waiting += 1
        self._spans.note(True)
        try:
            return await scorer.score(prompt, completions, ask_model=self._ask_model)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._spans.note(False)
                self._seconds += time.perf_counter() - self._since

    def take_seconds(self) -> float:
        """How long something was scored since this was last asked."""
        now = time.perf_counter()
        seconds = self._seconds + (now - self._since if self._num_waiting else 0.0)
        self._seconds, self._since = 0.0, now
        return seconds

    async def _ask_elsewhere(self, function: Callable[..., Any], *args: Any) -> Any:
        """Ask a model in another process, for one group at a time."""
        async with self._one_asks:
            return await in_thread(function, *args)
