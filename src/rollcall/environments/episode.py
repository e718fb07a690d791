"""One episode: the model's turns and the environment's answers, until either of them or a limit ends it.

An episode always ends, whatever the environment does, because each call and the whole episode have a time limit, and turns and tokens
are limited too. If an environment fails, only its own episode ends, and the tokens so far are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from rollcall.base.types import Completion, EndReason, FinishReason, Ints, Prompt
from rollcall.config import EnvironmentBase
from rollcall.config.environments import ClassEnvironment
from rollcall.engine.protocol import Sampling
from rollcall.environments.conversation import Conversations, Tools
from rollcall.environments.histories import Row
from rollcall.environments.protocol import (
    KIND,
    Environment,
    EnvironmentFailed,
    EnvironmentLost,
    Environments,
    Host,
    SampleTurn,
    add_metrics,
)
from rollcall.process.debug.board import BOARD
from rollcall.process.pause import running_s
from rollcall.reward.functions import LARGEST_SCORE
from rollcall.reward.trl import MESSAGES, TEXT

T = TypeVar("T")
LONGEST_ERROR = 2000
LOOK_S = 1.0


class TooLong(Exception):  # noqa: N818 - an outcome
    """A call or an episode took too long."""


@dataclass(slots=True, kw_only=True)
class Player:
    """Plays the run's episodes."""

    section: EnvironmentBase
    environments: Environments
    conversations: Conversations
    max_prompt_tokens: int
    keeps_attributes: bool = False  # whether a reward reads attributes of the environments

    async def play(
        self, prompt: Prompt, *, seed: int, sampling: Sampling, session: str, sample: SampleTurn
    ) -> Completion:
        """Play one attempt at a prompt. ``sampling.max_tokens`` limits all tokens after the prompt."""
        limit_s = self.section.episode_timeout_s
        late = f"the episode took longer than environment.episode_timeout_s={limit_s:g}"
        while True:
            host = await self.environments.find_host()
            one = _OneEpisode(self, prompt, seed=seed, sampling=sampling, session=session, sample=sample)
            try:
                await within(one.run(host), limit_s, late)
            except EnvironmentLost:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # the environment was lost while it was being closed
                    raise asyncio.CancelledError from None
                continue  # the loss was already reported; find_host gives up if no host comes back
            except TooLong as error:
                one.fail(EndReason.TIMEOUT, str(error))
            except EnvironmentFailed as error:
                one.fail(EndReason.ERROR, str(error))
            return one.completion()

    async def call(self, work: Awaitable[T], name: str) -> T:
        """Await a call to the environment within its time limit."""
        limit_s = self.section.call_timeout_s
        return await within(work, limit_s, f"{name} took longer than environment.call_timeout_s={limit_s:g}")


async def within(work: Awaitable[T], limit_s: float, late: str) -> T:
    """Await ``work``, or raise ``TooLong`` with the message ``late``. Work runs in the caller's task, because creating a task for each
    turn would take longer than the call itself.

    The limit counts only time in which this event loop runs: a training update in this process can block the loop for minutes, and an
    answer that arrived in the meantime is not late. The limit also pauses while a debugger stops one of the run's processes, since that
    process may be this environment or an engine that it is waiting for.
    """
    loop, limit, left_s = asyncio.get_running_loop(), asyncio.timeout(None), limit_s

    def look() -> asyncio.TimerHandle:
        if left_s <= 0:  # the loop may have been blocked until now
            return loop.call_later(0.05, lambda: limit.reschedule(loop.time()))
        look_s = min(left_s, LOOK_S)
        return loop.call_later(look_s, count, look_s, running_s())

    def count(look_s: float, began_s: float) -> None:
        nonlocal left_s, timer
        if not BOARD.is_held:
            left_s -= min(running_s() - began_s, look_s)
        timer = look()

    timer = look()
    try:
        async with limit:
            return await work
    except Exception:
        if limit.expired():
            raise TooLong(late) from None
        raise
    finally:
        timer.cancel()


