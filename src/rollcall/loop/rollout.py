"""A prompt becomes a group: its completions, all at once, then their scores.

``Rollouts.group`` is the way of every group, in training and in evaluation. A completion is one request to the engine, or an episode of
several (``environments/episode.py``). ``OpenGroups`` keeps what has ended while its group goes on, for a run that is killed.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np

from rollcall.config import Config, EnvironmentBase
from rollcall.config.environments import ClassEnvironment, StepEnvironment
from rollcall.engine.protocol import LOCAL, Engine, Made, Request, Sampling
from rollcall.environments.agent import AgentEnvironments
from rollcall.environments.conversation import Conversations
from rollcall.environments.episode import Player
from rollcall.environments.protocol import Environments, SampleTurn
from rollcall.errors import ConfigError
from rollcall.loop.aside import all_of
from rollcall.loop.rewards import Rewards
from rollcall.reward.scorer import Scorer
from rollcall.types import Completion, Group, Ints, Prompt, Score, rows_of

KEEP_EVERY_S = 1.0

UNSCORED = Score(value=0.0, parts={}, errors={})


class Plays(Protocol):
    """Plays whole episodes: turn by turn with an environment, or driven by a program."""

    @property
    def section(self) -> EnvironmentBase: ...

    async def play(
        self, prompt: Prompt, *, seed: int, sampling: Sampling, session: str, sample: SampleTurn
    ) -> Completion: ...


@dataclass(slots=True, kw_only=True)
class Rollouts:
    engine: Engine
    rewards: Rewards
    player: Plays | None = None  # None: a completion is one turn
    _numbers: Any = field(default_factory=itertools.count, init=False)  # of requests, groups and sessions
    _free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        _spare_the_collector()
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
        """One completion for each seed. ``done`` has those that an earlier process has made, by place, and gets each that ends."""
        done = {} if done is None else done
        makers, started_s, name = Counter[str](), time.time(), str(next(self._numbers))

        async def one(place: int, seed: int) -> None:
            order = (step, draw, place)
            if self.player is None:
                made = await self.engine.generate(
                    Request(
                        id=f"{name}/{place}",
                        prompt_ids=prompt.token_ids,
                        seed=seed,
                        sampling=sampling,
                        order=order,
                        group=name,
                    )
                )
                makers[made.worker] += 1
                done[place] = made.completion
            else:
                async with self._free:
                    done[place] = await self._play(prompt, seed=seed, sampling=sampling, order=order, makers=makers)

        with self.rewards.generating():
            await all_of(one(place, seed) for place, seed in enumerate(seeds) if place not in done)
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

    async def score_again(self, group: Group, *, scorer: Scorer) -> Group:
        """The same completions with new scores; the time at which it was finished is that of the completions."""
        return replace(group, scores=await self.rewards.score(scorer, group.prompt, group.completions))

    async def _play(
        self, prompt: Prompt, *, seed: int, sampling: Sampling, order: tuple[int, int, int], makers: Counter[str]
    ) -> Completion:
        assert self.player is not None
        own = f"episode-{next(self._numbers)}"
        sessions = {own}

        async def sample(prompt_ids: Ints, *, seed: int, sampling: Sampling, session: str) -> Completion:
            sessions.add(session)
            made: Made = await self.engine.generate(
                Request(
                    id=str(next(self._numbers)),
                    prompt_ids=prompt_ids,
                    seed=seed,
                    sampling=sampling,
                    order=order,
                    session=session,
                )
            )
            makers[made.worker] += 1
            return made.completion

        self.engine.begin_session(own)
        try:
            return await self.player.play(prompt, seed=seed, sampling=sampling, session=own, sample=sample)
        finally:
            for session in sessions:
                self.engine.end_session(session)


@dataclass(slots=True, kw_only=True, eq=False)
class OpenGroup:
    """A group that is not finished."""

    step: int
    draw: int
    prompt: Prompt
    started_s: float
    done: dict[int, Completion]  # by place
    written: set[int]  # places

    def take_new(self) -> list[tuple[int, Group]]:
        """Each place that is done and not written, with a group of this completion alone."""
        new = {
            place: completion
            for place, completion in self.done.items()
            if place not in self.written and is_finite(completion)  # else the whole group is refused
        }
        self.written |= new.keys()
        return [
            (
                place,
                Group(
                    step=self.step,
                    draw=self.draw,
                    prompt=self.prompt,
                    completions=(completion,),
                    scores=(UNSCORED,),
                    started_s=self.started_s,
                    finished_s=time.time(),
                    worker=LOCAL,
                ),
            )
            for place, completion in new.items()
        ]


class OpenGroups:
    """What has ended of groups that are not finished goes to ``write`` at most once a second, all of it at once."""

    def __init__(self, write: Callable[[list[tuple[int, Group]]], Awaitable[Any]]) -> None:
        self._write = write
        self._groups: dict[tuple[int, int], OpenGroup] = {}

    def open(self, prompt: Prompt, *, step: int, draw: int, done: dict[int, Completion]) -> None:
        """``done`` has what is written already, and gets each completion that ends."""
        self._groups[step, draw] = OpenGroup(
            step=step, draw=draw, prompt=prompt, started_s=time.time(), done=done, written=set(done)
        )

    def close(self, *, step: int, draw: int) -> None:
        """The whole group is about to be written."""
        del self._groups[step, draw]

    async def run(self) -> None:
        """Until cancelled; what is new by then is written too."""
        try:
            while True:
                await asyncio.sleep(KEEP_EVERY_S)
                await self._flush()
        finally:
            await self._flush()

    async def _flush(self) -> None:
        if new := [one for group in self._groups.values() for one in group.take_new()]:
            await self._write(new)


def player_of(config: Config, environments: Environments | None, *, tokenizer: Any, scorer: Scorer) -> Plays | None:
    """None: the run has no environment, and a completion is one turn."""
    if scorer.environment_readers and not isinstance(config.environment, ClassEnvironment | StepEnvironment):
        raise ConfigError(
            f"the reward {scorer.environment_readers[0]} takes environments, and there are none: the run file needs an environment of "
            "type class or step"
        )
    if config.environment is None or environments is None:
        return None
    if isinstance(environments, AgentEnvironments):
        return environments.player(
            tokenizer=tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        )
    return Player(
        section=config.environment,
        environments=environments,
        conversations=Conversations(tokenizer),
        max_prompt_tokens=config.data.max_prompt_tokens,
        keeps_attributes=bool(scorer.environment_readers),
    )


def is_finite(completion: Completion) -> bool:
    return all(np.isfinite(row.logprobs).all() for row in rows_of(completion))


def sampling_seeds(run_seed: int, step: int, prompt_id: str, count: int) -> tuple[int, ...]:
    """The seeds of a group's attempts, a function of (run seed, step, prompt, attempt) alone."""
    seeds: list[int] = []
    for attempt in range(count):
        digest = hashlib.blake2b(f"{run_seed}/{step}/{prompt_id}/{attempt}".encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "little", signed=True))
    return tuple(seeds)


@cache
def _spare_the_collector() -> None:
    """What this process has loaded by now stays, so Python's collector need not look at it again: with torch and transformers a full look
    takes a fifth of a second, and everything waits."""
    gc.collect()
    gc.freeze()
