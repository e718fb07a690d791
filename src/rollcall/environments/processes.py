"""Environments in separate processes, so user code that hangs, dies or exhausts memory costs only one episode.

    ProcessEnvironments ----> Zygote --start, end--> the process that imports the user's class (zygote.py)
             |                                          | fork
             +---- a Worker: calls and answers -------- a child for each running episode

After an episode, its child is kept and reset for the next episode of the same kind. A failed child is killed with everything it started.
When a child dies, its episode fails. When the zygote dies, all running episodes fail, and the next episode that needs a child creates a
new zygote. If a call exceeds its time limit, the caller gives up and closes the environment as broken. These processes answer in JSON,
and every field of an answer is checked.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from rollcall.base.errors import ConfigError
from rollcall.base.process_table import Process, allow_files, descendants
from rollcall.config.environments import ClassEnvironment, StepEnvironment, kinds_of
from rollcall.environments.calls import format_of
from rollcall.environments.program import variables_of
from rollcall.environments.protocol import KIND, Environment, EnvironmentFailed, StepResult
from rollcall.environments.zygote import MAX_ANSWER_BYTES
from rollcall.nodes.framing import JSON
from rollcall.nodes.processes import signal_processes
from rollcall.observe.logs import ChildPrints
from rollcall.process.debug.here import POST_MORTEM, DebugLine
from rollcall.process.here import LinkHere, how_it_ended
from rollcall.process.worker import Ending, Link, Lost, Raised, Worker, reader
from rollcall.reward.confine import ROOT

START_TIMEOUT_S = 120.0
_END_S = 10.0
_GONE = "the process that environments are forked from is gone"
ANSWERS = {  # reads each method's answer; None means that the call is still running
    "reset": reader(str | None),
    "step": reader(StepResult | None),
    "reward": reader(float | None),
    "attributes": reader(dict[str, Any] | None),
}


class ProcessEnvironments:
    """Implements ``protocol.Environments``. The constructor waits for the zygote and raises ConfigError if the class cannot be used."""

    def __init__(self, section: ClassEnvironment | StepEnvironment, *, chat_template: str | None) -> None:
        allow_files(2 * section.max_running)  # a socket and a debugger connection for each
        self._section = section
        self._python = find_python(section.python)
        self._setup = setup_of(section, chat_template=chat_template)
        self._prints = ChildPrints()
        self.idle: dict[str, list[Worker]] = defaultdict(list)  # by kind
        self._is_closed = False
        self._starting: asyncio.Task[None] | None = None
        try:
            self._zygote = self._new_zygote()
        except BaseException:
            self._prints.close()
            raise

    @property
    def tools(self) -> dict[str, list[dict[str, Any]]]:
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
        await self._ensure_zygote()
        if (worker := await self._take_idle(name)) is None:
            is_full = len(self._zygote.pids) >= self._section.max_running
            if is_full and (others := next(filter(None, self.idle.values()), None)):
                await others.pop(0).end()  # stop an idle child of a different kind to make room
            worker = await self._zygote.start(name)
        return _ProcessEnvironment(self, worker, kind=name)

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.idle.clear()
        if self._starting is not None:
            await asyncio.wait({self._starting})
        await asyncio.to_thread(self._zygote.close)
        self._prints.close()

    def _new_zygote(self) -> Zygote:
        return Zygote(self._setup, python=self._python, env=self._section.env, output_fd=self._prints.fd)

    async def _ensure_zygote(self) -> None:
        if self._is_closed:
            raise EnvironmentFailed("environments are closed: the run has ended")
        if self._zygote.worker.is_lost or not self._zygote.watcher.is_alive():
            self.idle.clear()
            if self._starting is None:
                self._starting = asyncio.create_task(self._start_again())
            # If this caller gives up, the start continues for other callers.
            await asyncio.shield(self._starting)

    async def _start_again(self) -> None:
        try:
            await asyncio.to_thread(self._zygote.close)
            self._zygote = await asyncio.to_thread(self._new_zygote)
        except (ConfigError, OSError) as error:
            raise EnvironmentFailed(f"cannot start a process ({error})") from None
        finally:
            self._starting = None

    async def _take_idle(self, kind: str) -> Worker | None:
        while self.idle[kind]:
            worker = self.idle[kind].pop()
            poll = select.poll()
            poll.register(worker.link.fileno(), select.POLLIN)
            if not poll.poll(0):  # if the socket of an idle child is readable, the child has exited
                return worker
            await worker.end()
        return None


class _ProcessEnvironment(Environment):
    def __init__(self, owner: ProcessEnvironments, worker: Worker, *, kind: str) -> None:
        self._owner = owner
        self.worker = worker
        self._kind = kind

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        return await super().reset({name: value for name, value in row.items() if name != KIND or not self._kind})

    async def close(self, *, broken: bool) -> None:
        if broken or self.worker.is_lost:
            await self.worker.end()
        else:
            self._owner.idle[self._kind].append(self.worker)

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await self.worker.call(method, *args, deadline_s=math.inf)
        except Lost as lost:
            raise EnvironmentFailed(f"its process {lost.why}") from None
        except Raised as raised:
            raise EnvironmentFailed(raised.message) from None


class Zygote:
    """The parent's side of the process that environments are forked from. That process is called from threads, one
    call at a time, while its children are called from the running event loop."""

    def __init__(self, setup: dict[str, Any], *, python: str | None, env: Sequence[str], output_fd: int) -> None:
        self.pids: set[int] = set()  # its children
        self._num_started = 0
        self._one_calls = threading.Lock()
        with ExitStack() as undo, ExitStack() as passed:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._control.close)
            passed.callback(theirs.close)
            lifeline_fd, self._lifeline_fd = os.pipe()
            undo.callback(os.close, self._lifeline_fd)
            passed.callback(os.close, lifeline_fd)
            line = DebugLine(role="environment", number=0)
            undo.callback(line.close)
            passed.callback(line.theirs.close)
            fds = (theirs.fileno(), lifeline_fd, line.theirs.fileno())
            command = command_for("rollcall.environments.zygote:Zygote", python=python)
            link = LinkHere(command, env=variables_of(env), fds=fds, output=output_fd)
            undo.pop_all()
        answers = {"load": json.loads, "start": reader(int | None), "end": reader(int | None)}
        name = "the environment's process"
        self.worker = Worker(link, name=name, hears=JSON, answers=answers, line=line, longest=64 << 20)
        self.watcher = threading.Thread(target=self._end_children_after, name="zygote", daemon=True)
        self.watcher.start()
        try:
            # Do not pass our path to a different Python, which has its own libraries.
            self.tools = self._load(setup | {"sys_path": [os.getcwd(), *(sys.path if python is None else [])]})
        except BaseException:
            self.close()
            raise

    async def start(self, kind: str) -> Worker:
        """Start a child."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._start, kind))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:

            def end(started: asyncio.Future[Worker]) -> None:
                """Close the worker, because no caller is waiting for it any longer."""
                if not started.cancelled() and started.exception() is None:
                    threading.Thread(target=started.result().close, daemon=True).start()

            starting.add_done_callback(end)
            raise

    def end(self, pid: int) -> tuple[str, int | None]:
        """Kill a child and everything it started, unless it has exited. Return how it ended, in words and as a status."""
        with self._one_calls:
            try:
                status = self.worker.ask("end", pid, deadline_s=_END_S)
            except (Lost, Raised):
                return _GONE, None
            finally:
                self.pids.discard(pid)
        return how_it_ended(status), status

    def close(self) -> None:
        """Stop the process and its children."""
        with self._one_calls:
            self.pids.clear()
            self.worker.close(grace_s=_END_S)
        self.watcher.join(_END_S)
        self._control.close()

    def _load(self, setup: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
        check = "check what its module does when imported"
        try:
            return self.worker.ask("load", setup, deadline_s=START_TIMEOUT_S)
        except Lost as lost:
            if lost.is_late:
                raise ConfigError(f"the environment was not ready within {START_TIMEOUT_S:g} s; {check}") from None
            raise ConfigError(f"the environment's process ended during startup: it {lost.why}; {check}") from None
        except Raised as raised:
            raise ConfigError(raised.message if raised.kind == "ValueError" else f"{raised}; {check}") from None

    def _start(self, kind: str) -> Worker:
        try:
            ours, theirs = socket.socketpair()
            line = DebugLine(role="environment", number=self._num_started + 1)
        except OSError as error:  # each child needs file descriptors in this process
            raise EnvironmentFailed(
                f"cannot start a process ({error}); raise the limit on open files (ulimit -n)"
            ) from None
        try:
            with theirs, line.theirs, self._one_calls:
                self._num_started += 1
                socket.send_fds(self._control, [b"."], [theirs.fileno(), line.theirs.fileno()])
                pid = self.worker.ask("start", kind, deadline_s=_END_S)
                self.pids.add(pid)
        except (Lost, Raised, OSError) as error:
            ours.close()
            line.close()
            why = error.message if isinstance(error, Raised) else _GONE
            raise EnvironmentFailed(f"cannot start a process ({why})") from None
        link = _ForkedLink(self, pid=pid, connection=ours)
        return Worker(link, name="its process", hears=JSON, answers=ANSWERS, line=line, longest=MAX_ANSWER_BYTES + 1024)

    def _end_children_after(self) -> None:
        """Wait until the zygote exits. Then close its children's lifeline and kill what they started."""
        with suppress(ChildProcessError):  # its status was already collected
            os.waitid(os.P_PID, self.worker.pid, os.WEXITED | os.WNOWAIT)
        # While a child is alive, it is still the parent of processes that left its group.
        started = descendants(*self.pids) if self.pids else []
        os.close(self._lifeline_fd)
        signal_processes(started, signal.SIGKILL)


class _ForkedLink(Link):
    """A link to a child of the zygote."""

    def __init__(self, zygote: Zygote, *, pid: int, connection: socket.socket) -> None:
        super().__init__(connection)
        self._zygote, self.pid = zygote, pid
        self.where = f"process {pid}"

    def end(self, *, grace_s: float, ask_stack: bool = False) -> Ending:
        until_s = time.monotonic() + grace_s
        while (is_alive := Process.of(self.pid) is not None) and time.monotonic() < until_s:
            time.sleep(0.005)
        self.connection.close()
        how, status = self._zygote.end(self.pid)
        if grace_s and is_alive and status is not None:
            how = "user code closed the connection; it must not touch file descriptors that it did not open"
        return Ending(how=how, status=status)


def setup_of(section: ClassEnvironment | StepEnvironment, *, chat_template: str | None) -> dict[str, Any]:
    """Build the zygote's setup from the run file's section."""
    chat: dict[str, Any] = {}
    if isinstance(section, ClassEnvironment):
        call_format = format_of(chat_template) if section.call_format == "auto" else section.call_format
        chat = {"functions": section.tools, "call_format": call_format, "is_chat": chat_template is not None}
    kwargs = {"": section.kwargs} if isinstance(section.path, str) else section.kwargs
    return {
        "kinds": {
            name: {"path": path, "key": f"environment.path.{name}".rstrip("."), "kwargs": kwargs.get(name, {}), **chat}
            for name, path in (kinds_of(section.path) or {"": None}).items()  # no class: functions only
        },
        "env": section.env,
        "memory_mb": section.memory_mb,
        "post_mortem": bool(os.environ.get(POST_MORTEM)),  # exceptions in user code open the debugger
    }


def find_python(given: str | None) -> str | None:
    """Return the path of ``environment.python``. Do not follow links, because a virtual environment links to its base Python."""
    if given is None:
        return None
    if (found := shutil.which(os.path.expanduser(given))) is None:
        raise ConfigError(
            f"environment.python={given} is not a program that this machine can run; create one with `python3 -m venv DIR`, "
            "install the package in it, and set environment.python to DIR/bin/python"
        )
    return os.path.abspath(found)


def command_for(target: str, *, python: str | None) -> list[str]:
    """Return the command that runs ``module:Class`` as a child (process/child.py), or a module as a program, in the given Python."""
    module, *arguments = ["rollcall.process.child", target] if ":" in target else [target]
    if python is None:
        return [sys.executable, "-m", module, *arguments]
    # ROOT comes last in the path, because it may also contain the libraries of this Python, and the other Python has its own.
    begin = f"import runpy, sys; sys.path.append({str(ROOT)!r}); runpy.run_module({module!r}, run_name='__main__')"
    return [python, "-P", "-c", begin, *arguments]


def kind_of(kind: str, kinds: Collection[str]) -> str:
    """Return which kind of environment a row uses. If there is only one kind, its name is empty, and rows may have any value in the
    column."""
    if "" in kinds:
        return ""
    if kind not in kinds:
        raise ConfigError(
            f"the row's environment column says {kind[:80]!r}, but environment.path has only {', '.join(kinds)}"
            if kind
            else f"the row has no environment column, but environment.path has several classes: {', '.join(kinds)}"
        )
    return kind
