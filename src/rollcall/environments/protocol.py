"""The interface between environments and the episode loop. An environment opens an episode, answers each turn and returns the
episode's reward.

Any call may be slow, raise or never return. The loop (``episode.py``) therefore sets a deadline for each call. If a call fails or misses
its deadline, only its own episode ends. A program that drives its own episode (``agent.py``) runs until it exits instead.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollcall.base.types import Completion, Ints, ToolCall
from rollcall.base.words import visible
from rollcall.engine.protocol import Sampling

KIND = "environment"  # the column that names a row's environment if there are several; not passed to the class
MOST_METRICS, LONGEST_NAME = 100, 100  # the most metrics per episode; the most characters in a name
DROPPED = "metrics_dropped"  # the episode metric that counts dropped metrics


class EnvironmentFailed(Exception):  # noqa: N818 - an outcome, not a bug in Rollcall
    """The environment raised, died or returned garbage. Its episode ends with this message and a score of 0."""


class EnvironmentLost(Exception):  # noqa: N818 - an outcome, not a bug in Rollcall
    """The node or process that ran the environment is gone. Its episode starts over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message for the chat template."""

    role: str  # "user", "tool" or "system"
    content: str
    name: str = ""  # the tool's name


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    messages: tuple[Message, ...]  # what the model reads next, unless ``done``
    done: bool
    reward: float | None  # for this turn; None if the environment does not reward turns
    metrics: dict[str, float]
    calls: tuple[ToolCall, ...]  # shown to people, not to the model


def add_metrics(known: dict[str, float], new: Mapping[str, float]) -> None:
    """Add an episode's metrics. Names are untrusted data, possibly written by a model. Empty names, names that look the same within a
    call, and names beyond the limit are dropped and counted."""
    taken: set[str] = set()
    for given, value in new.items():
        name = visible(" ".join(given.split()))[:LONGEST_NAME]
        if not name or name in taken or (name not in known and len(known) >= MOST_METRICS):
            known[DROPPED] = known.get(DROPPED, 0.0) + 1
        else:
            taken.add(name)
            known[name] = float(value)


class SampleTurn(Protocol):
    """Samples one completion. Each request in a session extends an earlier one."""

    def __call__(
        self, prompt_ids: Ints, /, *, seed: int, sampling: Sampling, session: str
    ) -> Coroutine[Any, Any, Completion]: ...


class Environment(ABC):
    """Plays one episode at a time, from ``reset`` to ``reward``. Afterwards it may be reset for the next episode."""

    @abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """Call the process in which the environment runs, or the host of that process."""

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin an episode for this row. The returned text is added to the row's prompt, or is the full prompt if there is no data."""
        return await self.call("reset", dict(row))

    async def step(self, text: str, token_ids: Sequence[int]) -> StepResult:
        """Answer the model's turn."""
        return await self.call("step", text, list(token_ids))

    async def reward(self) -> float | None:
        """Return the episode's reward, or None if it leaves that to other rewards. Called once after the last step."""
        return await self.call("reward")

    async def attributes(self) -> dict[str, Any]:
        """Return the attributes that the user's object has after the episode, except those that JSON cannot represent."""
        return await self.call("attributes")

    @abstractmethod
    async def close(self, *, broken: bool) -> None:
        """End the episode. ``broken`` means that a call failed or was abandoned, so whatever is still running is killed."""


class Host(Protocol):
    """Starts one environment. ``kind`` is the row's `environment` column, or empty if there is only one kind."""

    async def start(self, kind: str) -> Environment: ...


class Environments(Protocol):
    """Provides the hosts on which environments start."""

    async def find_host(self) -> Host:
        """Find a host for the next episode. Wait while all hosts are lost. The wait does not count towards any episode limit."""
        ...

    def tools_of(self, kind: str) -> tuple[dict[str, Any], ...]:
        """Return the tool schemas for this kind of environment, in the format that chat templates expect. Raise ConfigError if the kind
        is unknown."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The outcome of a program. The program and everything it started have exited."""

    how: str  # how it exited, in words; empty for status 0
    stdout: str  # the last part of its output
    stderr: str


class ProgramHost(Protocol):
    """Runs one program."""

    async def run(self, variables: Mapping[str, str], *, stop: asyncio.Event) -> Ended:
        """Run a program until it exits or ``stop`` is set. ``variables`` are set for this episode in addition to the common variables."""
        ...


class Programs(Protocol):
    """Provides the hosts on which programs run."""

    async def find_host(self) -> ProgramHost:
        """Find a host for the next episode. Wait while all hosts are lost. The wait does not count towards any episode limit."""
        ...

    def ends(self) -> None:
        """Announce that the run is about to end. From now on, lost hosts are not replaced."""

    async def aclose(self) -> None:
        """Stop everything that the programs need."""
