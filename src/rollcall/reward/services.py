"""Rewards from services: a judge, or the user's own service (``http``), which receives completions and returns scores as JSON.

``Asker`` sends many requests concurrently from a thread with its own event loop, so answers arrive while the run's event loop decodes.
An error that affects all requests (a service that stays down) is raised in the caller.
"""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rollcall.base.types import Completion, Prompt
from rollcall.config.rewards import HttpReward, JudgeReward
from rollcall.reward.endpoint import (
    Endpoint,
    EndpointLostError,
    Problem,
    Question,
    failed,
    read_json,
)
from rollcall.reward.judge import Judge
from rollcall.reward.worker import RewardResult, checked

ASKED_TYPES = ("judge", "http")


class Asker:
    """Requests the rewards in ``sections``, which are keyed by index in the run file's list."""

    def __init__(self, sections: Mapping[int, JudgeReward | HttpReward]) -> None:
        self._services = {
            place: Judge(section) if isinstance(section, JudgeReward) else HttpService(section)
            for place, section in sections.items()
        }
        self._endpoints = {
            place: Endpoint(section, url=self._services[place].url, what=self._services[place].what, place=place)
            for place, section in sections.items()
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()

    @property
    def is_waiting(self) -> bool:
        """Whether any service is down and its questions are waiting for it."""
        return any(endpoint.is_out for endpoint in self._endpoints.values())

    async def ask(self, place: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[RewardResult]:
        """Return the results for a group's completions from the reward at index ``place``."""
        asking = asyncio.run_coroutine_threadsafe(self._ask(place, prompt, completions), self._loop)
        return await asyncio.wrap_future(asking)

    def close(self) -> None:
        """Stop and drop unanswered questions."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._thread.join(5.0)

    async def _end(self) -> None:
        asking = asyncio.all_tasks() - {asyncio.current_task()}
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for endpoint in self._endpoints.values():
            await endpoint.close()
        self._loop.stop()

    async def _ask(self, place: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[RewardResult]:
        questions = self._services[place].questions(prompt, completions)
        answers = await asyncio.gather(*(self._answer(place, one) for one in questions))
        return [result for answer in answers for result in answer]

    async def _answer(self, place: int, question: Question) -> list[RewardResult]:
        try:
            return question.read(await self._endpoints[place].ask(question.body))
        except EndpointLostError:
            raise
        except Problem as problem:
            return [RewardResult(0.0, problem.kind, str(problem))] * question.count
        except Exception:  # noqa: BLE001 - counted like any reward failure, and the run continues
            return [RewardResult(0.0, "raised", traceback.format_exc())] * question.count


class HttpService:
    what = "the reward service"

    def __init__(self, section: HttpReward) -> None:
        self._section = section
        self.url = section.url

    def questions(self, prompt: Prompt, completions: tuple[Completion, ...]) -> list[Question]:
        """Return the questions, in the order of the completions."""
        texts = [completion.text for completion in completions]
        if self._section.whole_group:
            return [_question(prompt, len(texts), completions=texts)]
        return [_question(prompt, 1, completion=text) for text in texts]


def _question(prompt: Prompt, count: int, **completions: Any) -> Question:
    body = {"prompt": prompt.text, **completions, "answer": prompt.answer, "metadata": prompt.metadata}
    return Question(count=count, body=json.dumps(body).encode(), read=partial(read_scores, count=count))


def read_scores(said: bytes, *, count: int) -> list[RewardResult]:
    """Parse one result per completion."""
    try:
        scores, notes = _scores_in(read_json(said), count=count)
    except ValueError as error:
        return [failed(f"the answer of the reward service cannot be used: {error}")] * count
    return [replace(checked(score), note=note) for score, note in zip(scores, notes, strict=True)]


def _scores_in(answer: Any, *, count: int) -> tuple[list[Any], list[str]]:
    if not isinstance(answer, dict):
        answer = {"scores": answer} if isinstance(answer, list) else {"score": answer}
    scores = answer.get("scores", [answer["score"]] if "score" in answer else None)
    if not isinstance(scores, list):
        raise ValueError('it has no "scores"; answer {"scores": [...]}, or a number for one completion')
    if len(scores) != count:
        raise ValueError(f"it has {len(scores)} scores for {count} completions")
    notes = answer.get("notes", [answer["note"]] if "note" in answer else [""] * count)
    if not isinstance(notes, list) or len(notes) != count or not all(isinstance(note, str) for note in notes):
        raise ValueError(f'its "notes" are not a list of {count} strings')
    return scores, notes
