"""Computes the weighted sum of a run's rewards for each completion of a prompt. Every failure is counted and shown.

Reward functions run in worker processes (pool.py), and a thread queries services such as ``judge`` and ``http`` (services.py). Rewards
that need a model (``self_certainty``, ``model``) run in this process or, on a cluster, in others. A reward that fails adds 0, and the
Score contains the reason. A TRL function that declines to score adds 0. If every reward declines, the Score says so.
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
"""Calls a function with the given arguments where it does not block the event loop, such as in a thread."""

ENVIRONMENT = "environment"  # the reward from an episode's environment
MAX_NOTE = 4000  # how many characters of a service's answer are kept
_COLUMNS = {"countdown": ("numbers", "target"), "reasoning_gym": ("reasoning_gym",)}
Results = list[RewardResult]  # one reward's results, one per completion in a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One completion that could not be scored, kept so that it can be shown."""

    reward: str
    kind: FailureKind
    prompt_id: str
    completion: str
    why: str  # includes the user's own traceback if there is one


class Scorer(AbstractContextManager["Scorer"]):
    """Scores completions with ``rewards``, the run file's list.

    ``model_rewards`` maps an index in that list to the function to call for a reward that runs in this process.
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
                raise ValueError(f"reward.{index} ({kind}) runs in this process; pass model_rewards[{index}]")
        self.failures: list[Failure] = []  # the first three per reward and kind
        self.num_failed: Counter[tuple[str, FailureKind]] = Counter()  # per reward and kind
        self._said_unused = False
        self._asks = dict.fromkeys(specs, self._ask_pool) | dict.fromkeys(asked, self._ask_service)
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
        """How this machine confines each reward's processes. Rewards that run in this process are not included."""
        return {self.names[index]: limits for index, limits in (self._pool.in_force if self._pool else {}).items()}

    @property
    def environment_readers(self) -> list[str]:
        """The rewards that read environment attributes."""
        return [self.names[index] for index, about in self._functions.items() if "environments" in about.trl]

    async def score(
        self, prompt: Prompt, completions: tuple[Completion, ...], *, ask_model: AskModel | None = None
    ) -> tuple[Score, ...]:
        """Score a group's completions. Models are called in the event loop, or through ``ask_model``."""
        if not completions:
            return ()
        waiting = {index: asyncio.ensure_future(ask(index, prompt, completions)) for index, ask in self._asks.items()}
        results: dict[int, Results] = {}
        try:
            for index in self._environment_rewards:
                results[index] = list(map(environment_reward, completions))
            if waiting and self._model_rewards:
                for _ in range(2):  # the first pass queues the items, the second starts the workers
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
        """Queue one item per completion, or one for all of them if the function takes groups or is quick."""
        assert self._pool is not None
        about, reward = self._functions.get(index), self._rewards[index]
        kind, is_trl = (about.kind, bool(about.trl)) if about else ("", False)
        # Skip episodes whose environment failed: a TRL function cannot read them, and they score 0.
        places = [place for place, one in enumerate(completions) if not (is_trl and _has_failed(one))]
        found, texts = [RewardResult(0.0)] * len(completions), [completions[place].text for place in places]
        if not places:
            return found
        lists = lists_of(prompt, [completions[place] for place in places]) if is_trl else None
        # exact and number cannot hang; up to this size, one message holds the results, and one time limit is enough.
        is_quick = reward.type in ("exact", "number") and len(texts) <= 64 and sum(map(len, texts)) < 1 << 16
        groups, given = ([places], [texts]) if kind or is_quick else ([[place] for place in places], texts)
        items = [Item(index, prompt.text, one, prompt.answer, prompt.metadata, lists) for one in given]
        answers = await self._pool.score(items, timeout_s=reward.timeout_s + ASYNC_GRACE_S * (kind == "async"))
        for group, results in zip(groups, answers, strict=True):
            for place, result in zip(group, results, strict=True):
                found[place] = result
        return found

    async def _ask_service(self, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> Results:
        assert self._asker is not None
        asking = asyncio.ensure_future(self._asker.ask(index, prompt, completions))
        try:
            while not (await asyncio.wait({asking}, timeout=0.5))[0]:
                if self._asker.is_waiting:
                    heeded().check()  # obey a request to stop, because the step cannot end while its service is down
        finally:
            asking.cancel()
        return asking.result()

    def _call_model(self, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> Results:
        try:
            values = self._model_rewards[index](prompt, completions)
            if len(values) != len(completions):
                raise ValueError(f"returned {len(values)} scores for {len(completions)} completions")
        except WorkerLostError:
            raise  # the completion is not at fault, and it is scored again later
        except Exception:  # noqa: BLE001 - a model may fail in any way; the failure is counted, and the run continues
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
                # The journal stores the note, so it must be short and free of secrets and control characters.
                if result.note:
                    note = redact(visible(result.note))
                    half = MAX_NOTE // 2
                    notes[name] = note if len(note) <= MAX_NOTE else f"{note[:half]}\n[...]\n{note[-half:]}"
                if kind:
                    errors[name] = _short(kind, why)
                    self._keep(prompt, completion, kind, why, name=name)
            value = sum(reward.weight * parts[name] for name, reward in zip(self.names, self._rewards, strict=True))
            score = Score(value=value, parts=parts, errors=errors, notes=notes, is_given=is_given)
            episode, is_listed = completion.episode, bool(self._environment_rewards)
            if episode is not None and episode.reward is not None and not is_listed and not self._said_unused:
                self._said_unused = True
                warn(
                    "the environment returns a reward that the run does not use: add {type: environment} to reward, or leave reward out"
                )
            if _has_failed(completion):  # regardless of the other rewards
                failed = environment_reward(completion)
                if not is_listed:
                    self._keep(prompt, completion, failed.kind, failed.why, name=ENVIRONMENT)
                told = {ENVIRONMENT: _short(failed.kind, failed.why)}
                score = Score(value=0.0, parts=dict.fromkeys(self.names, 0.0), errors=told)
            scores.append(score)
        return tuple(scores)

    def _keep(self, prompt: Prompt, completion: Completion, kind: FailureKind, why: str, *, name: str) -> None:
        self.num_failed[name, kind] += 1
        if self.num_failed[name, kind] <= 3:
            failure = Failure(reward=name, kind=kind, prompt_id=prompt.id, completion=completion.text, why=why.rstrip())
            self.failures.append(failure)


def _has_failed(completion: Completion) -> bool:
    """Return whether the completion's environment failed."""
    return completion.episode is not None and bool(completion.episode.error)


def environment_reward(completion: Completion) -> RewardResult:
    """Return the total reward from an episode's environment, for its turns and at its end."""
    episode = completion.episode
    if episode is None:
        return RewardResult(0.0, "nan", "this completion is not an episode, so no environment scored it")
    if episode.error:
        return RewardResult(0.0, "hung" if episode.ended is EndReason.TIMEOUT else "raised", redact(episode.error))
    given = [turn.reward for turn in episode.turns if turn.reward is not None]
    if episode.reward is None and not given:
        if episode.ended in (EndReason.TURNS, EndReason.TOKENS):
            return RewardResult(0.0)  # it was cut off before the environment could return a reward
        why = (
            "the environment returned no reward; return one (it may be 0) from get_reward, from a step or in the last line of a program "
            '({"reward": 1.0}), or list other rewards'
        )
        return RewardResult(0.0, "nan", why)
    return checked(sum(given) + (episode.reward or 0.0))


def why_unscored(groups: Sequence[Group], *, reward: str, scorer: Scorer) -> str:
    """Explain how a reward failed on every completion in these groups, with the first failure in full."""
    scores = [score for group in groups for score in group.scores]
    told = scores[0].errors[reward]
    # An evaluation may have failed earlier in a different way.
    same = (one.why for one in scorer.failures if one.reward == reward and _short(one.kind, one.why) == told)
    kinds = Counter(score.errors[reward].partition(":")[0] for score in scores)
    how = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    lines = next(same, told).strip().splitlines()
    shown = lines if len(lines) <= 25 else ["...", *lines[-25:]]
    what = "environment" if reward == ENVIRONMENT else f"reward {reward}"
    # Put the cause in the first line, because a list of runs shows only that line.
    whole = "".join(f"\n  {line}" for line in shown) if len(lines) > 1 else ""
    return f"the {what} failed on {all_of(len(scores), 'completion')} ({how}). The first failure: {lines[-1].strip()}{whole}"


def columns_needed(rewards: Sequence[Any]) -> dict[str, str]:
    """Return the columns that rows must have, each with a reward that needs it. User functions are loaded to inspect their arguments."""
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
    """Return a reward's fields for a worker process."""
    spec = with_pickled(reward.model_dump(), index=index)
    # An error that the function raises may contain these values, so they are redacted before it is shown.
    remember(os.environ.get(name, "") for name in spec.get("env", ()))
    return spec


def reward_names(rewards: Sequence[Any]) -> list[str]:
    """Return one name per reward: its type or its function's name. Repeated names get #2, #3."""
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
