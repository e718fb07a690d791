"""Rewards that a service gives (``judge``, ``http``): many questions at once, in a separate thread with its own event loop.

So the run's event loop decodes while questions wait for their answers, and answers arrive while it decodes. An error that ends all asking
(a service that stays away) is raised in the caller.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Mapping
from contextlib import AsyncExitStack

from rollcall.base.types import Completion, Prompt
from rollcall.config.rewards import AskedReward, HttpReward, JudgeReward
from rollcall.reward.endpoint import Endpoint, EndpointLostError, Problem
from rollcall.reward.judge import Judge
from rollcall.reward.services import HttpService, Question
from rollcall.reward.worker import RewardResult

ASKED_TYPES = ("judge", "http")


class Asker:
    """Asks for the rewards in ``sections``, by their place in the run file's list."""

    def __init__(self, sections: Mapping[int, AskedReward]) -> None:
        self._services = {place: _service(section) for place, section in sections.items()}
        self._endpoints = {
            place: Endpoint(section, url=self._services[place].url, what=self._services[place].what, place=place)
            for place, section in sections.items()
        }
        self._failure: Exception | None = None  # of opening the endpoints
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

    async def ask(self, place: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[RewardResult]:
        """The results of the reward at this place on a group's completions."""
        asking = asyncio.run_coroutine_threadsafe(self._ask(place, prompt, completions), self._loop)
        return await asyncio.wrap_future(asking)

    def close(self) -> None:
        """Ask no more; what is unanswered is dropped."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(5.0)

    async def _run(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncExitStack() as stack:
            try:
                for endpoint in self._endpoints.values():
                    await endpoint.open(stack)
            except Exception as error:  # noqa: BLE001 - the first question raises it
                self._failure = error
            finally:
                self._is_open.set()
            await self._ended.wait()
            asking = asyncio.all_tasks() - {asyncio.current_task()}
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, place: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[RewardResult]:
        if self._failure is not None:
            raise self._failure
        try:
            questions = self._services[place].questions(prompt, completions)
        except Exception:  # noqa: BLE001 - a column that JSON does not take, for one
            return [RewardResult(0.0, "raised", traceback.format_exc())] * len(completions)
        answers = await asyncio.gather(*(self._answer(place, one) for one in questions))
        return [result for answer in answers for result in answer]

    async def _answer(self, place: int, question: Question) -> list[RewardResult]:
        try:
            return question.read(await self._endpoints[place].ask(question.body))
        except EndpointLostError:
            raise
        except Problem as problem:
            return [RewardResult(0.0, problem.kind, str(problem))] * question.count
        except Exception:  # noqa: BLE001 - counted like any failure of a reward, and the run continues
            return [RewardResult(0.0, "raised", traceback.format_exc())] * question.count


def _service(section: AskedReward) -> Judge | HttpService:
    if isinstance(section, JudgeReward):
        return Judge(section)
    assert isinstance(section, HttpReward), f"no service gives the reward {type(section).__name__}"
    return HttpService(section)
