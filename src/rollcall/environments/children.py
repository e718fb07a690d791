"""The parent's side of a zygote and of the children that it forks (zygote.py, child.py). What they say is data (frames.py)."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollcall.debug.line import DebugLine
from rollcall.environments.frames import Failed, read_answer, receive, request_bytes, send
from rollcall.environments.protocol import EnvironmentFailed
from rollcall.errors import ConfigError
from rollcall.process.ending import how_it_ended
from rollcall.process_table import descendants
from rollcall.reward.confine import Confinement, environment
from rollcall.wait import Wait
from rollcall.words import visible

_END_WAIT_S = 10.0
_STATUS_WAIT_S = 5.0
_GRACE_S = 0.5
_LOOK_S = 1.0  # between two looks whether a debugger holds it
FILES_OF_CHILD = 2  # that this process opens for it: its socket, and its line to the debugger
_GONE = "the process that environments are forked from is gone"
_RETRY_S = 0.005  # the zygote has more to do than its socket holds
_MAX_READY_BYTES = 64 << 20
_MAX_MESSAGE_BYTES = 1 << 16
_T = TypeVar("_T")
_ROOT = Path(__file__).resolve().parents[2]


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


class Child:
    """One process, its socket, and its line to the debugger."""

    def __init__(self, number: int, *, kind: str, ended: asyncio.Future[str], line: DebugLine) -> None:
        self.number = number
        self._line = line
        self._loop = ended.get_loop()
        self.kind = kind
        self.pid = 0  # until the zygote has said it
        self.ended = ended  # how, in words
        self._is_asked = False
        self._has_failed = False
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self, connection: socket.socket) -> None:
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        except BaseException:
            connection.close()
            self._line.close()
            raise
        self._loop.add_reader(self._line.fd, self._debug)

    def _debug(self) -> None:
        """It has stopped in the debugger. A terminal of this process talks to it here and now, and the whole run waits."""
        self._loop.remove_reader(self._line.fd)
        if self._line.answer():
            self._loop.add_reader(self._line.fd, self._debug)

    @property
    def is_usable(self) -> bool:
        """It lives, and owes no answer."""
        return not (self.ended.done() or self._is_asked or self._has_failed)

    async def ask(self, request: dict[str, Any], wanted: type[_T]) -> _T:
        """Its answer; EnvironmentFailed: it has none. A call that was given up leaves it unusable."""
        self._is_asked = True
        try:
            await send(self._writer, request_bytes(request))
            answer = read_answer(await receive(self._reader), wanted)
        except (EOFError, ConnectionError):
            raise EnvironmentFailed(await self._why_silent()) from None
        if isinstance(answer, Failed):
            self._has_failed = True
            raise EnvironmentFailed(visible(answer.failed))
        self._is_asked = False
        return answer

    async def _why_silent(self) -> str:
        """Its socket has closed: it has ended, which the zygote says in a moment, or user code has closed it."""
        if not await _has_settled(self, _STATUS_WAIT_S):
            return "its process closed the connection; user code must leave file descriptors alone that it did not open"
        return f"its process died ({self.ended.result()})"

    def hang_up(self) -> None:
        self._writer.close()
        if self._line.fd >= 0:
            self._loop.remove_reader(self._line.fd)
            self._line.close()


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
    if python is None:
        return [sys.executable, "-m", "rollcall.environments.zygote"]
    # Last in its path: another Python has libraries of its own, and the folder of this package may hold this one's too.
    begin = f"import runpy, sys; sys.path.append({str(_ROOT)!r}); runpy.run_module('rollcall.environments.zygote', run_name='__main__')"
    return [python, "-c", begin]


class Zygote:
    """The parent's side of a zygote. All but its making and closing happens in one event loop."""

    def __init__(self, setup: Setup, *, output_fd: int, timeout_s: float) -> None:
        self.children: dict[int, Child] = {}
        self._num_started = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sending = asyncio.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ready_fd, ready_write_fd = os.pipe()
        lifeline_read_fd, self._lifeline_fd = os.pipe()
        line = DebugLine(role="environment", number=0)
        child_fds = (theirs.fileno(), ready_write_fd, lifeline_read_fd, line.theirs.fileno())
        confinement = Confinement(
            own_files=False, network=True, env=tuple(setup.env), processes=0, memory_mb=setup.memory_mb, file_mb=0
        )
        variables = environment(confinement, folder="", environ=os.environ, root=_ROOT)
        variables.pop("TMPDIR")  # its files are the user's own
        if "TMPDIR" in os.environ:
            variables["TMPDIR"] = os.environ["TMPDIR"]
        try:
            self.process = subprocess.Popen(
                [*_command(setup.python), *map(str, child_fds)],
                pass_fds=child_fds,
                stdin=subprocess.PIPE,
                stdout=output_fd,
                stderr=output_fd,
                env=variables,
                start_new_session=True,  # Ctrl-C is for this process
            )
        finally:
            theirs.close()
            line.theirs.close()
            os.close(ready_write_fd)
            os.close(lifeline_read_fd)
        self._control.setblocking(False)
        try:
            self._send_setup(setup)
            self.tools = self._read_ready(ready_fd, line, timeout_s=timeout_s)
        except BaseException:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(self.process.pid, signal.SIGKILL)
            self.hang_up()
            self.wait()
            raise
        finally:
            os.close(ready_fd)
            line.close()

    def _send_setup(self, setup: Setup) -> None:
        assert self.process.stdin is not None
        # The libraries of this Python are not for another one.
        told = asdict(setup) | {"sys_path": [os.getcwd(), *(sys.path if setup.python is None else [])]}
        try:
            with self.process.stdin as sink:
                sink.write(json.dumps(told).encode())
        except BrokenPipeError:
            pass  # it has ended, which is noticed in a moment

    def _read_ready(self, ready_fd: int, line: DebugLine, *, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
        body = bytearray()
        poll = select.poll()
        poll.register(ready_fd, select.POLLIN)
        poll.register(line.fd, select.POLLIN)
        wait = Wait(timeout_s)
        while len(body) <= _MAX_READY_BYTES:
            ready = {fd for fd, _ in poll.poll(1000 * min(_LOOK_S, wait.left_s))}
            if wait.is_over and not ready:
                raise ConfigError(
                    f"the environment was not ready within {timeout_s:g} s; check what its module does when imported"
                )
            if ready == {line.fd}:
                _debug_start(line, poll)
                wait = Wait(timeout_s)
            elif line.is_held:
                wait = Wait(timeout_s)
            if ready_fd not in ready:
                continue
            if not (data := os.read(ready_fd, 1 << 16)):
                break
            body += data
        try:
            told = json.loads(body)
        except ValueError:
            try:
                how = f"ended at its start ({how_it_ended(self.process.wait(_END_WAIT_S))})"
            except subprocess.TimeoutExpired:
                how = "said at its start what no environment says"
            raise ConfigError(f"the environment's process {how}; check what its module does when imported") from None
        if "refused" in told:
            raise ConfigError(visible(str(told["refused"])))
        return told["tools"]

    def has_ended(self) -> bool:
        return self.process.poll() is not None or self._control.fileno() < 0

    def listen(self) -> bool:
        """Hear the zygote in this event loop; True: it was another one before, and its children are ended."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return False
        was = self._loop
        for child in list(self.children.values()):
            self.kill(child)
        self.children.clear()
        self._loop = loop
        self._sending = asyncio.Lock()
        loop.add_reader(self._control.fileno(), self._hear)
        return was is not None

    async def start(self, kind: str) -> Child:
        assert self._loop is not None
        try:
            ours, theirs = socket.socketpair()
            line = DebugLine(role="environment", number=self._num_started + 1)
        except OSError as error:  # each child needs a file descriptor here
            raise EnvironmentFailed(
                f"no process can be started ({error}); raise the limit of open files (ulimit -n)"
            ) from None
        with theirs, line.theirs:
            self._num_started += 1
            child = Child(self._num_started, kind=kind, ended=self._loop.create_future(), line=line)
            await child.open(ours)
            try:
                async with self._sending:  # one of thousands tries again, not all of them
                    while not self._send({"start": child.number, "kind": kind}, theirs.fileno(), line.theirs.fileno()):
                        await asyncio.sleep(_RETRY_S)
            except BaseException:
                child.hang_up()
                raise
        self.children[child.number] = child
        if self._control.fileno() < 0:
            _settle(child, _GONE)
        return child

    def kill(self, child: Child) -> None:
        """Have it ended, soon. A socket that closes ends a child that waits for its next request."""
        child.hang_up()
        if not child.ended.done():
            self._send({"end": child.number})

    async def end(self, child: Child) -> None:
        """End it with all it started, and wait until it has."""
        for _ in range(round(_END_WAIT_S / _RETRY_S)):
            if child.ended.done() or self._send({"end": child.number}):
                break
            await asyncio.sleep(_RETRY_S)
        if not await _has_settled(child, _END_WAIT_S):
            # Stuck in the kernel, or the zygote hangs: then nothing that it started can be trusted.
            self.process.kill()
        child.hang_up()

    def _send(self, message: dict[str, Any], *fds: int) -> bool:
        """False: there is no room yet."""
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except BlockingIOError:
            return False
        except OSError:
            self._lose()
        return True

    def _hear(self) -> None:
        try:
            while body := self._control.recv(_MAX_MESSAGE_BYTES):
                message = json.loads(body)
                if "started" in message and message["started"] in self.children:
                    self.children[message["started"]].pid = message["pid"]
                elif "ended" in message and (child := self.children.pop(message["ended"], None)) is not None:
                    how = message["why"] if "why" in message else how_it_ended(message["status"])
                    _settle(child, how)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            pass  # it is gone, or user code in it wrote to our socket
        self._lose()

    def _lose(self) -> None:
        """The zygote is gone: nobody could say how a child ended, so its children end too."""
        if self._control.fileno() < 0:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control.fileno())
        self._control.close()
        orphans = [child.pid for child in self.children.values() if child.pid]
        # While they live, each is still the parent of what left its group.
        started = descendants(*orphans) if orphans else []
        os.close(self._lifeline_fd)
        for kill, pid in [(os.killpg, pid) for pid in orphans] + [
            (os.kill, each.pid) for each in started if each.is_alive()
        ]:
            try:
                kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it ended with its lifeline, or with its group
        for child in self.children.values():
            _settle(child, _GONE)
        self.children.clear()

    def hang_up(self) -> None:
        """The zygote then ends its children, and itself."""
        for child in self.children.values():
            child.pid = 0  # the zygote kills them, and waits for them
        self._lose()

    def wait(self) -> None:
        """Until it has ended."""
        try:
            self.process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_END_WAIT_S)


def _debug_start(line: DebugLine, poll: select.poll) -> None:
    """The user's module has stopped while it is imported."""
    poll.unregister(line.fd)
    if line.answer():
        poll.register(line.fd, select.POLLIN)


async def _has_settled(child: Child, limit_s: float) -> bool:
    """Whether it ends in this time. A loop that stood still hears of it only after the time has passed."""
    for wait_s in (limit_s, _GRACE_S):
        if not child.ended.done():
            await asyncio.wait({child.ended}, timeout=wait_s)
    return child.ended.done()


def _settle(child: Child, how: str) -> None:
    if not child.ended.done():
        child.ended.set_result(how)
