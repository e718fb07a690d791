"""The weighted sum of a run's rewards over the completions of a prompt, with every failure counted and shown.

Rewards that are functions run in worker processes (pool.py), and services are asked for theirs (``judge``, ``http``) in a thread
(asker.py). Those that need a model (``self_certainty``, ``model``) are called here, while the workers are busy. A
reward that fails adds 0, and its reason rides on the Score. A function of TRL's that declines adds 0; if all decline, the Score says so.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rollcall.errors import WorkerLostError
from rollcall.redact import redact, remember
from rollcall.reward.asker import ASKED_TYPES, Asker
from rollcall.reward.functions import PROCESS_TYPES
from rollcall.reward.given import with_pickled
from rollcall.reward.pool import RewardPool
from rollcall.reward.trl import lists_of
from rollcall.reward.worker import ASYNC_GRACE_S, FailureKind, Item, RewardResult, checked
from rollcall.stop import heeded
from rollcall.types import Completion, EndReason, Episode, Group, Prompt, Score
from rollcall.wait import warn
from rollcall.words import all_of

ModelRewardFunction = Callable[[Prompt, tuple[Completion, ...]], list[float]]
AskModel = Callable[..., Awaitable[Any]]
"""Calls a function with its arguments where it does not hold up the event loop."""

ENVIRONMENT = "environment"  # the reward that comes with an episode
_COLUMNS = {"countdown": ("numbers", "target"), "reasoning_gym": ("reasoning_gym",)}
_MAX_FAILURES_KEPT = 3  # for each reward and kind of failure
_MAX_LINES_TOLD = 25  # of a traceback
_STOP_LOOK_S = 0.5  # between two looks whether to stop while a service is away


@dataclass(slots=True)
class Counts:
    """What became of a reward's items so far."""

    scored: int = 0
    raised: int = 0
    hung: int = 0
    nan: int = 0  # NaN, infinite or not a number
    died: int = 0  # took its process down

    @property
    def failed(self) -> int:
        return self.raised + self.hung + self.nan + self.died


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One item that could not be scored, for display."""

    reward: str
    kind: FailureKind
    prompt_id: str
    completion: str
    why: str  # with the user's own traceback where there is one


@dataclass(slots=True)
class _Job:
    prompt: Prompt
    completions: tuple[Completion, ...]
    parts: list[dict[str, float]]
    errors: list[dict[str, str]]
    notes: list[dict[str, str]]


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
        specs: dict[int, dict[str, Any]] = {}
        asked: dict[int, Any] = {}
        for index, reward in enumerate(self._rewards):
            if reward.type in PROCESS_TYPES:
                specs[index] = _spec(reward, index=index)
            elif reward.type in ASKED_TYPES:
                asked[index] = reward
            elif reward.type != ENVIRONMENT and index not in self._model_rewards:
                raise ValueError(f"reward.{index} ({reward.type}) runs in this process; give model_rewards[{index}]")
        self.counts = {name: Counts() for name in self.names}
        self.failures: list[Failure] = []
        self._kept: Counter[tuple[str, str]] = Counter()
        self._process_rewards = list(specs)
        self._own_rewards = [index for index, reward in enumerate(self._rewards) if reward.type == ENVIRONMENT]
        self._asked_rewards = list(asked)
        self._asker = Asker(asked) if asked else None
        try:
            self._pool = RewardPool(specs, num_workers=num_workers) if specs else None
        except BaseException:
            if self._asker is not None:
                self._asker.close()
            raise
        self._kinds = self._pool.kinds if self._pool else {}
        self._trl = self._pool.trl if self._pool else {}
        self._said_unused = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._asker is not None:
            self._asker.close()
        if self._pool is not None:
            self._pool.close()

    @property
    def in_force(self) -> dict[str, dict[str, str]]:
        """What confines each reward's processes on this machine, by thing; rewards that run in this process are not there."""
        return {self.names[index]: told for index, told in (self._pool.in_force if self._pool else {}).items()}

    @property
    def environment_readers(self) -> list[str]:
        """Rewards that read attributes of the environments."""
        return [self.names[index] for index, names in self._trl.items() if "environments" in names]

    @property
    def asks_models(self) -> bool:
        """Whether ``score`` calls a model."""
        return bool(self._model_rewards)

    async def score(
        self, prompt: Prompt, completions: tuple[Completion, ...], *, ask_model: AskModel | None = None
    ) -> tuple[Score, ...]:
        """The scores of a group's completions. Models are called in the event loop, or by ``ask_model``."""
        job = _Job(
            prompt=prompt,
            completions=completions,
            parts=[{} for _ in completions],
            errors=[{} for _ in completions],
            notes=[{} for _ in completions],
        )
        items = list(self._begin_items(job)) if completions else []
        asked = [asyncio.ensure_future(self._ask(job, index)) for index in self._asked_rewards] if completions else []
        under_way = [*(done for _, _, done in items), *asked]
        try:
            for index in self._own_rewards:
                for place, completion in enumerate(completions):
                    self._record(job, environment_reward(completion), place=place, index=index)
            if under_way and self._model_rewards:
                await asyncio.sleep(0)  # the workers begin
            for index in self._model_rewards:
                call = self._call_model_reward
                results = await ask_model(call, index, job) if ask_model is not None else call(index, job)
                for place, result in enumerate(results):
                    self._record(job, result, place=place, index=index)
            await asyncio.gather(*under_way)
        except BaseException:
            for one in under_way:
                one.cancel()
            raise
        for index, places, done in items:
            for place, result in zip(places, done.result(), strict=True):
                self._record(job, result, place=place, index=index)
        return self._scores_of(job)

    def _begin_items(self, job: _Job) -> Iterator[tuple[int, list[int], asyncio.Future[list[RewardResult]]]]:
        """Reward, places in the group, and what will be their results: an item for each completion, or one for all of them where the
        reward takes groups."""
        for index in self._process_rewards:
            assert self._pool is not None
            kind, limit_s = self._kinds.get(index), self._rewards[index].timeout_s
            limit_s += ASYNC_GRACE_S if kind == "async" else 0
            places = list(range(len(job.completions)))
            prompt, lists = job.prompt, None
            if index in self._trl:
                # An environment that failed has left nothing to read, and its episode scores 0.
                places = [place for place in places if not _has_failed(job.completions[place])]
                for place in sorted(set(range(len(job.completions))) - set(places)):
                    self._record(job, RewardResult(0.0), place=place, index=index)
                if not places:
                    continue
                lists = lists_of(prompt, [job.completions[place] for place in places])
            for group in [places] if kind else [[place] for place in places]:
                texts = [job.completions[place].text for place in group]
                item = Item(index, prompt.text, texts if kind else texts[0], prompt.answer, prompt.metadata, lists)
                yield index, group, self._pool.score(item, timeout_s=limit_s)

    async def _ask(self, job: _Job, index: int) -> None:
        assert self._asker is not None
        asking = asyncio.ensure_future(self._asker.ask(index, job.prompt, job.completions))
        try:
            while not (await asyncio.wait({asking}, timeout=_STOP_LOOK_S))[0]:
                if self._asker.is_waiting:
                    heeded().check()  # a step whose service is away does not end by itself
        finally:
            asking.cancel()
        for place, verdict in enumerate(asking.result()):
            if verdict.note:
                job.notes[place][self.names[index]] = verdict.kept_note
            self._record(job, verdict.result, place=place, index=index)

    def _call_model_reward(self, index: int, job: _Job) -> list[RewardResult]:
        completions = job.completions
        try:
            values = self._model_rewards[index](job.prompt, completions)
            if len(values) != len(completions):
                raise ValueError(f"returned {len(values)} scores for {len(completions)} completions")
        except WorkerLostError:
            raise  # says nothing of the completion, which another attempt scores
        except Exception:  # noqa: BLE001 - a model may fail in any way; it is counted, and the run goes on
            return [RewardResult(0.0, "raised", traceback.format_exc())] * len(completions)
        return [checked(value) for value in values]

    def _record(self, job: _Job, result: RewardResult, *, place: int, index: int) -> None:
        kind = result.kind
        name, why = self.names[index], redact(result.why) if result.why else ""
        if result.value is not None:
            job.parts[place][name] = result.value
        counts = self.counts[name]
        setattr(counts, kind or "scored", getattr(counts, kind or "scored") + 1)
        if kind:
            job.errors[place][name] = _short(kind, why)
            self._keep(job, kind, why, name=name, place=place)

    def _keep(self, job: _Job, kind: FailureKind, why: str, *, name: str, place: int) -> None:
        self._kept[name, kind] += 1
        if self._kept[name, kind] <= _MAX_FAILURES_KEPT:
            text = job.completions[place].text
            self.failures.append(
                Failure(reward=name, kind=kind, prompt_id=job.prompt.id, completion=text, why=why.rstrip())
            )

    def _scores_of(self, job: _Job) -> tuple[Score, ...]:
        for place, completion in enumerate(job.completions if not self._own_rewards else ()):
            if completion.episode is not None and completion.episode.reward is not None and not self._said_unused:
                self._said_unused = True
                warn(
                    "the environment gives a reward that the run does not use: add {type: environment} to reward, or leave reward out"
                )
            if _has_failed(completion):
                failed = environment_reward(completion)
                self._keep(job, failed.kind, failed.why, name=ENVIRONMENT, place=place)
        weights = {name: reward.weight for name, reward in zip(self.names, self._rewards, strict=True)}
        return tuple(
            _failed_score(weights, completion.episode)
            if completion.episode is not None and completion.episode.error
            else Score(
                value=sum(weight * parts.get(name, 0.0) for name, weight in weights.items()),
                parts={name: parts.get(name, 0.0) for name in weights},
                errors=errors,
                notes=notes,
                is_given=bool(parts),
            )
            for parts, errors, notes, completion in zip(job.parts, job.errors, job.notes, job.completions, strict=True)
        )


