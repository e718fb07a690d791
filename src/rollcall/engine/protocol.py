"""The interface between the loop and an engine. A request is one completion: await it to generate, cancel it to abort.

``Ticker`` (``engine/ticker.py``) turns a ``Core`` in this process into an ``Engine``; ``Engines`` (``run/engines.py``) does the same for
cores in other processes. The contract tests in tests/generate_contract.py and tests/engine_contract.py check each implementation.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from rollcall.base.types import Completion, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    temperature: float  # 0: greedy
    top_p: float
    top_k: int  # 0: all
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one completion. The completion's random draws depend only on its seed, not on the rest of the batch.

    Requests in the same ``group`` have the same prompt. They all go to the same worker, which computes the prompt once.

    Each request of a ``session`` extends an earlier one, so its prompt contains all tokens so far. The engine may keep the KV between
    requests, so that it computes only the new tokens; this does not change the results.
    """

    id: str
    prompt_ids: Ints
    seed: int
    sampling: Sampling
    # Step, draw and index in the group. Requests with the lowest order are admitted first; those with the highest are preempted first.
    # Requests with the same order keep their order of arrival.
    order: tuple[int, int, int] = (0, 0, 0)
    group: str | None = None
    session: str | None = None
    adapter: str | None = None  # the adapter's name in the engine; by default the trained adapter, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    completion: Completion
    worker: str  # the process that generated it


class Refused(ValueError):  # noqa: N818 - an outcome, not a bug in Rollcall
    """This request can never be computed. Other requests are not affected."""


LOCAL = "local"  # the worker name of an engine in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """An engine's work since the last call to ``take_stats``."""

    busy_s: float  # time during which the engine had requests
    num_tokens: int  # number of tokens in the completions that finished
    num_preemptions: int


class Engine(Protocol):
    @property
    def version(self) -> int:
        """The weight version from which the next token will be sampled."""
        ...

    def generate(self, request: Request) -> Awaitable[Made]:
        """Return the completion. Raise ``Refused``, or ``WorkerLostError`` if no worker is left to generate it."""
        ...

    async def pause(self, *, drain: bool) -> None:
        """Stop decoding: nothing is decoded after this returns. With ``drain``, first wait until all earlier requests have ended. Later
        requests wait for ``serve``."""
        ...

    async def serve(self, version: int) -> None:
        """End a pause, and sample from the engine's current parameters, which have this version."""
        ...

    def begin_session(self, session: str) -> None:
        """Announce that the session's first request will follow soon. This affects only how turns are batched."""
        ...

    def end_session(self, session: str) -> None:
        """Free everything that is kept for the session, because it has no more requests. Do nothing if the session is unknown."""
        ...

    def take_stats(self) -> Stats: ...

    async def close(self) -> None: ...


class Core(Protocol):
    """The synchronous core of an engine. It decodes only in ``step``."""

    num_preemptions: int

    @property
    def version(self) -> int: ...

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have been submitted but not yet returned by ``step``."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of unfinished requests that have not started."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. Raise ``Refused`` if it could never be computed."""
        ...

    def step(self) -> dict[str, Completion]:
        """Decode a little further, if there is anything to decode. Return the finished completions by request ID."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request and its tokens. Do nothing if the request is unknown."""
        ...

    def settle(self) -> None:
        """Collect the results of decoding that runs ahead of the next ``step``. Nothing is being decoded after this returns."""
        ...

    def update_weights(self, version: int) -> None:
        """Drop everything that was computed from the old parameters. Running completions continue with the new parameters."""
        ...

    def end_session(self, session: str) -> None: ...

    def close(self) -> None: ...
