"""Turns a prompt into a group: samples all its completions at the same time, and then scores them.

``Rollouts.group`` makes every group, in training and in evaluation. A completion is one request to the engine, or an episode with several
requests (``environments/episode.py``).
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rollcall.base.errors import ConfigError
from rollcall.base.types import Completion, Group, Ints, Prompt, Score
from rollcall.config import Config
from rollcall.config.environments import ClassEnvironment, StepEnvironment
from rollcall.engine.protocol import LOCAL, Engine, Made, Request, Sampling
from rollcall.environments.agent import AgentEnvironments, AgentPlayer
from rollcall.environments.conversation import Conversations
from rollcall.environments.episode import Player
from rollcall.environments.protocol import Environments
from rollcall.loop.tasks import all_of, in_thread
from rollcall.observe.calls import BusySpans
from rollcall.observe.live import REWARDS
from rollcall.reward.scorer import Scorer


@dataclass(slots=True, kw_only=True)
class Rollouts:
    engine: Engine
    rewards: Rewards
    player: Player | AgentPlayer | None = None  # without a player, a completion is one turn
    _numbers: Any = field(default_factory=itertools.count, init=False)  # ids for requests, groups and sessions
    _free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        if not gc.get_freeze_count():
            # Otherwise Python's garbage collector would scan all modules again and again. With torch and transformers loaded, each scan
            # takes 0.2 s and blocks everything.
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 20)  # with the default of 700, it takes a sixth of this thread's time
        self._free = asyncio.Semaphore(1 if self.player is None else self.player.section.max_running)

    async def group(
        self,
        prompt: Prompt,
        *,
        step: int,
        draw: int,
        seeds: tuple[int, ...],
        sampling: Sampling,
        scorer: Scorer,
        done: dict[int, Completion] | None = None,
    ) -> Group:
        """Make one completion for each seed. ``done`` maps indices to completions from an earlier process; new completions are added to
        it."""
        done = {} if done is None else done
        makers, started_s, name = Counter[str](), time.time(), str(next(self._numbers))
        seeds_left = {place: seed for place, seed in enumerate(seeds) if place not in done}

        def begin(place: int, seed: int) -> Awaitable[Made]:
            given: dict[str, Any] = {"seed": seed, "sampling": sampling, "order": (step, draw, place)}
            if self.player is not None:
                return self._play(prompt, **given)
            return self.engine.generate(Request(id=f"{name}/{place}", prompt_ids=prompt.token_ids, group=name, **given))

        def keep(place: int, made: Made) -> None:
            done[place] = made.completion
            makers[made.worker] += 1

        with self.rewards.generating():
            await all_of({place: begin(place, seed) for place, seed in seeds_left.items()}, keep)
        completions = tuple(done[place] for place in range(len(seeds)))
        return Group(
            step=step,
            draw=draw,
            prompt=prompt,
            completions=completions,
            scores=await self.rewards.score(scorer, prompt, completions),
            started_s=started_s,
            finished_s=time.time(),
            worker=makers.most_common(1)[0][0] if makers else LOCAL,
        )

    async def _play(self, prompt: Prompt, *, seed: int, sampling: Sampling, order: tuple[int, int, int]) -> Made:
        assert self.player is not None
        own, workers = f"episode-{next(self._numbers)}", Counter[str]()
        sessions = {own}

        async def sample(prompt_ids: Ints, *, seed: int, sampling: Sampling, session: str) -> Completion:
            sessions.add(session)
            given: dict[str, Any] = {"seed": seed, "sampling": sampling, "order": order, "session": session}
            made = await self.engine.generate(Request(id=str(next(self._numbers)), prompt_ids=prompt_ids, **given))
            workers[made.worker] += 1
            return made.completion

        async with self._free:
            self.engine.begin_session(own)
            try:
                played = await self.player.play(prompt, seed=seed, sampling=sampling, session=own, sample=sample)
            finally:
                for session in sessions:
                    self.engine.end_session(session)
        return Made(completion=played, worker=workers.most_common(1)[0][0] if workers else LOCAL)


class Rewards:
    """Scores groups and measures how long that takes. With ``is_remote``, reward models are in other processes, so they are called in
    threads. ``spans`` records when reward functions are busy."""

    def __init__(self, *, is_remote: bool = False, spans: BusySpans | None = None) -> None:
        self._ask_model = self._ask if is_remote else None
        self._spans = spans or BusySpans(REWARDS)
        self._num_scored = self._num_generated = 0  # number of groups being scored and generated now
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
        """Count a group as being generated while the block runs."""
        self._count(generated=1)
        try:
            yield
        finally:
            self._count(generated=-1)

    def take_seconds(self) -> float:
        """Return for how many seconds since the last call groups were being scored while none was being generated."""
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
        """Call a reward model in another process, for one group at a time."""
        async with self._one_asks:
            return await in_thread(function, *args)


def player_of(
    config: Config, environments: Environments | None, *, tokenizer: Any, scorer: Scorer
) -> Player | AgentPlayer | None:
    """Build the player. Returns None for a run without an environment, where a completion is one turn."""
    section, max_prompt_tokens = config.environment, config.data.max_prompt_tokens
    if scorer.environment_readers and not isinstance(section, ClassEnvironment | StepEnvironment):
        raise ConfigError(
            f"the reward {scorer.environment_readers[0]} reads the environment (its function has the parameter `environments`), which is "
            "possible only with an environment of type class or step; add such an environment, or remove the reward"
        )
    if section is None or environments is None:
        return None
    if isinstance(environments, AgentEnvironments):
        return environments.player(
            tokenizer=tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        )
    return Player(
        section=section,
        environments=environments,
        conversations=Conversations(tokenizer),
        max_prompt_tokens=max_prompt_tokens,
        keeps_attributes=bool(scorer.environment_readers),
    )


def sampling_seeds(run_seed: int, step: int, prompt_id: str, count: int) -> tuple[int, ...]:
    """Derive the seeds for a group's attempts. They depend only on the run's seed, the step, the prompt and the attempt."""
    texts = (f"{run_seed}/{step}/{prompt_id}/{attempt}" for attempt in range(count))
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return tuple(int.from_bytes(digest, "little", signed=True) for digest in digests)
