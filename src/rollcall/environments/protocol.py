"""An environment as the loop sees it: it opens an episode, answers each turn, and gives the episode its reward.

Every call may take long, raise or never return. The loop (``episode.py``) puts a deadline around each, and ends only that
episode. A program that drives its own episode (``agent.py``) is run to its end instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollcall.base.types import Completion, Ints, ToolCall
from rollcall.base.words import visible
from rollcall.engine.protocol import Sampling

KIND = "environment"  # the column that names a row's environment, where there are several; its class does not get it
MOST_METRICS, LONGEST_NAME = 100, 100  # of an episode; in characters
DROPPED = "metrics_dropped"  # in the metrics of an episode: how many were left out


class EnvironmentFailed(Exception):  # noqa: N818 - an outcome, not a defect of ours
    """The environment raised, died or returned rubbish. Its episode ends with this text and a score of 0."""


class EnvironmentLost(Exception):  # noqa: N818 - an outcome, not a defect of ours
    """The node or the process that ran the environment is gone. Its episode is played again from its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message for the chat template."""

    role: str  # "user", "tool" or "system"
    content: str
    name: str = ""  # of the tool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    messages: tuple[Message, ...]  # what the model reads next; with ``done`` it reads nothing more
    done: bool
    reward: float | None  # for this turn; None if the environment gives none along the way
    metrics: dict[str, float]
    calls: tuple[ToolCall, ...]  # for people to read


def add_metrics(known: dict[str, float], new: Mapping[str, float]) -> None:
    """Add metrics of an episode. Names are data, perhaps a model's words: an empty one, one that reads like another of the same call, and
    those beyond the limit are dropped and counted."""
    taken: set[str] = set()
    for given, value in new.items():
        name = visible(" ".join(given.split()))[:LONGEST_NAME]
        if not name or name in taken or (name not in known and len(known) >= MOST_METRICS):
            known[DROPPED] = known.get(DROPPED, 0.0) + 1
        else:
            taken.add(name)
            known[name] = float(value)


class SampleTurn(Protocol):
    """Waits for one completion. Requests of one session extend each other."""

    def __call__(
        self, prompt_ids: Ints, /, *, seed: int, sampling: Sampling, session: str
    ) -> Awaitable[Completion]: ...


class Environment(Protocol):
    """One episode at a time, from ``reset`` to ``reward``; then it may be reset for another one."""

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin an episode of this row of the data. What it returns is added to the row's prompt, or is all of it where there is no data."""
        ...

    async def step(self, text: str, token_ids: Sequence[int]) -> StepResult:
        """Answer what the model wrote in its turn."""
        ...

    async def reward(self) -> float | None:
        """The reward of the episode, asked for once after the last step; None if other rewards decide."""
        ...

    async def attributes(self) -> dict[str, Any]:
        """The attributes that the episode left in the object of the user's class, as far as JSON can hold them."""
        ...

    async def close(self, *, broken: bool) -> None:
        """End the episode. ``broken``: a call failed or was given up, so what still runs is killed."""
        ...


class Host(Protocol):
    """A place where one environment starts. ``kind`` is the row's `environment` column; empty: there is only one kind."""

    async def start(self, kind: str) -> Environment: ...


class Environments(Protocol):
    """The source of environments."""

    async def find_host(self) -> Host:
        """For the next episode. Waits while all hosts are lost, and no limit of an episode counts that wait."""
        ...

    def tools_of(self, kind: str) -> tuple[dict[str, Any], ...]:
        """The schemas of a kind's tools, as chat templates take them. ConfigError: there is no such kind."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A program that has ended, with all that it started."""

    how: str  # in words; empty: with status 0
    stdout: str  # its end
    stderr: str


class ProgramHost(Protocol):
    """A place where one program runs."""

    async def run(self, variables: Mapping[str, str], *, stop: asyncio.Event) -> Ended:
        """Run a program to its end, or until ``stop`` is set. ``variables`` are those of the episode; every program gets others too."""
        ...


class Programs(Protocol):
    """The places where programs run: this node or others."""

    async def find_host(self) -> ProgramHost:
        """For the next episode. Waits while all hosts are lost, and no limit of an episode counts that wait."""
        ...

    def ends(self) -> None:
        """Note that the run is about to end: what is lost from now on is not replaced."""
        return

    async def aclose(self) -> None:
        """End what the programs need."""
        return
