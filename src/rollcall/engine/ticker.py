"""Turns a core in this process into an ``Engine``. ``exchange`` steps a core for a router in another process.

While there are requests, one task steps the core in the event loop's thread. It also decides how turns are batched. Fast environments
send their next turns within moments. It costs far less to fill and decode these turns together than one by one. So the task waits while
turns keep arriving, but gives up after a long pause, or after a fraction of the time that it spent decoding. With slow environments, only
one pause is wasted. Episodes that begin together stay in step, so an idle engine also waits for their first turns.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollcall.base.types import Completion
from rollcall.engine.protocol import LOCAL, Core, Made, Refused, Request, Stats

QUIET_S, QUIET_SHARE, GATHER_SHARE = 0.002, 0.05, 0.5
FIRST_QUIET_S, FIRST_GATHER_S, BURST = 0.005, 0.2, 8


class Ticker:
    def __init__(self, core: Core, *, max_running: int) -> None:
        """``max_running``: how many completions the core decodes at once."""
        self.core = core
        self._max_running = max_running
        self._asked: dict[str, tuple[Request, asyncio.Future[Completion]]] = {}
        self._num_turns = 0  # open requests with a session
        self._sessions: set[str] = set()  # sessions that have not ended
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()  # a request arrived or ended
        self._idle = asyncio.Event()  # there are no requests
        self._idle.set()
        self._open = asyncio.Event()  # new requests are accepted
        self._open.set()
        self._is_still = False
        self._failure: Exception | None = None
        self._busy_s, self._num_tokens, self._preemptions_seen = 0.0, 0, 0

    @property
    def version(self) -> int:
        return self.core.version

    async def generate(self, request: Request) -> Made:
        while not self._open.is_set():
            await self._open.wait()
        if self._failure is not None:
            raise self._failure
        self.core.submit(request)
        done = asyncio.get_running_loop().create_future()
        self._asked[request.id] = request, done
        self._num_turns += request.session is not None
        self._idle.clear()
        self._wake()
        try:
            return Made(completion=await done, worker=LOCAL)
        finally:
            if request.id in self._asked:  # cancelled
                self._forget(request.id)
                self.core.abort(request.id)

    async def pause(self, *, drain: bool) -> None:
        self._open.clear()
        while drain and not self._idle.is_set():
            await self._idle.wait()
        self._is_still = True
        self.core.settle()

    async def serve(self, version: int) -> None:
        self.core.update_weights(version)
        self._is_still = False
        self._open.set()
        if self._asked:
            self._wake()

    def begin_session(self, session: str) -> None:
        self._sessions.add(session)

    def end_session(self, session: str) -> None:
        self._sessions.discard(session)
        self.core.end_session(session)
        self._news.set()  # this session will have no next turn

    def take_stats(self) -> Stats:
        num_preemptions = self.core.num_preemptions - self._preemptions_seen
        stats = Stats(busy_s=self._busy_s, num_tokens=self._num_tokens, num_preemptions=num_preemptions)
        self._busy_s, self._num_tokens, self._preemptions_seen = 0.0, 0, self.core.num_preemptions
        return stats

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.core.close()

    def _wake(self) -> None:
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        """Step the core until there are no requests or the engine is paused."""
        try:
            if self._num_turns:
                await self._gather(math.inf, quiet_s=FIRST_QUIET_S, most_s=FIRST_GATHER_S, burst=BURST)
            while True:
                await asyncio.sleep(0)  # a caller may send its next request as soon as it has its answer
                if self._is_still or not self._asked:
                    return
                num_turns, started = self._num_turns, time.perf_counter()
                ended = self.core.step()
                decoded_s = time.perf_counter() - started
                self._busy_s += decoded_s
                for request_id, completion in ended.items():
                    self._num_tokens += len(completion.token_ids)
                    done = self._forget(request_id)
                    if not done.cancelled():
                        done.set_result(completion)
                await self._gather(
                    num_turns - self._num_turns,
                    quiet_s=max(QUIET_S, QUIET_SHARE * decoded_s),
                    most_s=GATHER_SHARE * decoded_s,
                )
        except Exception as error:  # noqa: BLE001 - raised in all current and later callers
            self._failure = error
            for done in [self._forget(request_id) for request_id in list(self._asked)]:
                if not done.cancelled():
                    done.set_exception(error)

    def _forget(self, request_id: str) -> asyncio.Future[Completion]:
        request, done = self._asked.pop(request_id)
        self._num_turns -= request.session is not None
        if not self._asked:
            self._idle.set()
        self._news.set()
        return done

    async def _gather(self, count: float, *, quiet_s: float, most_s: float, burst: int = 1) -> None:
        """Wait for ``count`` more requests, but stop when there are as many requests as sessions, or as many as the core decodes at once.
        Also stop when no request has arrived for a while. This pause is ``quiet_s`` at first. It grows with the number of requests to at
        most ``burst`` times as long, because the more requests have arrived, the more are likely to follow."""
        wanted = min(len(self._asked) + count, self._max_running)
        until = time.perf_counter() + most_s
        while (num_there := len(self._asked)) < min(wanted, len(self._sessions) or math.inf):
            pause_s, now = quiet_s * min(max(num_there, 1), burst), time.perf_counter()
            if now >= until:
                return
            self._news.clear()
            try:
                async with asyncio.timeout(pause_s):  # wait_for (3.11) may swallow its cancellation
                    await self._news.wait()
            except TimeoutError:
                # After a longer wait, go on: other tasks held up the loop, and requests may be waiting.
                if time.perf_counter() - now < 2 * pause_s:
                    return


@dataclass(slots=True, kw_only=True)
class Exchanged:
    ended: dict[str, Completion] = field(default_factory=dict)  # by request
    refused: dict[str, str] = field(default_factory=dict)  # request -> the reason
    num_waiting: int = 0  # requests that the core has not started
    num_preemptions: int = 0  # since the core was created


def exchange(
    core: Core, new: Sequence[Request], cancelled: Sequence[str], ended_sessions: Sequence[str], *, look_s: float
) -> Exchanged:
    """Answer one call from the router: submit the new requests, then decode until a request has ended or ``look_s`` has passed."""
    answer = Exchanged()
    for request_id in cancelled:
        core.abort(request_id)
    for session in ended_sessions:
        core.end_session(session)
    for request in new:
        try:
            core.submit(request)
        except Refused as error:
            answer.refused[request.id] = str(error)
    until = time.monotonic() + look_s
    while core.num_unfinished and not answer.ended and time.monotonic() < until:
        answer.ended = core.step()
    answer.num_waiting, answer.num_preemptions = core.num_waiting, core.num_preemptions
    return answer
