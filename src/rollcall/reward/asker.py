"""Rewards that a service gives (``judge``, ``http``): many questions at once, in a thread of its own with its event loop.

``submit`` returns at once and ``poll`` gives what was answered, so decoding goes on while questions wait for their answers. One
thread at a time calls them. What ends all asking (a service that stays away) is raised by ``poll``.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

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
    """Asks for the rewards in ``sections``, by their place in the run file's list. An owner is the caller's: it comes back with
    the place in the group, the reward's place and the verdict."""

    def __init__(self, sections: Mapping[int, AskedReward]) -> None:
        self._asked = {place: _asked(section) for place, section in sections.items()}
        self._endpoints = {
            place: Endpoint(section, url=self._asked[place].url, what=self._asked[place].what, place=place)
            for place, section in sections.items()
        }
        self._done: queue.SimpleQueue[tuple[Any, int, int, Verdict] | Exception] = queue.SimpleQueue()
        self._num_unfinished = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="judges", daemon=True)
        self._thread.start()
        self._is_open.wait()

    @property
    def num_unfinished(self) -> int:
        """Verdicts that ``poll`` has not given."""
        return self._num_unfinished

    @property
    def is_waiting(self) -> bool:
        """Whether some service answers nothing, and its questions wait until it does."""
        return any(endpoint.is_out for endpoint in self._endpoints.values())

    def submit(self, place: int, owner: Any, prompt: Prompt, completions: tuple[Completion, ...]) -> None:
        self._num_unfinished += len(completions)
        self._loop.call_soon_threadsafe(self._begin, place, owner, prompt, completions)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Any, int, int, Verdict]]:
        """What was answered so far: owner, place in the group, place of the reward, verdict. Waits up to ``timeout_s`` for the
        first."""
        found: list[tuple[Any, int, int, Verdict]] = []
        until_s = time.monotonic() + timeout_s
        while self._num_unfinished:
            wait_s = 0.0 if found else until_s - time.monotonic()
            try:
                one = self._done.get(timeout=wait_s) if wait_s > 0 else self._done.get_nowait()
            except queue.Empty:
                break
            if isinstance(one, Exception):
                self._done.put(one)  # nothing will be answered from here on
                raise one
            self._num_unfinished -= 1
            found.append(one)
        return found

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
            except Exception as error:  # noqa: BLE001 - the caller gets it from poll
                self._done.put(error)
            finally:
                self._is_open.set()
            await self._ended.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, place: int, owner: Any, prompt: Prompt, completions: tuple[Completion, ...]) -> None:
        try:
            questions = self._asked[place].questions(prompt, completions)
        except Exception:  # noqa: BLE001 - a column that JSON does not take, for one
            failed = Verdict(RewardResult(0.0, "raised", traceback.format_exc()))
            for number in range(len(completions)):
                self._done.put((owner, number, place, failed))
            return
        for question in questions:
            task = self._loop.create_task(self._answer(place, owner, question))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, place: int, owner: Any, question: Question) -> None:
        try:
            verdicts = question.read(await self._endpoints[place].ask(question.body))
        except EndpointLostError as error:
            self._done.put(error)
            return
        except Problem as problem:
            verdicts = [Verdict(RewardResult(0.0, problem.kind, str(problem)))] * question.count
        except Exception:  # noqa: BLE001 - counted like any failure of a reward, and the run goes on
            verdicts = [Verdict(RewardResult(0.0, "raised", traceback.format_exc()))] * question.count
        for number, verdict in enumerate(verdicts, start=question.first):
            self._done.put((owner, number, place, verdict))


def _asked(section: AskedReward) -> Asked:
    if isinstance(section, JudgeReward):
        return Judge(section)
    assert isinstance(section, HttpReward), f"no service gives the reward {type(section).__name__}"
    return HttpService(section)
