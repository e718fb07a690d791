"""Episodes from a verifiers taskset. An environment server (packages/verifiers.py) plays them in a Python that has verifiers, and queries
the run's model over the OpenAI API. The run treats each episode as a program that drives itself.

A server runs wherever the run's programs would run: on this node, or on each host. It starts before the run and stops with it, even if
this process is killed.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rollcall.base.errors import ConfigError
from rollcall.base.process_table import allow_files
from rollcall.base.wait import warn
from rollcall.config.environments import VerifiersEnvironment
from rollcall.environments.packages.verifiers import SETUP
from rollcall.environments.processes import command_for, find_python
from rollcall.environments.program import KEY, kill_leftovers, variables_of
from rollcall.environments.protocol import Ended, EnvironmentFailed, Programs
from rollcall.nodes.framing import JSON
from rollcall.observe.logs import ChildPrints
from rollcall.process.here import LinkHere
from rollcall.process.worker import Lost, Raised, Worker
from rollcall.reward.confine import make_folder, remove_folder, sweep_folders

START_TIMEOUT_S = 300.0  # a taskset may download its data
END_TIMEOUT_S = 15.0  # the server itself takes up to 10 s
MARK = "ROLLCALL_TASKSET"  # environment variable that marks a server and its harnesses, which run in their own sessions


class TasksetPrograms(Programs):
    """Plays a taskset's episodes. The constructor waits until the server is ready, and raises ConfigError if the taskset is unusable."""

    tools: dict[str, list[dict[str, Any]]] = {}  # the taskset provides its tools itself

    def __init__(self, section: VerifiersEnvironment) -> None:
        self._section = section
        self.worker, self._held = _start_server(section)
        self._starting: asyncio.Task[None] | None = None
        self._num_played = 0
        allow_files(8 * section.max_running)
        sweep_folders()  # left by killed processes

    async def find_host(self) -> TasksetPrograms:
        return self

    async def run(self, variables: Mapping[str, str], *, stop: asyncio.Event) -> Ended:
        await self._ensure_server()
        worker = self.worker
        self._num_played += 1
        number = self._num_played
        row = json.loads(variables["ROLLCALL_ROW"])
        given = {"base_url": variables["OPENAI_BASE_URL"], "key": variables[KEY], "row": row}
        playing = asyncio.create_task(worker.call("play", number, given, deadline_s=math.inf))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({playing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not playing.done():
                with suppress(Lost):
                    await worker.call("stop", number, deadline_s=END_TIMEOUT_S)
                await asyncio.wait({playing}, timeout=END_TIMEOUT_S)
            is_given_up = playing.cancel()  # a harness or scorer did not stop
        if is_given_up:
            return Ended(how="an error", stdout="", stderr=f"it did not stop within {END_TIMEOUT_S:g} s")
        try:
            return Ended(how="", stdout=json.dumps(playing.result()), stderr="")
        except Raised as raised:
            return Ended(how="an error", stdout="", stderr=f"verifiers: {raised.kind}: {raised.message}")
        except Lost as lost:
            raise EnvironmentFailed(
                f"{lost.who} {lost.why} during the episode; see its output for the reason"
            ) from None

    async def aclose(self) -> None:
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.to_thread(self._held.close)

    async def _ensure_server(self) -> None:
        worker = self.worker
        try:
            await worker.call("ready", deadline_s=START_TIMEOUT_S)
        except Lost as lost:
            if worker is self.worker:
                self._starting = self._starting or asyncio.create_task(self._start_again(lost))
                await asyncio.shield(self._starting)

    async def _start_again(self, lost: Lost) -> None:
        warn(f"{lost.who} {lost.why}; restarting it")
        try:
            await asyncio.to_thread(self._held.close)
            self.worker, self._held = await asyncio.to_thread(_start_server, self._section)
        except (ConfigError, OSError) as error:
            raise EnvironmentFailed(str(error)) from None
        finally:
            self._starting = None


def _start_server(section: VerifiersEnvironment) -> tuple[Worker, ExitStack]:
    """Start a server. Closing the stack stops its episodes, and then kills the remaining processes of the server and its harnesses."""
    python = find_python(section.python)
    assert python is not None, "environment.python is required"
    setup = {"config": section.config, "max_turns": section.max_turns, "memory_mb": section.memory_mb}
    with ExitStack() as held:
        folder, prints = make_folder(), ChildPrints()
        held.callback(remove_folder, folder)
        held.callback(prints.close)
        variables = variables_of(section.env) | {"TMPDIR": folder, MARK: folder, SETUP: json.dumps(setup)}
        # verifiers starts its harnesses with the `uv` next to its Python.
        variables["PATH"] = os.pathsep.join(filter(None, [str(Path(python).parent), variables.get("PATH")]))
        command = command_for("rollcall.environments.packages.verifiers", python=python)
        link = LinkHere(command, env=variables, output=prints.fd)
        held.callback(kill_leftovers, link.pid, mark=(MARK, folder))
        name, answers = "the environment server of verifiers", defaultdict(lambda: json.loads)
        worker = Worker(link, name=name, hears=JSON, answers=answers)
        held.callback(worker.close, grace_s=END_TIMEOUT_S)
        try:
            worker.ask("ready", deadline_s=START_TIMEOUT_S)
        except Raised as raised:
            raise ConfigError(f"verifiers refuses environment.config: {raised.kind}: {raised.message}") from None
        except Lost as lost:
            raise ConfigError(
                f"{lost.who} was not ready within {START_TIMEOUT_S:g} s"
                if lost.is_late
                else f"{lost.who} {lost.why} during startup; see its output above. environment.python must have verifiers 0.4 "
                "(scripts/setup_peers.sh DIR verifiers)"
            ) from None
        return worker, held.pop_all()
