"""Starts processes as children of this process, and reports how they ended.

Each child's command line ends with the numbers of its descriptors: a socket, a lifeline whose other end only this process has, a file
for stack dumps, and any others that the caller passes on. Each child leads its own process group, so Ctrl-C reaches only this process,
and a child's own children are killed with it.
"""

from __future__ import annotations

import asyncio
import os
import re
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
from rollcall.base.words import visible
from rollcall.nodes.framing import LONGEST
from rollcall.nodes.processes import signal_processes
from rollcall.process.child import STACK_SIGNAL
from rollcall.process.worker import Ending, Link, Reader, Worker

if TYPE_CHECKING:
    from rollcall.process.debug.here import DebugLine

KILL_S = 10.0  # a process that is stuck in the kernel (a dead network disk) exits only when the kernel returns
_LOG_BYTES = 1 << 16
_OWN_FRAMES = (
    "rollcall/process/child",
    "rollcall/reward/worker",
    "rollcall/reward/user_function",
    "runpy",
    "/asyncio/",
)


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
    """Start a process that creates ``module:Class`` with ``fds``. The first call waits until the process is up."""
    command = [sys.executable, "-m", "rollcall.process.child", target]
    link = LinkHere(command, env=env, cwd=cwd, fds=fds, output=output)
    return Worker(link, name=name, answers=answers, longest=longest, line=line)


class LinkHere(Link):
    """A child of this process. ``output`` is the file descriptor that its output goes to; without it, the output goes to a log."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        fds: Sequence[int] = (),
        output: int | None = None,
    ) -> None:
        # These files have no names, so nothing is left behind if this process is killed.
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
        if self._log is None:
            return ""
        fd = self._log.fileno()
        data = os.pread(fd, _LOG_BYTES, max(0, os.fstat(fd).st_size - _LOG_BYTES))
        return "\n".join(data.decode(errors="replace").splitlines()[-lines:])

    def end(self, *, grace_s: float, ask_stack: bool = False) -> Ending:
        if ask_stack:
            self._ask_for_stack()
        started = descendants(self.pid)  # after the child's exit, the processes that it started can no longer be found
        with suppress(OSError):  # a child that serves calls exits when its socket closes
            self.connection.shutdown(socket.SHUT_RDWR)
        until_s = time.monotonic() + grace_s
        while Process.of(self.pid) is not None and time.monotonic() < until_s:
            time.sleep(0.005)
        # The exit status has not been collected yet, so no other process can have the child's process id or group id, and a signal
        # does not change the status of a child that has already exited.
        with suppress(ProcessLookupError, PermissionError):  # macOS raises this for a group whose only member has died
            os.killpg(self.pid, signal.SIGKILL)
        signal_processes(started, signal.SIGKILL)
        status: int | None
        try:
            status = self._process.wait(KILL_S)
            how = how_it_ended(status)
        except subprocess.TimeoutExpired:
            status, how = None, f"it is still running {KILL_S:g} s after SIGKILL"
        stack = os.pread(self._crash.fileno(), 4000, 0).decode(errors="replace")
        self._close()
        return Ending(how=how, status=status, stack=plain_stack(stack))

    def _ask_for_stack(self) -> None:
        """Make the child dump its stack. This works even while the child runs C code."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)
        until_s, size = time.monotonic() + 0.5, 0
        while time.monotonic() < until_s:
            time.sleep(0.01)
            before, size = size, os.fstat(self._crash.fileno()).st_size
            if size and size == before:
                return

    def _close(self) -> None:
        """Close everything except the log, which shows why the child exited."""
        self.connection.close()
        os.close(self._lifeline_fd)
        self._crash.close()


async def exited(process: asyncio.subprocess.Process) -> None:
    """Wait until the process exits. asyncio's own wait (3.11) also waits for its output, which leftover processes may keep open."""
    ending = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait({ending}, timeout=0.5)
    finally:
        ending.cancel()


def plain_stack(dump: str) -> str:
    """Convert faulthandler's dump to a Python traceback: newest call last, without Rollcall's own frames and threads."""
    said: list[str] = []
    threads: list[tuple[bool, list[str]]] = []
    for line in dump.splitlines():
        if header := re.match(r"(Current )?[Tt]hread 0x[0-9a-f]+\b", line):
            threads.append((bool(header[1]), []))
        elif call := re.match(r"  File (\".*\"), line (\d+) in (.*)", line):
            if threads and not any(name in call[1] for name in _OWN_FRAMES):
                threads[-1][1].insert(0, f"  File {call[1]}, line {call[2]}, in {call[3]}")
        elif line.startswith("Fatal Python error"):
            said.append(line)
    threads = [thread for thread in threads if thread[1]]
    for is_current, frames in sorted(threads, key=lambda thread: thread[0]):  # the current thread comes last
        which = "in the main thread:" if is_current else "in another thread:"
        said += frames if len(threads) == 1 else [which, *frames]
    return visible("\n".join(said))


def how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    hint = ", perhaps because memory ran out" if returncode == -signal.SIGKILL else ""
    try:
        return f"{signal.Signals(-returncode).name}{hint}"
    except ValueError:  # the kernel has more signals than Python has names for
        return f"signal {-returncode}"
