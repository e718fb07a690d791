"""Rewards that a service gives (``judge``, ``http``): many questions at once, in a thread of its own with its event loop.

Decoding in the event loop that asks goes on while questions wait for their answers, and they go on while it decodes. What ends all asking
(a service that stays away) is raised by whoever asks.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Protocol

from rollcall.config.rewards import AskedReward, HttpReward, JudgeReward
from rollcall.reward.asked import Question, Verdict
from rollcall.reward.endpoint import Endpoint, EndpointLostError, Problem
from rollcall.reward.http import HttpService
from rollcall.reward.judge import Judge
from rollcall.reward.worker import RewardResult
from rollcall.types import Completion, Prompt

ASKED_TYPES = ("judge", "http")
_CLOSE_S = 5.0


class Asked(Protocol):
    """A reward as questions to an address."""

    what: str
    url: str

    def questions(self, prompt: Prompt, completions: tuple[Completion, ...]) -> list[Question]: ...


class Asker:
    """Asks for the rewards in ``sections``, by their place in the run file's list."""

    def __init__(self, sections: Mapping[int, AskedReward]) -> None:
        self._asked = {place: _asked(section) for place, section in sections.items()}
        self._endpoints = {
            place: Endpoint(section, url=self._asked[place].url, what=self._asked[place].what, place=place)
            for place, section in sections.items()
        }
        self._failure: Exception | None = None  # to open what asks
        self._is_open = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="judges", daemon=True)
        self._thread.start()
        self._is_open.wait()

    @property
    def is_waiting(self) -> bool:
        """Whether some service answers nothing, and its questions wait until it does."""
        return any(endpoint.is_out for endpoint in self._endpoints.values())

    async def ask(self, place: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[Verdict]:
        """The verdicts of the reward at this place on a group's completions."""
        asking = asyncio.run_coroutine_threadsafe(self._ask(place, prompt, completions), self._loop)
        return await asyncio.wrap_future(asking)

    def close(self) -> None:
        """Ask no more; what is unanswered is dropped."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(_CLOSE_S)

    async def _run(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncExitStack() as stack:
            try:
                for endpoint in self._endpoints.values():
                    await endpoint.open(stack)
            except Exception as error:  # noqa: BLE001 - whoever asks gets it
                self._failure = error
            finally:
                self._is_open.set()
            await self._ended.wait()
            asking = asyncio.all_tasks() - {asyncio.current_task()}
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, place: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[Verdict]:
        if self._failure is not None:
            raise self._failure
        try:
            questions = self._asked[place].questions(prompt, completions)
        except Exception:  # noqa: BLE001 - a column that JSON does not take, for one
            return [Verdict(RewardResult(0.0, "raised", traceback.format_exc()))] * len(completions)
        answers = await asyncio.gather(*(self._answer(place, one) for one in questions))
        return [verdict for answer in answers for verdict in answer]  # questions are in the order of the completions

    async def _answer(self, place: int, question: Question) -> list[Verdict]:
        try:
            return question.read(await self._endpoints[place].ask(question.body))
        except EndpointLostError:
            raise
        except Problem as problem:
            return [Verdict(RewardResult(0.0, problem.kind, str(problem)))] * question.count
        except Exception:  # noqa: BLE001 - counted like any failure of a reward, and the run goes on
            return [Verdict(RewardResult(0.0, "raised", traceback.format_exc()))] * question.count


def _asked(section: AskedReward) -> Asked:
    if isinstance(section, JudgeReward):
        return Judge(section)
    assert isinstance(section, HttpReward), f"no service gives the reward {type(section).__name__}"
    return HttpService(section)