class _OneEpisode:
    """An episode and its outcome so far."""

    def __init__(
        self, player: Player, prompt: Prompt, *, seed: int, sampling: Sampling, session: str, sample: SampleTurn
    ) -> None:
        self._player, self._prompt, self._seed, self._sampling = player, prompt, seed, sampling
        self._session, self._sample = session, sample
        self._row = Row(prompt_ids=prompt.token_ids)
        self._opening = ""  # what reset returned
        self._metrics: dict[str, float] = {}
        self._reward: float | None = None
        self._attributes: dict[str, Any] = {}
        self._ended, self._error = EndReason.DONE, ""

    async def run(self, host: Host) -> None:
        call, kind = self._player.call, str(self._prompt.metadata.get(KIND) or "")
        environment = await call(host.start(kind), "the start of the environment")
        broken = True
        try:
            tools = self._player.environments.tools_of(kind)
            self._open(await call(environment.reset(row_of(self._prompt)), "reset"), tools)
            ended = await self._take_turns(environment, tools)
            reward = await call(environment.reward(), "the reward")
            self._reward = None if reward is None else _reward(reward, "the reward of the episode")
            if self._player.keeps_attributes:
                self._attributes = await call(environment.attributes(), "reading the attributes")
            self._ended, broken = ended, False
        finally:
            await environment.close(broken=broken)

    def fail(self, reason: EndReason, error: str) -> None:
        """Record that the episode failed. Keep its turns, including the turn in which it failed."""
        self._ended, self._error = reason, error[:LONGEST_ERROR] or "no reason was given"

    def _open(self, text: str | None, tools: Tools) -> None:
        self._opening = text or ""
        ids = self._player.conversations.open(self._prompt, added=text, tools=tools)
        most = self._player.max_prompt_tokens
        if not self._prompt.text and not text:
            raise EnvironmentFailed(
                "there is no data, so reset has to return the first message, but it returned nothing"
            )
        if not 0 < len(ids) <= most:
            raise EnvironmentFailed(
                f"the episode opens with {len(ids)} tokens, but data.max_prompt_tokens={most}; raise the limit, or return "
                "less text from reset"
            )
        self._row.prompt_ids = ids

    async def _take_turns(self, environment: Environment, tools: Tools) -> EndReason:
        row = self._row
        while True:
            left, most = self._sampling.max_tokens - row.length, self._player.section.max_turn_tokens
            turn = await self._sample(
                np.concatenate((row.prompt_ids, *row.token_ids)),
                seed=turn_seed(self._seed, len(row.turns)),
                sampling=replace(self._sampling, max_tokens=min(left, most or left)),
                session=self._session,
            )
            row.add_sampled(turn)
            result = await self._player.call(environment.step(turn.text, turn.token_ids.tolist()), "step")
            observed: Ints | None = None
            if not result.done:
                is_chat, last_id = MESSAGES in self._prompt.metadata, int(turn.token_ids[-1])
                extend = self._player.conversations.extend
                observed = extend(result.messages, is_chat=is_chat, tools=tools, last_id=last_id)
            ended = self._why_ended(turn, observed)
            reward = None if result.reward is None else _reward(result.reward, "the reward of a turn")
            add_metrics(self._metrics, result.metrics)
            row.change_last(calls=result.calls, reward=reward)
            if observed is None or ended is not None:
                return ended or EndReason.DONE
            row.add_observed(observed, "\n".join(message.content for message in result.messages))

    def _why_ended(self, turn: Completion, observed: Ints | None) -> EndReason | None:
        """Return why the episode ends after this turn, or None if it continues."""
        row, section, most = self._row, self._player.section, self._sampling.max_tokens
        if observed is None:
            # With a class, a turn without a call ends the episode, but a truncated turn might still have made a call.
            by_limit = row.length >= most or isinstance(section, ClassEnvironment)
            return EndReason.TOKENS if turn.finish is FinishReason.LENGTH and by_limit else EndReason.DONE
        if len(row.turns) >= section.max_turns:
            return EndReason.TURNS
        return EndReason.TOKENS if row.length + len(observed) >= most else None

    def completion(self) -> Completion:
        return self._row.completion(
            self._prompt,
            seed=self._seed,
            branches=(),
            reward=self._reward,
            metrics=self._metrics,
            ended=self._ended,
            error=self._error,
            opening=self._opening,
            attributes=self._attributes,
        )


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the row's columns, which are passed to `reset`."""
    columns = {name: value for name, value in prompt.metadata.items() if name not in (MESSAGES, TEXT)}
    if not isinstance(columns.get("answer"), str):
        columns["answer"] = prompt.answer  # as a string, whatever its type is in the data
    return {"prompt": prompt.metadata.get(MESSAGES, prompt.text), **columns}


def turn_seed(seed: int, turn: int) -> int:
    """Return a turn's seed. The first turn uses the attempt's seed, so a one-turn episode samples the same tokens as a plain
    completion."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _reward(value: float, what: str) -> float:
    """Return the reward. Raise EnvironmentFailed if it is too large for later computations to stay finite."""
    if not abs(value) <= LARGEST_SCORE:  # also refuses NaN
        most = f"{LARGEST_SCORE:g}"
        raise EnvironmentFailed(f"{what} is {value:g}; it must be a finite number between -{most} and {most}")
    return float(value)
