"""Episodes of a verifiers taskset: its environment server, in a Python of its own, plays them and asks the run's model over the OpenAI
API. To the run each is a program that drives itself: one that asks the server and prints the reward.

A server is where these programs run: one, or one on each host. It begins before the run does and ends with it, also when this process is
killed: its stdin ends then.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rollcall.config.environments import VerifiersEnvironment
from rollcall.environments.children import find_python
from rollcall.environments.processes import refuse_unset
from rollcall.environments.program import ProgramsHere, kill_leftovers
from rollcall.environments.protocol import Ended, EnvironmentFailed
from rollcall.errors import ConfigError
from rollcall.observe.prints import ChildPrints
from rollcall.process.ending import how_it_ended
from rollcall.reward.confine import Confinement, environment, make_folder, remove_folder
from rollcall.wait import warn

START_TIMEOUT_S = 300.0  # a taskset may download its data
END_TIMEOUT_S = 15.0  # it gives itself 10
AGAIN_S = 30.0  # between two attempts to start a server that has ended
MARK = "ROLLCALL_TASKSET"  # a variable of a server and its harnesses, which have sessions of their own
_FILE = Path(__file__).parent / "packages" / "verifiers.py"
_ROOT = Path(__file__).resolve().parents[2]


class TasksetPrograms(ProgramsHere):
    """Making it waits for the server, so a taskset that cannot be used is refused here."""

    def __init__(self, section: VerifiersEnvironment) -> None:
        self._section = section
        self._server = TasksetServer(section)
        self._starting: asyncio.Task[None] | None = None
        self._failed_s = -math.inf  # when a new server could not be started
        limits = {"memory_mb": section.memory_mb, "max_running": section.max_running}
        try:
            super().__init__(_asks(self._server), env=section.env, **limits)
        except BaseException:
            self._server.close()
            raise

    async def run(self, variables: Mapping[str, str], *, stop: asyncio.Event) -> Ended:
        if self._server.process.poll() is not None:
            self._starting = self._starting or asyncio.create_task(self._start_again())
            await asyncio.shield(self._starting)
        return await super().run(variables, stop=stop)

    async def _start_again(self) -> None:
        try:
            if time.monotonic() < self._failed_s + AGAIN_S:
                raise EnvironmentFailed(
                    "the environment server of verifiers has ended, and a new one could not be started"
                )
            warn(f"the environment server of verifiers ended with {self._server.how_it_ended}; it is started again")
            await asyncio.to_thread(self._server.close)
            self._server = await asyncio.to_thread(TasksetServer, self._section)
            self._command = _asks(self._server)
        except ConfigError as error:
            self._failed_s = time.monotonic()
            raise EnvironmentFailed(str(error)) from None
        finally:
            self._starting = None

    async def aclose(self) -> None:
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.to_thread(self._server.close)


def _asks(server: TasksetServer) -> str:
    """The program of an episode."""
    return shlex.join([sys.executable, "-S", "-E", "-P", str(_FILE), "ask", server.address])


class TasksetServer:
    """The process of ``packages/verifiers.py``."""

    def __init__(self, section: VerifiersEnvironment) -> None:
        python = find_python(section.python)
        assert python is not None, "the key has no default"
        self._folder = make_folder()
        self._prints = ChildPrints()
        self.address = str(Path(self._folder) / "asks")
        self._mark = (MARK, self._folder)
        self._is_closed = False
        self.process = subprocess.Popen(
            [python, "-P", str(_FILE), "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._prints.fd,
            env=_variables(section, python, folder=self._folder) | dict([self._mark]),
            start_new_session=True,  # Ctrl-C is for this process
        )
        try:
            self._send(section)
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """It ends its episodes; what is left of it and of its harnesses is killed. A second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
        kill_leftovers(self.process.pid, mark="=".join(self._mark).encode())
        self.process.wait()
        self.process.stdout.close()
        self._prints.close()
        remove_folder(self._folder)

    @property
    def how_it_ended(self) -> str:
        return how_it_ended(self.process.wait())

    def _send(self, section: VerifiersEnvironment) -> None:
        assert self.process.stdin is not None
        told = {
            "config": section.config,
            "max_turns": section.max_turns,
            "memory_mb": section.memory_mb,
            "address": self.address,
        }
        with suppress(BrokenPipeError):  # it has ended, which is noticed in a moment
            self.process.stdin.write(json.dumps(told).encode() + b"\n")
            self.process.stdin.flush()

    def _wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        end_s, told = time.monotonic() + START_TIMEOUT_S, b""
        while not told.endswith(b"\n"):
            left_s = max(0.0, end_s - time.monotonic())
            if not select.select([self.process.stdout], [], [], left_s)[0]:
                raise ConfigError(f"the environment server of verifiers was not ready within {START_TIMEOUT_S:g} s")
            if not (data := os.read(self.process.stdout.fileno(), 1 << 16)):
                how = how_it_ended(self.process.wait())
                raise ConfigError(
                    f"the environment server of verifiers ended at its start ({how}); its output is above. environment.python must "
                    "have verifiers 0.4 (scripts/setup_peers.sh DIR verifiers)"
                )
            told += data
        if refused := json.loads(told).get("refused"):
            raise ConfigError(f"verifiers refuses environment.config: {refused}")


def _variables(section: VerifiersEnvironment, python: str, *, folder: str) -> dict[str, str]:
    """Those of a program, and beside them `uv` of verifiers' own Python, which its harnesses are started with."""
    confinement = Confinement(
        own_files=False, network=True, env=tuple(section.env), processes=0, memory_mb=0, file_mb=0
    )
    refuse_unset(section.env)
    found = environment(confinement, folder=folder, environ=os.environ, root=_ROOT)
    return found | {"PATH": os.pathsep.join(filter(None, [str(Path(python).parent), found.get("PATH")]))}
