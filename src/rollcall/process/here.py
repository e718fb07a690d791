"""Starts processes as children of this one.

After its command, each gets a socket, a lifeline whose other end only this process holds, a file for stack dumps, and the other
descriptors it is given. Each leads its own process group: Ctrl-C reaches only this process, and what they start ends with them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rollcall.base.process_table import Process, descendants
from rollcall.nodes.framing import LONGEST
from rollcall.nodes.processes import signal_processes
from rollcall.process.child import STACK_SIGNAL
from rollcall.process.ending import how_it_ended, plain_stack
from rollcall.process.worker import Ending, Reader, Worker

if TYPE_CHECKING:
    from rollcall.process.debug.here import DebugLine

KILL_S = 10.0  # a process that is stuck in the kernel (a dead network disk) ends when the kernel lets go
_LOG_BYTES = 1 << 16


def spawn(
    target: str,
    *,
    name: str,
    answers: Mapping[str, Reader],
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    fds: Sequence[int] = (),
    output: int | None = None,
    line: DebugLine | None = None,
    longest: int = LONGEST,
) -> Worker:
    """Start a process that makes ``module:Class`` with ``fds``. The first call waits until it is up."""
    command = [sys.executable, "-m", "rollcall.process.child", target]
    link = LinkHere(command, env=env, cwd=cwd, fds=fds, output=output)
    return Worker(link, name=name, answers=answers, longest=longest, line=line)


class SocketLink:
    """Sending and receiving over a connection: a socket pair, or one through a door (nodes/door.py)."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(False)

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, data: memoryview) -> int:
        return self.connection.send(data)

    def receive(self, most: int) -> bytes:
        return self.connection.recv(most)


class LinkHere(SocketLink):
    """A child of this process. ``output``: a file descriptor for what it prints; without one there is a log."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        fds: Sequence[int] = (),
        output: int | None = None,
    ) -> None:
        # Without names, so that a kill leaves nothing behind.
        self._crash = tempfile.TemporaryFile()  # noqa: SIM115
        self._log = tempfile.TemporaryFile() if output is None else None  # noqa: SIM115
        prints = output if self._log is None else self._log.fileno()
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        lifeline, self._lifeline_fd = os.pipe()
        passed = (theirs.fileno(), lifeline, self._crash.fileno(), *fds)
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.pid = self._process.pid
        self.where = f"process {self.pid}"

    def log_tail(self, lines: int) -> str:
        if self._log is None or self._log.closed:
            return ""
        fd = self._log.fileno()
        data = os.pread(fd, _LOG_BYTES, max(0, os.fstat(fd).st_size - _LOG_BYTES))
        return "\n".join(data.decode(errors="replace").splitlines()[-lines:])

    def end(self, *, grace_s: float, ask_stack: bool = False) -> Ending:
        if ask_stack:
            self._ask_for_stack()
        started = descendants(self.pid)  # once it has ended, nobody knows what it started
        with suppress(OSError):  # a child that answers calls ends now
            self.connection.shutdown(socket.SHUT_RDWR)
        until_s = time.monotonic() + grace_s
        while Process.of(self.pid) is not None and time.monotonic() < until_s:
            time.sleep(0.005)
        # Its status has not been taken, so its number and its group's are still its own; and a status does not change.
        with suppress(ProcessLookupError, PermissionError):  # macOS says so of a group whose only member has died
            os.killpg(self.pid, signal.SIGKILL)
        signal_processes(started, signal.SIGKILL)
        status: int | None
        try:
            status = self._process.wait(KILL_S)
            how = how_it_ended(status)
        except subprocess.TimeoutExpired:
            status, how = None, f"it is still there {KILL_S:g} s after SIGKILL"
        stack = os.pread(self._crash.fileno(), 4000, 0).decode(errors="replace")
        self._close()
        return Ending(how=how, status=status, stack=plain_stack(stack))

    def _ask_for_stack(self) -> None:
        """Makes it dump its stack, which works inside C code too."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)
        until_s, size = time.monotonic() + 0.5, 0
        while time.monotonic() < until_s:
            time.sleep(0.01)
            before, size = size, os.fstat(self._crash.fileno()).st_size
            if size and size == before:
                return

    def _close(self) -> None:
        """Closes everything but the log, which tells why it ended."""
        self.connection.close()
        os.close(self._lifeline_fd)
        self._crash.close()
