"""The rewards of a run, to await."""

from __future__ import annotations

import asyncio
import time

from rollcall.loop.aside import in_thread
from rollcall.observe.calls import BusySpans
from rollcall.observe.live import REWARDS
from rollcall.reward.scorer import Scorer
from rollcall.types import Completion, Prompt, Score

LOOK_S = 0.002  # between two looks at the reward processes


class Rewards:
    """One task looks at the scorers while any of them has something to score. ``is_remote``: reward models are in other processes, so asking
    them only waits. ``spans`` is told when reward functions are busy."""

    def __init__(self, *, is_remote: bool = False, spans: BusySpans | None = None) -> None:
        self._is_remote = is_remote
        self._spans = spans or BusySpans(REWARDS)
        self._waiting: dict[tuple[Scorer, int], asyncio.Future[tuple[Score, ...]]] = {}
        self._num_asked = 0
        self._one_asks = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._seconds, self._since = 0.0, 0.0

    async def score(self, scorer: Scorer, prompt: Prompt, completions: tuple[Completion, ...]) -> tuple[Score, ...]:
        if self._is_remote and scorer.asks_models:
            async with self._one_asks:  # only one thread at a time may use a scorer
                return await in_thread(scorer.score, prompt, completions)
        loop = asyncio.get_running_loop()
        key = self._num_asked = self._num_asked + 1
        done: asyncio.Future[tuple[Score, ...]] = loop.create_future()
        if not self._waiting:
            self._since = time.perf_counter()
        self._waiting[scorer, key] = done
        self._spans.note(True)
        try:
            scorer.submit(key, prompt, completions)
        except BaseException:
            del self._waiting[scorer, key]
            raise
        if self._looking is None or self._looking.done():
            self._looking = loop.create_task(self._look())
        return await done

    def take_seconds(self) -> float:
        """How long something was scored since this was last asked."""
        now = time.perf_counter()
        seconds = self._seconds + (now - self._since if self._waiting else 0.0)
        self._seconds, self._since = 0.0, now
        return seconds

    async def _look(self) -> None:
        try:
            while self._waiting:
                for scorer in {scorer for scorer, _ in self._waiting}:
                    for key, scores in scorer.poll():
                        done = self._waiting.pop((scorer, key))
                        if not done.cancelled():
                            done.set_result(scores)
                if not self._waiting:
                    self._spans.note(False)
                    self._seconds += time.perf_counter() - self._since
                    return
                await asyncio.sleep(LOOK_S)
        except Exception as error:  # noqa: BLE001 - all who wait get it
            waiting, self._waiting = self._waiting, {}
            for done in waiting.values():
                if not done.cancelled():
                    done.set_exception(error)