def _has_failed(completion: Completion) -> bool:
    """Whether its environment did."""
    return completion.episode is not None and bool(completion.episode.error)


def environment_reward(completion: Completion) -> RewardResult:
    """What an episode's environment gave, at its end and along the way."""
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


def _failed_score(names: Iterable[str], episode: Episode) -> Score:
    """Of an episode whose environment failed: 0, whatever the other rewards say of its text."""
    kind = "hung" if episode.ended is EndReason.TIMEOUT else "raised"
    why = redact(episode.error).strip()
    return Score(value=0.0, parts=dict.fromkeys(names, 0.0), errors={ENVIRONMENT: f"{kind}: {_headline(why)}"})


def why_unscored(groups: Sequence[Group], *, reward: str, scorer: Scorer) -> str:
    """What to tell of a reward that failed on every completion of these groups: how, and the first failure whole."""
    scores = [score for group in groups for score in group.scores]
    told = scores[0].errors[reward]
    # An evaluation may have failed before, in another way.
    first = next(
        (one.why for one in scorer.failures if one.reward == reward and _short(one.kind, one.why) == told), told
    )
    kinds = Counter(score.errors[reward].partition(":")[0] for score in scores)
    how = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    lines = first.strip().splitlines()
    shown = lines if len(lines) <= _MAX_LINES_TOLD else ["...", *lines[-_MAX_LINES_TOLD:]]
    what = "environment" if reward == ENVIRONMENT else f"reward {reward}"
    whole = "\n".join(f"  {line}" for line in shown)
    return f"the {what} failed on {all_of(len(scores), 'completion')} ({how}). The first failure:\n{whole}"


def columns_needed(rewards: Sequence[Any]) -> dict[str, str]:
    """The columns that rows must have, each with the name of a reward that needs it. Functions are loaded, to see what they take."""
    specs = {index: _spec(reward, index=index) for index, reward in enumerate(rewards) if reward.type == "function"}
    needs: dict[int, list[str]] = {}
    if specs:
        with RewardPool(specs, num_workers=1) as pool:
            needs = pool.needs
    found: dict[str, str] = {}
    for index, (name, reward) in enumerate(zip(reward_names(rewards), rewards, strict=True)):
        reads_answer = reward.type in ("exact", "number", "math") or "{answer}" in getattr(reward, "rubric", "")
        for column in needs.get(index, ["answer"] if reads_answer else _COLUMNS.get(reward.type, ())):
            found.setdefault(column, name)
    return found


def _spec(reward: Any, *, index: int) -> dict[str, Any]:
    """What a worker process gets of a reward."""
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
    what = _headline(why) if kind == "raised" else why.partition("\n")[0]
    return f"{kind}: {what}"


def _headline(why: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line for line in why.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    return lines[-1] if lines else why
