"""What every engine is: submit, poll, abort, take new weights. The contract test in tests/engine_contract.py holds
each implementation to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollcall.types import Completion, Ints


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
    """A prompt and one seed for each completion. Only the seeds decide the draws, not what else is in the batch.

    Requests of one ``session`` extend each other: the prompt of a later one holds all tokens so far. The engine may keep their
    KV from one to the next, so that it computes only what is new; the results are the same without.
    """

    id: str
    prompt_ids: Ints
    seeds: tuple[int, ...]
    sampling: Sampling
    session: str | None = None  # with one seed only
    adapter: str | None = None  # by its name in the engine; None: the one that is trained, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All completions of a request, in the order of its seeds."""

    request_id: str
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One completion of a request whose other completions go on."""

    request_id: str
    place: int  # of its seed in the request
    completion: Completion


class Engine(Protocol):
    @property
    def version(self) -> int:
        """Weight version that the next token will be sampled from."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not yet returned."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. Refuses one that could never fit the KV cache."""
        ...

    def poll(self) -> list[Finished]:
        """Decode a little further and return the requests that finished; empty when there is nothing to do."""
        ...

    def take_ended(self) -> list[Ended]:
        """What has ended of requests that go on, each completion once. ``poll`` returns it again with its request."""
        ...

    def abort(self, request_id: str) -> None:
        """Take a request back; its completions so far come with finish reason ABORT at the next poll."""
        ...

    def update_weights(self, version: int) -> None:
        """The parameters this engine reads have changed: drop what was computed from the old ones."""
        ...

    def end_session(self, session: str) -> None:
        """No request of this session comes any more: free what is kept for it. Unknown ones are fine."""
        ...
