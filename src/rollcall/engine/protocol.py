"""The loop's view of an engine: a request is one completion. To generate is to await, to cancel is to abort.

``Ticker`` (``engine/ticker.py``) makes an ``Engine`` of the ``Core`` in this process; ``Engines`` (``run/engines.py``) of the cores in
other processes. The contract tests in tests/generate_contract.py and tests/engine_contract.py hold each implementation to this.
"""

from __future__ import annotations

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
    """One completion to make. Only its seed decides the draws, not what else is in the batch.

    Requests of one ``group`` have the same prompt. They go to one worker together, which computes the prompt once.

    Requests of one ``session`` extend each other: the prompt of a later one holds all tokens so far. The engine may keep their
    KV from one to the next, so that it computes only what is new; the results are the same without.
    """

    id: str
    prompt_ids: Ints
    seed: int
    sampling: Sampling
    # Step, draw, place in the group: the lowest goes out first, and the highest is preempted first. Equal ones go in order of arrival.
    order: tuple[int, int, int] = (0, 0, 0)
    group: str | None = None
    session: str | None = None
    adapter: str | None = None  # its name in the engine; the default is the one that is trained, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    completion: Completion
    worker: str  # the process that made it


class Refused(ValueError):  # noqa: N818 - an outcome, not a defect of ours
    """This request can never be computed. Other requests continue."""


LOCAL = "local"  # the worker of an engine in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """An engine's work since the last call of ``take_stats``."""

    busy_s: float  # while it had requests
    num_tokens: int  # of completions that ended
    num_preemptions: int


class Engine(Protocol):
    @property
    def version(self) -> int:
        """Weight version that the next token will be sampled from."""
        ...

    async def generate(self, request: Request) -> Made:
        """The completion. Raises ``Refused``, or ``WorkerLostError`` when no worker is left that could make it."""
        ...

    async def pause(self, *, drain: bool) -> None:
        """Nothing decodes once this returns. With ``drain``, everything that was asked for before has ended by then. What is asked for
        later waits for ``serve``."""
        ...

    async def serve(self, version: int) -> None:
        """The parameters that this engine reads are those of ``version``: sample from them, and end a pause."""
        ...

    def begin_session(self, session: str) -> None:
        """The first request of this session comes soon. Only the batching of turns depends on it."""
        ...

    def end_session(self, session: str) -> None:
        """No request of this session comes any more: free what is kept for it. Unknown ones are fine."""
        ...

    def take_stats(self) -> Stats: ...

    async def close(self) -> None: ...


class Core(Protocol):
    """The synchronous inside of an engine: it decodes only in ``step``."""

    num_preemptions: int

    @property
    def version(self) -> int: ...

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not yet returned by ``step``."""
        ...

    @property
    def num_waiting(self) -> int:
        """Those of them that it has not begun."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; raises ``Refused`` where it could never be computed."""
        ...

    def step(self) -> dict[str, Completion]:
        """Decode a little further, if there is anything to decode; returns the completions that have ended, by request."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request, whatever it has made. Unknown ones are fine."""
        ...

    def settle(self) -> None:
        """Take in the results of decoding that is ahead of the next ``step``: nothing decodes once this returns."""
        ...

    def update_weights(self, version: int) -> None:
        """The parameters have changed: drop what was computed from the old ones. Running completions continue with the new ones."""
        ...

    def end_session(self, session: str) -> None: ...

    def close(self) -> None: ...
