"""The weighted sum of a run's rewards over the completions of a prompt. Every failure is counted and shown.

Reward functions run in worker processes (pool.py), and services (``judge``, ``http``) are asked from a thread (services.py). Rewards that
need a model (``self_certainty``, ``model``) are called in this process while the workers are busy. A reward that fails adds 0, and the
Score has the reason. A TRL function that declines adds 0; if all decline, the Score says so.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rollcall.base.errors import WorkerLostError
from rollcall.base.redact import redact, remember
from rollcall.base.stop import heeded
from rollcall.base.types import Completion, EndReason, Group, Prompt, Score
from rollcall.base.wait import warn
from rollcall.base.words import all_of, visible
from rollcall.reward.functions import PROCESS_TYPES
from rollcall.reward.given import with_pickled
from rollcall.reward.pool import RewardPool
from rollcall.reward.services import ASKED_TYPES, Asker
from rollcall.reward.trl import lists_of
from rollcall.reward.worker import ASYNC_GRACE_S, FailureKind, Item, RewardResult, checked

ModelRewardFunction = Callable[[Prompt, tuple[Completion, ...]], list[float]]
AskModel = Callable[..., Awaitable[Any]]
"""Calls a function with its arguments where it does not hold up the event loop."""

ENVIRONMENT = "environment"  # the reward that comes with an episode
MAX_NOTE = 4000  # characters that are kept of what a service said
_COLUMNS = {"countdown": ("numbers", "target"), "reasoning_gym": ("reasoning_gym",)}
Results = list[RewardResult]  # of a reward, one for each completion of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One completion that could not be scored, for display."""

    reward: str
    kind: FailureKind
    prompt_id: str
    completion: str
    why: str  # with the user's own traceback where there is one


