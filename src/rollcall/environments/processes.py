"""Environments in processes of their own, so that user code which hangs, dies or eats memory costs one episode and nothing more.

    ProcessEnvironments --start, end--> zygote (zygote.py) --fork--> a child for each running episode (child.py)
             |                                                          |
             +---- a Worker: calls and answers, as JSON ----------------+

A child is kept when its episode ends, and reset for the next one of its kind; one that failed is killed with all it started. A child that
dies fails its own episode. The zygote's death fails those that run, and the next start makes a new one. The time limit of a call is the
caller's: it gives up, and closes the environment as broken.
"""

from __future__ import annotations

import asyncio
import math
import select
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollcall.environments.children import FILES_OF_CHILD, Setup, Zygote, find_python
from rollcall.environments.protocol import Environment, EnvironmentFailed, Opening, StepResult
from rollcall.environments.results import Failed
from rollcall.errors import ConfigError
from rollcall.observe.prints import ChildPrints
from rollcall.process import allow_files
from rollcall.process.worker import Lost, Raised, Worker
from rollcall.words import visible

START_TIMEOUT_S = 120.0
_COLUMN = "environment"  # names the class where there are several, and is not for that class


class ProcessEnvironments:
    """Implements ``protocol.Environments``. Making it waits for the zygote, so a class that cannot be used is refused here."""

    def __init__(self, setup: Setup, *, max_processes: int, start_timeout_s: float = START_TIMEOUT_S) -> None:
        allow_files(FILES_OF_CHILD * max_processes)
        setup = replace(setup, python=find_python(setup.python))
        self._setup = setup
        self._max_processes = max_processes
        self._start_timeout_s = start_timeout_s
        self._prints = ChildPrints()
        self._idle: dict[str, list[Worker]] = {}
        self._is_closed = False
        self._starting: asyncio.Task[None] | None = None  # in place of one that is gone
        try:
            self._zygote = Zygote(setup, output_fd=self._prints.fd, timeout_s=start_timeout_s)
        except BaseException:
            self._prints.close()
            raise

    @property
    def needs_ids(self) -> bool:
        """Whether a step gets the turn's token ids."""
        return self._setup.type == "step"

    @property
    def pids(self) -> list[int]:
        """The zygote and its children."""
        return [self._zygote.worker.pid, *self._zygote.pids.values()]

    @property
    def tools(self) -> dict[str, list[dict[str, Any]]]:
        """Of each kind."""
        return self._zygote.tools

    def tools_of(self, kind: str) -> tuple[dict[str, Any], ...]:
        return tuple(self.tools[kind_of(kind, self.tools)])

    async def find_host(self) -> ProcessEnvironments:
        return self

    async def start(self, kind: str) -> Environment:
        try:
            name = kind_of(kind, self.tools)
        except ValueError as error:
            raise EnvironmentFailed(str(error)) from None
        await self._attend()
        worker = await self._take(name)
        if worker is None:
            await self._make_room()
            worker = await self._zygote.start(name)
        return _ProcessEnvironment(self, worker, kind=name, tools=self.tools_of(kind))

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._idle.clear()
        if self._starting is not None:
            await asyncio.wait({self._starting})
        await asyncio.to_thread(self._zygote.close)
        self._prints.close()

    def give_back(self, worker: Worker, kind: str) -> None:
        """Its episode has ended well."""
        self._idle.setdefault(kind, []).append(worker)

    async def _attend(self) -> None:
        """A zygote that lives."""
        if self._is_closed:
            raise EnvironmentFailed("environments are closed: the run has ended")
        if self._zygote.has_ended:
            self._idle.clear()
            if self._starting is None:
                self._starting = asyncio.create_task(self._start_again())
            # A caller that gives up leaves the start to those that still wait, and to the next one.
            await asyncio.shield(self._starting)

    async def _start_again(self) -> None:
        try:
            await asyncio.to_thread(self._zygote.close)
            self._zygote = await asyncio.to_thread(
                Zygote, self._setup, output_fd=self._prints.fd, timeout_s=self._start_timeout_s
            )
        except ConfigError as error:
            raise EnvironmentFailed(str(error)) from None
        finally:
            self._starting = None

    async def _take(self, kind: str) -> Worker | None:
        """An idle one."""
        while idle := self._idle.get(kind):
            worker = idle.pop()
            poll = select.poll()
            poll.register(worker.link.fileno(), select.POLLIN)
            if not poll.poll(0):  # it says nothing unless it is asked, or has ended
                return worker
            await worker.end()
        return None

    async def _make_room(self) -> None:
        """A child of another kind, which nobody uses, makes way."""
        if len(self._zygote.pids) >= self._max_processes and (idle := next(filter(None, self._idle.values()), None)):
            await idle.pop(0).end()


class _ProcessEnvironment:
    """Implements ``protocol.Environment``."""

    def __init__(
        self, owner: ProcessEnvironments, worker: Worker, *, kind: str, tools: tuple[dict[str, Any], ...]
    ) -> None:
        self._owner = owner
        self._worker = worker
        self._kind = kind
        self._tools = tools
        self._is_closed = False

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        given = {name: value for name, value in row.items() if name != _COLUMN or not self._kind}
        return Opening(text=(await self._call("reset", given)).text, tools=self._tools)

    async def step(self, text: str, token_ids: Sequence[int]) -> StepResult:
        return await self._call("step", text, [int(token) for token in token_ids] if self._owner.needs_ids else [])

    async def reward(self) -> float | None:
        return (await self._call("reward")).worth

    async def attributes(self) -> dict[str, Any]:
        return (await self._call("attributes")).attributes

    async def close(self, *, broken: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if broken or self._worker.is_lost:
            await self._worker.end()
        else:
            self._owner.give_back(self._worker, self._kind)

    async def _call(self, method: str, *args: Any) -> Any:
        """The time limit is the caller's, who closes what it has given up."""
        try:
            answer = await self._worker.call(method, *args, deadline_s=math.inf)
        except Lost as lost:
            raise EnvironmentFailed(f"its process {lost.why}") from None
        except Raised as raised:
            raise EnvironmentFailed(visible(f"it answered with what cannot be read: {raised.message}")) from None
        if isinstance(answer, Failed):
            raise EnvironmentFailed(visible(answer.failed))
        return answer


def kind_of(kind: str, kinds: Collection[str]) -> str:
    """The name of a row's kind. The only one has no name, and takes whatever a column says."""
    if "" in kinds:
        return ""
    if kind not in kinds:
        raise ConfigError(
            f"the row's environment column says {kind[:80]!r}, and environment.path has {', '.join(kinds)}"
            if kind
            else f"the row has no environment column, and environment.path has {', '.join(kinds)} to choose from"
        )
    return kind
