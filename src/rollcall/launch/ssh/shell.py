"""One script on one host through the user's own `ssh`, and the same on many hosts at once.

The script goes to `bash -s` over stdin: nothing of it, and no secret, is in an argument that others could read, and the login
shell there has nothing to quote. stdin stays open until the script has ended, so a command that is tied to its stdin
(``nodes/machine.py``) ends when this machine lets go. `ssh` decides by its own configuration how a host is reached and which
host keys are known; it only must not ask questions.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from rollcall.base.redact import redact
from rollcall.base.wait import say
from rollcall.base.words import visible
from rollcall.launch.record import LaunchError

CONNECT_S = 20  # for a connection, with its jump hosts
NO_FORWARDS = ("-o", "ClearAllForwardings=yes")  # those of the user's configuration belong to another session
CONNECTED = "rollcall-is-connected"  # the first line of every script: no error of ssh itself comes after it
LET_GO_S = 60.0  # for a tied command to remove what it began
DROPPED_S = 2.0  # at most, before a connection that was dropped is tried again
_DROPPED = re.compile(r"(kex|ssh)_exchange_identification: |Connection (closed|reset) by \S+ port \d+")

Tell = Callable[[str, str], None]  # host, line


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How hosts are reached, apart from what ssh's own configuration says."""

    user: str | None = None
    port: int | None = None
    key: Path | None = None

    def words(self, host: str, *options: str) -> tuple[str, ...]:
        """The `ssh` that runs a script from its stdin on a host."""
        return (
            *("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "RemoteCommand=none"),
            # A connection that the user's ssh leaves behind for others would hold the output open.
            *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no"),
            *(("-l", self.user) if self.user else ()),
            *(("-p", str(self.port)) if self.port else ()),
            *(("-i", str(self.key), "-o", "IdentitiesOnly=yes") if self.key else ()),
            *options,
            *("--", host, "bash -s"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    host: str
    status: int | None  # None: it was still running when its time was over
    lines: tuple[str, ...]  # the end of its output
    was_reached: bool
    was_let_go: bool = False  # another host failed, or Ctrl-C ended all

    @property
    def is_good(self) -> bool:
        return self.status == 0

    @property
    def answer(self) -> str | None:
        """The last line with a JSON object: the answer of a Rollcall command."""
        found = [line for line in self.lines if line.startswith("{")]
        return found[-1] if self.is_good and found else None

    @property
    def problem(self) -> str:
        """The host's name, what went wrong there, and its last lines."""
        shown = "".join(f"\n    {redact(line)}" for line in self.lines[-12:])
        if self.status is None:
            return f"{self.host}: not done in time{shown}"
        if self.was_reached:
            return f"{self.host}: failed with status {self.status}{shown}"
        advice = ""
        if "Host key verification failed" in shown or "host key is known" in shown:
            advice = "\n    look at its key with `ssh HOST` by hand, and accept it there if it is the right one"
        elif "Permission denied" in shown:
            advice = "\n    `ssh HOST` by hand has to work without a question: see launch.ssh.user and launch.ssh.key, or ssh-agent"
        return f"{self.host}: ssh cannot reach it{shown}{advice}"


def run_on_all(
    login: Login,
    scripts: Mapping[str, str],
    *,
    timeout_s: float | None = None,
    tell: Tell | None = None,
    together: bool = False,
) -> list[Outcome]:
    """Runs each host's script on that host, all at once; the outcomes are in the order of ``scripts``.

    ``together``: when one fails, the others are let go. Ctrl-C lets all of them go and waits for them.
    """

    async def all_hosts() -> list[Outcome]:
        tasks = [
            asyncio.create_task(_on_host(login, host, script, timeout_s=timeout_s, tell=tell))
            for host, script in scripts.items()
        ]
        try:
            for ended in asyncio.as_completed(tasks):
                if not (await ended).is_good and together:
                    break
        finally:
            for task in tasks:
                if not task.cancelling():  # a signal may have ended the loop, which cancels all
                    task.cancel()
            outcomes = await asyncio.gather(*tasks)
        return outcomes

    return asyncio.run(all_hosts())


async def _on_host(login: Login, host: str, script: str, *, timeout_s: float | None, tell: Tell | None) -> Outcome:
    words = login.words(host, *NO_FORWARDS)
    for tries_left in reversed(range(5)):
        outcome = await _connect(words, host, script, timeout_s=timeout_s, tell=tell)
        # sshd, of a jump host too, hangs up before the login when many connect at once (MaxStartups).
        if outcome.was_let_go or outcome.was_reached or not any(map(_DROPPED.match, outcome.lines)) or not tries_left:
            break
        try:
            await asyncio.sleep(random.uniform(0.1, DROPPED_S))
        except asyncio.CancelledError:
            return replace(outcome, was_let_go=True)
    return outcome


async def _connect(
    words: Sequence[str], host: str, script: str, *, timeout_s: float | None, tell: Tell | None
) -> Outcome:
    """Cancelled, it lets go: it closes the script's stdin, which ends a command that is tied to it."""
    connection, pipe = _Connection(host, tell), subprocess.PIPE
    try:
        # Its own session: Ctrl-C in the terminal is for the launcher, which then ends this in its own way.
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: connection, *words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
        )
    except FileNotFoundError:
        raise no_ssh() from None
    stdin: Any = transport.get_pipe_transport(0)
    stdin.write(f"echo {CONNECTED}\n{script}".encode())
    was_let_go = False
    try:
        await asyncio.wait(connection.ends, timeout=timeout_s)
    except asyncio.CancelledError:
        was_let_go = True
        stdin.close()
        await asyncio.wait(connection.ends, timeout=LET_GO_S)
    status = transport.get_returncode() if all(end.done() for end in connection.ends) else None
    if status is None:
        with suppress(ProcessLookupError):
            transport.kill()
        await asyncio.wait({connection.exited}, timeout=1.0)
    transport.close()
    return Outcome(
        host=host,
        status=status,
        lines=tuple(connection.lines),
        was_reached=connection.was_reached,
        was_let_go=was_let_go,
    )


class _Connection(asyncio.SubprocessProtocol):
    """The output of one `ssh`, line by line."""

    def __init__(self, host: str, tell: Tell | None) -> None:
        loop = asyncio.get_running_loop()
        # What it leaves behind may hold stdin, so ``connection_lost`` may never come.
        self._printed, self.exited = self.ends = (loop.create_future(), loop.create_future())
        self.lines: deque[str] = deque(maxlen=1000)
        self.was_reached = False
        self._host, self._tell, self._rest = host, tell, b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-(1 << 20) :]  # a progress bar may never end its line
        for raw in whole:
            self._take(raw)

    def process_exited(self) -> None:
        self.exited.set_result(None)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._take(self._rest)
            self._printed.set_result(None)

    def _take(self, raw: bytes) -> None:
        line = visible(raw.decode(errors="replace").rstrip().rpartition("\r")[2])
        if line == CONNECTED:
            self.was_reached = True
        elif line:
            self.lines.append(line)
            if self._tell is not None:
                self._tell(self._host, line)


def no_ssh() -> LaunchError:
    return LaunchError("`ssh` is not on this machine's PATH; install OpenSSH's client (Debian: openssh-client)")


def start_ssh(words: Sequence[str], *, stderr: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """In its own session: Ctrl-C in the terminal is for the caller, who then ends this."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True)
    except FileNotFoundError:
        raise no_ssh() from None


def prefixed(hosts: Sequence[str], *, write: Callable[[str], None] = say) -> Tell:
    """Prints lines with the host's name in front, in its own column."""
    width = max(map(len, hosts), default=0)
    return lambda host, line: write(f"{host:<{width}} | {line}")
