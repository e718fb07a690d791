"""A group whose attempts are episodes: all at once, each at its own pace, each kept on disk as it ends."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollcall.config import Config, EnvironmentBase
from rollcall.config.environments import ClassEnvironment, StepEnvironment
from rollcall.engine.protocol import Sampling
from rollcall.environments.agent import AgentEnvironments
from rollcall.environments.conversation import Conversations
from rollcall.environments.episode import Player
from rollcall.environments.protocol import Environments, SampleTurn
from rollcall.errors import ConfigError
from rollcall.loop.rollout import HERE, UNSCORED, Keep, Rollouts
from rollcall.reward.scorer import Scorer
from rollcall.types import Completion, Group, Prompt


class Plays(Protocol):
    """Plays whole episodes: turn by turn with an environment, or driven by a program."""

    @property
    def section(self) -> EnvironmentBase: ...

    async def play(
        self, prompt: Prompt, *, seed: int, sampling: Sampling, session: str, sample: SampleTurn
    ) -> Completion: ...


@dataclass(slots=True, kw_only=True)
class Episodes:
    rollouts: Rollouts
    player: Plays
    _free: asyncio.Semaphore = field(init=False)
    _num_sessions: int = 0

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.player.section.max_running)

    async def attempt(
        self,
        prompt: Prompt,
        *,
        step: int,
        draw: int,
        seeds: tuple[int, ...],
        sampling: Sampling,
        scorer: Scorer,
        earlier: Mapping[int, Completion] | None = None,
        keep: Keep | None = None,
    ) -> Group:
        """One episode for each seed, but for those that an ``earlier`` process has made."""
        made: dict[int, Completion] = dict(earlier or {})
        makers: Counter[str] = Counter()
        started_s = time.time()

        def group(completions: tuple[Completion, ...], began_s: float) -> Group:
            return Group(
                step=step,
                draw=draw,
                prompt=prompt,
                completions=completions,
                scores=(UNSCORED,) * len(completions),
                started_s=began_s,
                finished_s=time.time(),
                worker=makers.most_common(1)[0][0] if makers else HERE,
            )

        async def one(place: int, seed: int) -> None:
            async with self._free:
                began_s = time.time()
                made[place] = await self._play(prompt, seed=seed, sampling=sampling, makers=makers)
                if keep is not None:
                    await keep(place, group((made[place],), began_s))

        await _all(one(place, seed) for place, seed in enumerate(seeds) if place not in made)
        whole = group(tuple(made[place] for place in range(len(seeds))), started_s)
        return await self.rollouts.score_again(whole, scorer=scorer)

    async def _play(self, prompt: Prompt, *, seed: int, sampling: Sampling, makers: Counter[str]) -> Completion:
        session = f"episode-{self._num_sessions}"
        self._num_sessions += 1

        sessions: set[str] = set()

        async def sample(prompt_ids: Any, *, session: str, **given: Any) -> Completion:
            sessions.add(session)
            turn, worker = await self.rollouts.sample(prompt_ids, session=session, **given)
            makers[worker] += 1
            return turn

        try:
            with self.rollouts.playing():
                return await self.player.play(prompt, seed=seed, sampling=sampling, session=session, sample=sample)
        finally:
            for session in sessions:
                self.rollouts.end_session(session)


def episodes_of(
    config: Config, environments: Environments | None, *, tokenizer: Any, rollouts: Rollouts, scorer: Scorer
) -> Episodes | None:
    """None: the run has no environment, and a completion is one turn."""
    if scorer.environment_readers and not isinstance(config.environment, ClassEnvironment | StepEnvironment):
        raise ConfigError(
            f"the reward {scorer.environment_readers[0]} takes environments, and there are none: the run file needs an environment of "
            "type class or step"
        )
    if config.environment is None or environments is None:
        return None
    if isinstance(environments, AgentEnvironments):
        agents = environments.player(
            tokenizer=tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        )
        return Episodes(rollouts=rollouts, player=agents)
    player = Player(
        section=config.environment,
        environments=environments,
        conversations=Conversations(tokenizer),
        max_prompt_tokens=config.data.max_prompt_tokens,
        keeps_attributes=bool(scorer.environment_readers),
    )
    return Episodes(rollouts=rollouts, player=player)


async def _all(work: Any) -> None:
    """Wait for all of them; the first failure ends the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
