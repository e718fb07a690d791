"""Engine and rewards as awaitables.

``attempt`` submits one prompt and waits for its scored completions. One pump drives everything that is under way: it
polls the engine, hands finished completions to the rewards, polls those, and wakes whoever waits. With nothing under
way it sleeps until the next ``attempt``.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field

from rollcall.engine.protocol import Engine, Request, Sampling
from rollcall.reward.scorer import Scorer
from rollcall.types import Completion, Prompt, Score

REWARD_WAIT_S = 0.02  # one look at the reward workers when the engine has nothing to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]
    started_s: float
    finished_s: float


@dataclass(slots=True)
class Clock:
    """Where the pump's time went since it was last read."""

    engine_s: float = 0.0
    reward_s: float = 0.0
    engine_tokens: int = 0

    def take(self) -> Clock:
        taken = Clock(self.engine_s, self.reward_s, self.engine_tokens)
        self.engine_s, self.reward_s, self.engine_tokens = 0.0, 0.0, 0
        return taken


@dataclass(slots=True)
class _Waiting:
    prompt: Prompt
    scorer: Scorer
    started_s: float
    done: asyncio.Future[Attempt]
    completions: tuple[Completion, ...] = field(default=())


class Rollouts:
    def __init__(self, engine: Engine):
        self.engine = engine
        self.clock = Clock()
        self._waiting: dict[int, _Waiting] = {}
        self._scorers: list[Scorer] = []
        self._work = asyncio.Event()
        self._num_attempts = 0

    async def attempt(self, prompt: Prompt, *, seeds: tuple[int, ...], sampling: Sampling, scorer: Scorer) -> Attempt:
        key, self._num_attempts = self._num_attempts, self._num_attempts + 1
        done: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()
        self._waiting[key] = _Waiting(prompt, scorer, time.time(), done)
        if scorer not in self._scorers:
            self._scorers.append(scorer)
        try:
            self.engine.submit(Request(id=str(key), prompt_ids=prompt.token_ids, seeds=seeds, sampling=sampling))
        except ValueError:
            del self._waiting[key]
            raise
        self._work.set()
        return await done

    async def pump(self) -> None:
        """Runs beside whoever attempts, until cancelled."""
        while True:
            await self._work.wait()
            self._poll_engine()
            self._poll_rewards()
            if not self._waiting:
                self._work.clear()
            await asyncio.sleep(0)

    def _poll_engine(self) -> None:
        started = time.perf_counter()
        finished = self.engine.poll() if self.engine.num_unfinished else []
        self.clock.engine_s += time.perf_counter() - started
        for result in finished:
            key = int(result.request_id)
            waiting = self._waiting[key]
            waiting.completions = result.completions
            self.clock.engine_tokens += sum(len(completion.token_ids) for completion in result.completions)
            waiting.scorer.submit(key, waiting.prompt, result.completions)

    def _poll_rewards(self) -> None:
        started = time.perf_counter()
        for scorer in self._scorers:
            wait_s = 0.0 if self.engine.num_unfinished or not scorer.num_unfinished else REWARD_WAIT_S
            for key, scores in scorer.poll(wait_s):
                waiting = self._waiting.pop(key)
                if not waiting.done.cancelled():
                    waiting.done.set_result(
                        Attempt(
                            completions=waiting.completions,
                            scores=scores,
                            started_s=waiting.started_s,
                            finished_s=time.time(),
                        )
                    )
        self.clock.reward_s += time.perf_counter() - started


def sampling_seeds(run_seed: int, step: int, prompt_id: str, count: int) -> tuple[int, ...]:
    """The seeds of a group's attempts: a function of (run seed, step, prompt, attempt) and nothing else."""
    seeds: list[int] = []
    for attempt in range(count):
        digest = hashlib.blake2b(f"{run_seed}/{step}/{prompt_id}/{attempt}".encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "little", signed=True))
    return tuple(seeds)
