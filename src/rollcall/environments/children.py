"""The parent's side of a zygote and of the children that it forks (zygote.py, child.py): each is a ``Worker``, and what it says is data."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rollcall.debug.here import DebugLine
from rollcall.environments.child import MAX_ANSWER_BYTES
from rollcall.environments.protocol import EnvironmentFailed, StepResult
from rollcall.environments.results import REQUEST, Left, Opened, Worth, reader
from rollcall.environments.variables import ROOT, variables_of
from rollcall.errors import ConfigError
from rollcall.process.ending import how_it_ended
from rollcall.process.here import LinkHere, SocketLink
from rollcall.process.worker import Ending, Lost, Raised, Worker
from rollcall.process_table import Process, descendants
from rollcall.words import visible

END_S = 10.0
FILES_OF_CHILD = 2  # that this process opens for it: its socket, and its line to the debugger
GONE = "the process that environments are forked from is gone"
_OF_ZYGOTE = {"load": json.loads, "start": reader(int), "end": reader(int)}
_OF_CHILD = {
    "reset": reader(Opened),
    "step": reader(StepResult),
    "reward": reader(Worth),
    "attributes": reader(Left),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the zygote is told."""

    type: str  # "class" or "step"
    paths: dict[str, str]  # kind -> module:Class; empty: functions alone
    kwargs: dict[str, dict[str, Any]]  # kind -> arguments of its class
    tools: list[str]
    call_format: str
    is_chat: bool  # the model has a chat template
    env: list[str]  # names of variables
    memory_mb: int
    python: str | None  # that runs it; None: this one
    post_mortem: bool  # what user code raises opens the debugger


def find_python(given: str | None) -> str | None:
    """Where ``environment.python`` is. Its link to another Python is what makes it an environment, so that is not followed."""
    if given is None:
        return None
    found = shutil.which(os.path.expanduser(given))
    if found is None:
        raise ConfigError(
            f"environment.python={given} is not a program that can be run here; make an environment with `python3 -m venv DIR`, "
            "install the package there, and give DIR/bin/python"
        )
    return os.path.abspath(found)


def _command(python: str | None) -> list[str]:
    target = "rollcall.environments.zygote:Zygote"
    if python is None:
        return [sys.executable, "-m", "rollcall.process.child", target]
    # Last in its path: another Python has libraries of its own, and the folder of this package may hold this one's too.
    begin = f"import runpy, sys; sys.path.append({str(ROOT)!r}); runpy.run_module('rollcall.process.child', run_name='__main__')"
    return [python, "-c", begin, target]