class Scorer(AbstractContextManager["Scorer"]):
    """Scores completions by ``rewards``, the run file's list.

    ``model_rewards`` holds, by place in that list, what to call for rewards that run in this process.
    """

    def __init__(
        self, rewards: Sequence[Any], *, num_workers: int, model_rewards: dict[int, ModelRewardFunction]
    ) -> None:
        self._rewards = list(rewards)
        self.names = reward_names(self._rewards)
        self._model_rewards = dict(model_rewards)
        by_type = list(enumerate(reward.type for reward in self._rewards))
        specs = {index: _spec(self._rewards[index], index=index) for index, kind in by_type if kind in PROCESS_TYPES}
        asked = {index: self._rewards[index] for index, kind in by_type if kind in ASKED_TYPES}
        self._environment_rewards = [index for index, kind in by_type if kind == ENVIRONMENT]
        for index, kind in by_type:
            if not any(index in given for given in (specs, asked, self._environment_rewards, self._model_rewards)):
                raise ValueError(f"reward.{index} ({kind}) runs in this process; give model_rewards[{index}]")
        self.failures: list[Failure] = []  # the first three of each reward and kind
        self.num_failed: Counter[tuple[str, FailureKind]] = Counter()  # of each reward and kind
        self._said_unused = False
        self._process_rewards, self._asked_rewards = list(specs), list(asked)
        self._asker = Asker(asked) if asked else None
        self._pool: RewardPool | None = None
        try:
            self._pool = RewardPool(specs, num_workers=num_workers) if specs else None
        except BaseException:
            self.close()
            raise
        self._functions = self._pool.functions if self._pool else {}

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._asker is not None:
            self._asker.close()
        if self._pool is not None:
            self._pool.close()

    @property
    def in_force(self) -> dict[str, dict[str, str]]:
        """The confinement of each reward's processes on this machine; rewards that run in this process have none."""
        return {self.names[index]: limits for index, limits in (self._pool.in_force if self._pool else {}).items()}

    @property
    def environment_readers(self) -> list[str]:
        """Rewards that read attributes of the environments."""
        return [self.names[index] for index, about in self._functions.items() if "environments" in about.trl]

    async def score(
        self, prompt: Prompt, completions: tuple[Completion, ...], *, ask_model: AskModel | None = None
    ) -> tuple[Score, ...]:
        """The scores of a group's completions. Models are called in the event loop, or by ``ask_model``."""
        if not completions:
            return ()
        asked = {index: self._ask_pool(index, prompt, completions) for index in self._process_rewards}
        asked |= {index: self._ask_service(index, prompt, completions) for index in self._asked_rewards}
        waiting = {index: asyncio.ensure_future(work) for index, work in asked.items()}
        results: dict[int, Results] = {}
        try:
            for index in self._environment_rewards:
                results[index] = list(map(environment_reward, completions))
            if waiting and self._model_rewards:
                for _ in range(2):  # the items are queued, then the workers begin
                    await asyncio.sleep(0)
            for index in self._model_rewards:
                if ask_model is None:
                    results[index] = self._call_model(index, prompt, completions)
                else:
                    results[index] = await ask_model(self._call_model, index, prompt, completions)
            await asyncio.gather(*waiting.values())
        except BaseException:
            for one in waiting.values():
                one.cancel()
            raise
        results |= {index: one.result() for index, one in waiting.items()}
        return self._scores_of(prompt, completions, results)

    async def _ask_pool(self, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> Results:
        """Queue an item for each completion, or one for all of them where the function takes groups."""
        assert self._pool is not None
        about, limit_s = self._functions.get(index), self._rewards[index].timeout_s
        kind, is_trl = (about.kind, bool(about.trl)) if about else ("", False)
        limit_s += ASYNC_GRACE_S if kind == "async" else 0
        # An environment that failed has left nothing for a function of TRL's to read, and its episode scores 0.
        places = [place for place, one in enumerate(completions) if not (is_trl and _has_failed(one))]
        lists = lists_of(prompt, [completions[place] for place in places]) if is_trl and places else None
        groups = [[place] for place in places] if not kind else [places] if places else []
        asked: list[asyncio.Future[Results]] = []
        for group in groups:
            texts = [completions[place].text for place in group]
            item = Item(index, prompt.text, texts if kind else texts[0], prompt.answer, prompt.metadata, lists)
            asked.append(self._pool.score(item, timeout_s=limit_s))
        found = [RewardResult(0.0)] * len(completions)
        for group, results in zip(groups, await asyncio.gather(*asked), strict=True):
            for place, result in zip(group, results, strict=True):
                found[place] = result
        return found

    async def _ask_service(self, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> Results:
        assert self._asker is not None
        asking = asyncio.ensure_future(self._asker.ask(index, prompt, completions))
        try:
            while not (await asyncio.wait({asking}, timeout=0.5))[0]:
                if self._asker.is_waiting:
                    heeded().check()  # a step whose service is away does not end by itself
        finally:
            asking.cancel()
        return asking.result()

    def _call_model(self, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> Results:
        try:
            values = self._model_rewards[index](prompt, completions)
            if len(values) != len(completions):
                raise ValueError(f"returned {len(values)} scores for {len(completions)} completions")
        except WorkerLostError:
            raise  # says nothing of the completion, which another attempt scores
        except Exception:  # noqa: BLE001 - a model may fail in any way; it is counted, and the run continues
            return [RewardResult(0.0, "raised", traceback.format_exc())] * len(completions)
        return [checked(value) for value in values]

    def _scores_of(
        self, prompt: Prompt, completions: tuple[Completion, ...], results: dict[int, Results]
    ) -> tuple[Score, ...]:
        scores: list[Score] = []
        for place, completion in enumerate(completions):
            parts, is_given = dict.fromkeys(self.names, 0.0), False
            errors: dict[str, str] = {}
            notes: dict[str, str] = {}
            for index, name in enumerate(self.names):
                result = results[index][place]
                kind, why = result.kind, redact(result.why) if result.why else ""
                if result.value is not None:
                    parts[name], is_given = result.value, True
                if result.note:  # it goes to the journal, and must not be long, hold a secret or control a terminal
                    note = redact(visible(result.note))
                    half = MAX_NOTE // 2
                    notes[name] = note if len(note) <= MAX_NOTE else f"{note[:half]}\n[...]\n{note[-half:]}"
                if kind:
                    errors[name] = _short(kind, why)
                    self._keep(prompt, completion, kind, why, name=name)
            if not self._environment_rewards:
                self._note_episode(prompt, completion)
            value = sum(reward.weight * parts[name] for name, reward in zip(self.names, self._rewards, strict=True))
            score = Score(value=value, parts=parts, errors=errors, notes=notes, is_given=is_given)
            if _has_failed(completion):  # whatever the other rewards say of its text
                failed = environment_reward(completion)
                told = {ENVIRONMENT: _short(failed.kind, failed.why)}
                score = Score(value=0.0, parts=dict.fromkeys(self.names, 0.0), errors=told)
            scores.append(score)
        return tuple(scores)

    def _note_episode(self, prompt: Prompt, completion: Completion) -> None:
        """Note what the environment said, in a run whose rewards leave it out."""
        if completion.episode is not None and completion.episode.reward is not None and not self._said_unused:
            self._said_unused = True
            warn(
                "the environment gives a reward that the run does not use: add {type: environment} to reward, or leave reward out"
            )
        if _has_failed(completion):
            failed = environment_reward(completion)
            self._keep(prompt, completion, failed.kind, failed.why, name=ENVIRONMENT)

    def _keep(self, prompt: Prompt, completion: Completion, kind: FailureKind, why: str, *, name: str) -> None:
        self.num_failed[name, kind] += 1
        if self.num_failed[name, kind] <= 3:
            failure = Failure(reward=name, kind=kind, prompt_id=prompt.id, completion=completion.text, why=why.rstrip())
            self.failures.append(failure)


def _has_failed(completion: Completion) -> bool:
    """Whether its environment failed."""
    return completion.episode is not None and bool(completion.episode.error)


def environment_reward(completion: Completion) -> RewardResult:
    """The reward that an episode's environment gave, at its end and along the way."""
    episode = completion.episode
    if episode is None:
        return RewardResult(0.0, "nan", "this completion is not an episode, so no environment has scored it")
    if episode.error:
        return RewardResult(0.0, "hung" if episode.ended is EndReason.TIMEOUT else "raised", redact(episode.error))
    given = [turn.reward for turn in episode.turns if turn.reward is not None]
    if episode.reward is None and not given:
        if episode.ended in (EndReason.TURNS, EndReason.TOKENS):
            return RewardResult(0.0)  # it was cut off before the environment had a reason to give one
        why = (
            "the environment gave no reward; let it give one, 0 too (get_reward, the reward of a step, or the last line of a program, "
            '{"reward": 1.0}), or name other rewards'
        )
        return RewardResult(0.0, "nan", why)
    return checked(sum(given) + (episode.reward or 0.0))


def why_unscored(groups: Sequence[Group], *, reward: str, scorer: Scorer) -> str:
    """Explain how a reward failed on every completion of these groups, with the first failure in full."""
    scores = [score for group in groups for score in group.scores]
    told = scores[0].errors[reward]
    # An evaluation may have failed before, in another way.
    first = next(
        (one.why for one in scorer.failures if one.reward == reward and _short(one.kind, one.why) == told), told
    )
    kinds = Counter(score.errors[reward].partition(":")[0] for score in scores)
    how = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    lines = first.strip().splitlines()
    shown = lines if len(lines) <= 25 else ["...", *lines[-25:]]
    what = "environment" if reward == ENVIRONMENT else f"reward {reward}"
    whole = "\n".join(f"  {line}" for line in shown)
    return f"the {what} failed on {all_of(len(scores), 'completion')} ({how}). The first failure:\n{whole}"


def columns_needed(rewards: Sequence[Any]) -> dict[str, str]:
    """The columns that rows must have, each with the name of a reward that needs it. Functions are loaded, to see what they take."""
    specs = {index: _spec(reward, index=index) for index, reward in enumerate(rewards) if reward.type == "function"}
    needs: dict[int, list[str]] = {}
    if specs:
        with RewardPool(specs, num_workers=1) as pool:
            needs = {place: about.needs for place, about in pool.functions.items()}
    found: dict[str, str] = {}
    for index, (name, reward) in enumerate(zip(reward_names(rewards), rewards, strict=True)):
        reads_answer = reward.type in ("exact", "number", "math") or "{answer}" in getattr(reward, "rubric", "")
        for column in needs.get(index, ["answer"] if reads_answer else _COLUMNS.get(reward.type, ())):
            found.setdefault(column, name)
    return found


def _spec(reward: Any, *, index: int) -> dict[str, Any]:
    """The fields of a reward for a worker process."""
    spec = with_pickled(reward.model_dump(), index=index)
    # They reach code that may raise them, and what it raises is shown.
    remember(os.environ.get(name, "") for name in spec.get("env", ()))
    return spec


def reward_names(rewards: Sequence[Any]) -> list[str]:
    """One name per reward: its type, or its function's name; repeats get #2, #3."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for reward in rewards:
        name = reward.path.rpartition(":")[2] if reward.type == "function" else reward.type
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def _short(kind: FailureKind, why: str) -> str:
    what = why.partition("\n")[0]
    if kind == "raised":  # the line of a traceback that names the error
        lines = [line for line in why.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
        what = lines[-1] if lines else why
    return f"{kind}: {what}"
