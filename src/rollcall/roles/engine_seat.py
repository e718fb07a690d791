"""The engine of a rollout process as the controller's router sees it: requests in, results out, a moment at a time.

The engine gets as many requests as it can decode at once. The others wait here, and can be given back to the router for a
worker that is idle.

An update changes the parameters that a collocated engine reads. Until the engine has the new version it decodes nothing
(``hold``): its tokens would come from weights that do not match their version.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rollcall.engine.protocol import Ended, Engine, Finished, Request
from rollcall.engine.vllm.engine import VllmEngine


class CountingEngine(Engine, Protocol):
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What an engine did since it was last asked."""

    finished: list[Finished]
    ended: list[Ended]  # of requests that go on
    returned: list[str]  # requests not started, given back as asked
    num_waiting: int  # requests not started that are still here
    num_preemptions: int
    held_at: int | None  # it waits for a version newer than this


class EngineSeat:
    """``room`` is how many completions the engine decodes at once."""

    def __init__(self, engine: CountingEngine, *, room: int) -> None:
        self.engine = engine
        self._room = room
        self._waiting: deque[Request] = deque()
        self._begun: dict[str, int] = {}  # request -> its completions
        self._preemptions_seen = 0
        self._held_at: int | None = None
        self.served: int | None = None  # the version that the engine was last given

    def hold(self) -> None:
        """The parameters are about to change: decode nothing until the engine is told their version."""
        self._held_at = self.engine.version

    def serve(self, version: int) -> None:
        """The parameters are whole: sample from this version. An engine that does already keeps its cache."""
        if version != self.served:
            self.engine.update_weights(version)
        self._held_at, self.served = None, version

    def load(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Give weights that come one by one to an engine that keeps them elsewhere; ``serve_loaded`` follows once they are checked."""
        assert isinstance(self.engine, VllmEngine), "only vLLM keeps weights of its own"
        self.served = None  # if it breaks off, the same version has to come again
        self.engine.load_weights(version, tensors)

    def serve_loaded(self, version: int) -> None:
        self._held_at, self.served = None, version

    def advance(
        self,
        requests: Sequence[Request],
        aborted: Sequence[str],
        *,
        give_back: int,
        look_s: float,
        ended: Sequence[str] = (),
    ) -> Advance:
        """Take requests in, and decode until one is finished or ``look_s`` has passed. ``ended``: sessions."""
        self._waiting.extend(requests)
        returned = [self._waiting.pop().id for _ in range(min(give_back, len(self._waiting)))]
        self._begin(aborted)
        for request_id in aborted:
            self.engine.abort(request_id)
        for session in ended:
            self.engine.end_session(session)
        if self._held_at != self.engine.version:
            self._held_at = None
        finished: list[Finished] = []
        until = time.monotonic() + look_s
        while self._held_at is None and self.engine.num_unfinished and not finished and time.monotonic() < until:
            finished = self.engine.poll()
        for item in finished:
            del self._begun[item.request_id]
        self._begin()
        new = self.engine.num_preemptions - self._preemptions_seen
        self._preemptions_seen += new
        return Advance(
            finished=finished,
            ended=self.engine.take_ended(),
            returned=returned,
            num_waiting=len(self._waiting),
            num_preemptions=new,
            held_at=self._held_at,
        )

    def _begin(self, at_once: Sequence[str] = ()) -> None:
        """Give the engine what it has room for, and the requests ``at_once`` in any case."""
        left: deque[Request] = deque()
        for request in self._waiting:
            size, used = len(request.seeds), sum(self._begun.values())
            if request.id in at_once or (not left and (not used or used + size <= self._room)):
                self.engine.submit(request)
                self._begun[request.id] = size
            else:
                left.append(request)
        self._waiting = left
