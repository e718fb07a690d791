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
        if (connection := self._door.accept(0)) is not None:
            task = self._loop.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Do what a connection asks of the environment or program that it starts."""
        watch_peer(connection)
        here: Any = self._here  # the controller calls only the methods that this type has
        playing: list[Environment] = []  # empty or one environment
        stop = asyncio.Event()  # stops the program
        is_broken, num_running = True, 0  # an environment is broken unless it is closed cleanly

        async def do(method: str, arguments: list[Any]) -> Any:
            nonlocal is_broken, num_running
            if method == "stop":
                return stop.set()
            if method == "close":
                is_broken = arguments[0] or num_running > 0
                return None
            num_running += 1
            try:
                if method == "run":
                    return await here.run(*arguments, stop=stop)
                if method == "start":
                    playing.append(await here.start(*arguments))
                    return None
                assert method in ("reset", "step", "reward", "attributes"), f"the controller asked for {method!r}"
                return await getattr(playing[0], method)(*arguments)
            finally:
                num_running -= 1

        try:
            await answer_calls(connection, do, dumps=_ANSWER.dump_json)
        finally:
            for environment in playing:
                await environment.close(broken=is_broken)


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
