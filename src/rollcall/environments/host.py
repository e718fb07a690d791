"""Runs environments on a node other than the controller's. A host process accepts connections and plays episodes in child processes.

    HostedEnvironments (hosted.py, the controller) --a connection for each episode--> EnvironmentHost --> ProcessEnvironments --> children
                                                                                                     `--> programs

Each connection carries one episode, and the controller uses it as a ``Worker``. After ``start``, the controller makes the same calls to
the environment as to a local child process (zygote.py). It starts a program with ``run``, and may call ``stop`` and ``close`` while the
program is running. When a connection closes, its environment or program is stopped, because the episode is over, or because the
controller died or gave up on the episode. A caller must know the run's
secret (nodes/door.py) and can start only what this host was created for.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from rollcall.config import EnvironmentSection
from rollcall.config.environments import AgentEnvironment, VerifiersEnvironment
from rollcall.environments.agent import AgentEnvironments
from rollcall.environments.answering import answer_calls
from rollcall.environments.endpoint import refuse_without_packages
from rollcall.environments.processes import ProcessEnvironments
from rollcall.environments.program import ProgramsHere
from rollcall.environments.protocol import Environment, Environments
from rollcall.environments.taskset import TasksetPrograms
from rollcall.nodes.door import Door, listen_at, watch_peer

_ANSWER: TypeAdapter[Any] = TypeAdapter(Any)
RunsHere = ProcessEnvironments | ProgramsHere | TasksetPrograms
Driven = AgentEnvironment | VerifiersEnvironment  # environments driven by a program


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """The controller's description of a host."""

    name: str  # shown in messages
    address: str
    port: int
    secret: str = field(repr=False)
    num_cpus: int
    tools: dict[str, list[dict[str, Any]]]  # by kind


class EnvironmentHost:
    """Serves episodes in a separate thread until the process exits."""

    def __init__(self, here: RunsHere) -> None:
        self._here = here
        self._loop = asyncio.new_event_loop()
        self._serving: set[asyncio.Task[None]] = set()

    def listen(self, address: str, *, name: str, secret: str) -> HostPlace:
        listener = listen_at(address)
        port = listener.getsockname()[1]
        self._door = Door(listener, secret=secret)
        threading.Thread(target=self._run, name="environment host", daemon=True).start()
        return HostPlace(
            name=name,
            address=address,
            port=port,
            secret=secret,
            num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            tools=self._here.tools,
        )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._door.fileno(), self._let_in)
        self._loop.run_forever()

    def _let_in(self) -> None:
        connection = self._door.accept(0)
        if connection is None:
            return
        task = self._loop.create_task(self._serve(connection))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        watch_peer(connection)
        episode = _Episode(self._here)
        try:
            await answer_calls(connection, episode.do, dumps=_ANSWER.dump_json)
        finally:
            await episode.end()


class _Episode:
    """The environment or program that a connection started."""

    def __init__(self, here: Any) -> None:
        self._here = here  # the controller calls only the methods that this type has
        self._environment: Environment | None = None
        self._stop = asyncio.Event()  # stops its program
        self._is_broken = True  # unless it is closed cleanly
        self._num_running = 0

    async def do(self, method: str, arguments: list[Any]) -> Any:
        if method == "stop":
            return self._stop.set()
        if method == "close":
            self._is_broken = arguments[0] or self._num_running > 0
            return None
        self._num_running += 1
        try:
            if method == "run":
                return await self._here.run(*arguments, stop=self._stop)
            if method == "start":
                self._environment = await self._here.start(*arguments)
                return None
            assert method in ("reset", "step", "reward", "attributes"), f"the controller asked for {method!r}"
            return await getattr(self._environment, method)(*arguments)
        finally:
            self._num_running -= 1

    async def end(self) -> None:
        if self._environment is not None:
            await self._environment.close(broken=self._is_broken)


def make_environments(section: EnvironmentSection, *, chat_template: str | None) -> Environments:
    """Create the environment and wait until episodes can start. Raise ConfigError if the section cannot be used."""
    if isinstance(section, Driven):
        refuse_without_packages()
    made = make_here(section, chat_template=chat_template)
    return made if isinstance(made, ProcessEnvironments) else AgentEnvironments(section, programs=made)


def make_here(section: EnvironmentSection, *, chat_template: str | None) -> RunsHere:
    """Start the processes that play episodes on this node, which is either a host or the run's own node."""
    if isinstance(section, AgentEnvironment):
        return ProgramsHere(section)
    if isinstance(section, VerifiersEnvironment):
        return TasksetPrograms(section)
    return ProcessEnvironments(section, chat_template=chat_template)