class Zygote:
    """Calls to the zygote are made in threads, one at a time; its children are called in whatever event loop runs."""

    def __init__(self, setup: Setup, *, output_fd: int, timeout_s: float) -> None:
        self.pids: dict[int, int] = {}  # of its children, by number
        self._num_started = 0
        self._one_calls = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline_fd, self._lifeline_fd = os.pipe()
        line = DebugLine(role="environment", number=0)
        try:
            variables = variables_of(setup.env)
            fds = (theirs.fileno(), lifeline_fd, line.theirs.fileno())
            link = LinkHere(_command(setup.python), env=variables, fds=fds, output=output_fd)
        except BaseException:
            self._control.close()
            os.close(self._lifeline_fd)
            line.close()
            raise
        finally:
            theirs.close()
            os.close(lifeline_fd)
            line.theirs.close()
        self.worker = Worker(
            link, name="the environment's process", hears=REQUEST, answers=_OF_ZYGOTE, line=line, longest=64 << 20
        )
        # Closes what its children live on, once it has ended.
        self._watcher = threading.Thread(target=self._watch, name="zygote", daemon=True)
        self._watcher.start()
        try:
            self.tools = self._load(setup, timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        return self.worker.is_lost or not self._watcher.is_alive()

    async def start(self, kind: str) -> Worker:
        """A new child."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._start, kind))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_unwanted)
            raise

    def end(self, number: int) -> tuple[str, int | None]:
        """Kill a child with all that it started, unless it has ended: how it ended, in words and as a status."""
        with self._one_calls:
            try:
                status = self.worker.ask("end", number, deadline_s=END_S)
            except (Lost, Raised):
                return GONE, None
            finally:
                self.pids.pop(number, None)
        return how_it_ended(status), status

    def close(self) -> None:
        """It ends its children, and itself."""
        with self._one_calls:
            self.pids.clear()
            self.worker.close(grace_s=END_S)
        self._watcher.join(END_S)
        self._control.close()

    def _load(self, setup: Setup, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
        # The libraries of this Python are not for another one.
        given = asdict(setup) | {"sys_path": [os.getcwd(), *(sys.path if setup.python is None else [])]}
        check = "check what its module does when imported"
        try:
            told = self.worker.ask("load", given, deadline_s=timeout_s)
        except Lost as lost:
            if lost.is_late:
                raise ConfigError(f"the environment was not ready within {timeout_s:g} s; {check}") from None
            raise ConfigError(f"the environment's process ended at its start: it {lost.why}; {check}") from None
        except Raised as raised:
            raise ConfigError(f"{raised}; {check}") from None
        if "refused" in told:
            raise ConfigError(visible(str(told["refused"])))
        return told["tools"]

    def _start(self, kind: str) -> Worker:
        try:
            ours, theirs = socket.socketpair()
            line = DebugLine(role="environment", number=self._num_started + 1)
        except OSError as error:  # each child needs file descriptors here
            raise EnvironmentFailed(
                f"no process can be started ({error}); raise the limit of open files (ulimit -n)"
            ) from None
        try:
            with theirs, line.theirs, self._one_calls:
                self._num_started += 1
                number = self._num_started
                socket.send_fds(self._control, [b"."], [theirs.fileno(), line.theirs.fileno()])
                pid = self.pids[number] = self.worker.ask("start", number, kind, deadline_s=END_S)
        except (Lost, Raised, OSError) as error:
            ours.close()
            line.close()
            why = error.message if isinstance(error, Raised) else GONE
            raise EnvironmentFailed(f"no process can be started ({why})") from None
        link = ForkedLink(self, number, pid=pid, connection=ours)
        return Worker(
            link, name="its process", hears=REQUEST, answers=_OF_CHILD, line=line, longest=MAX_ANSWER_BYTES + 1024
        )

    def _watch(self) -> None:
        with suppress(ChildProcessError):  # somebody has taken its status
            os.waitid(os.P_PID, self.worker.pid, os.WEXITED | os.WNOWAIT)
        # While its children live, each is still the parent of what left its group.
        started = descendants(*self.pids.values()) if self.pids else []
        os.close(self._lifeline_fd)
        for process in started:
            if process.is_alive():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)


class ForkedLink(SocketLink):
    """A child of the zygote. Implements ``process.worker.Link``."""

    def __init__(self, zygote: Zygote, number: int, *, pid: int, connection: socket.socket) -> None:
        super().__init__(connection)
        self._zygote, self._number = zygote, number
        self.pid = pid
        self.where = f"process {pid}"

    def log_tail(self, lines: int) -> str:
        return ""  # what it prints is shown

    def end(self, *, grace_s: float, ask_stack: bool = False) -> Ending:
        until_s = time.monotonic() + grace_s
        while (is_alive := Process.of(self.pid) is not None) and time.monotonic() < until_s:
            time.sleep(0.005)
        self.connection.close()
        how, status = self._zygote.end(self._number)
        if grace_s and is_alive and status is not None:
            how = "user code closed the connection; it must leave file descriptors alone that it did not open"
        return Ending(how=how, status=status)


def _end_unwanted(starting: asyncio.Future[Worker]) -> None:
    """Nobody waits for this child any more."""
    if not starting.cancelled() and starting.exception() is None:
        threading.Thread(target=partial(starting.result().close), daemon=True).start()
