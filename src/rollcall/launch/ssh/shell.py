"""Runs a script on one host through the user's own `ssh`, or on many hosts at once.

The script is passed to `bash -s` over stdin, so no secret is in an argument that other users could read, and nothing has to be
quoted for the host's login shell. stdin stays open until the script has ended, so a command that is tied to its stdin
(``nodes/machine.py``) stops when this machine disconnects. `ssh` uses its own configuration to decide how a host is reached and
which host keys are known, but it never prompts.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
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
from rollcall.process.here import exited

CONNECT_S = 20  # for a connection, including its jump hosts
NO_FORWARDS = ("-o", "ClearAllForwardings=yes")  # the user's configuration may contain port forwards for other sessions
CONNECTED = "rollcall-is-connected"  # the first output of every script: ssh's own errors come before it
LET_GO_S = 60.0  # for a command that is tied to its stdin to clean up
DROPPED_S = 2.0  # the longest wait before a dropped connection is retried
LONGEST_LINE = 1 << 30  # bytes; a host's output may lack line breaks
NO_SSH = "`ssh` is not on this machine's PATH; install OpenSSH's client (Debian: openssh-client)"
_DROPPED = re.compile(r"(kex|ssh)_exchange_identification: |Connection (closed|reset) by \S+ port \d+")

Tell = Callable[[str, str], None]  # host, line


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Login options in addition to ssh's own configuration."""

    user: str | None = None
    port: int | None = None
    key: Path | None = None

    def words(self, host: str, *options: str) -> tuple[str, ...]:
        """Return the `ssh` command that runs a script from its stdin on a host."""
        return (
            *("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "RemoteCommand=none"),
            # A shared connection that the user's ssh leaves behind would keep the output open.
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
    status: int | None  # None if it timed out
    lines: tuple[str, ...]  # the end of its output
    was_reached: bool
    was_let_go: bool  # stopped because another host failed or Ctrl-C was pressed

    @property
    def is_good(self) -> bool:
        return self.status == 0

    @property
    def answer(self) -> str | None:
        """The last line that is a JSON object. A Rollcall command prints its result as such a line."""
        found = [line for line in self.lines if line.startswith("{")]
        return found[-1] if self.is_good and found else None

    @property
    def problem(self) -> str:
        """The host's name, what went wrong on the host, and its last lines of output."""
        shown = "".join(f"\n    {redact(line)}" for line in self.lines[-12:])
        if self.status is None:
            return f"{self.host}: timed out{shown}"
        if self.was_reached:
            return f"{self.host}: failed with status {self.status}{shown}"
        advice = ""
        if "Host key verification failed" in shown or "host key is known" in shown:
            advice = "\n    run `ssh HOST` by hand to see its key, and accept the key if it is the right one"
        elif "Permission denied" in shown:
            advice = "\n    `ssh HOST` must work without a prompt: see launch.ssh.user and launch.ssh.key, or ssh-agent"
        return f"{self.host}: ssh cannot reach it{shown}{advice}"


def run_on_all(
    login: Login,
    scripts: Mapping[str, str],
    *,
    timeout_s: float | None = None,
    tell: Tell | None = None,
    together: bool = False,
) -> list[Outcome]:
    """Run each host's script on that host, all at once, and return the outcomes in the order of ``scripts``.

    With ``together``, a failure on one host disconnects the others. Ctrl-C disconnects all hosts and waits for their cleanup.
    """

    async def run() -> list[Outcome]:
        tasks = [
            asyncio.create_task(_run(login, host, script, timeout_s=timeout_s, tell=tell))
            for host, script in scripts.items()
        ]
        for ended in asyncio.as_completed(tasks):
            if not (await ended).is_good and together:
                for task in tasks:
                    task.cancel()
        return await asyncio.gather(*tasks)

    return asyncio.run(run())


async def _run(login: Login, host: str, script: str, **how: Any) -> Outcome:
    """Run a script on one host. Cancelling this task disconnects from the host."""
    outcome = Outcome(host=host, status=None, lines=(), was_reached=False, was_let_go=True)
    try:
        # sshd, on a jump host too, drops connections before the login when many clients connect at once (MaxStartups).
        for wait_s in (0.0, *(random.uniform(0.1, DROPPED_S) for _ in range(4))):
            await asyncio.sleep(wait_s)
            outcome = await _connect(login.words(host, *NO_FORWARDS), host, script, **how)
            if outcome.was_reached or outcome.was_let_go or not any(map(_DROPPED.match, outcome.lines)):
                break
    except asyncio.CancelledError:
        return replace(outcome, was_let_go=True)
    return outcome


async def _connect(
    words: Sequence[str], host: str, script: str, *, timeout_s: float | None, tell: Tell | None
) -> Outcome:
    pipe, lines = subprocess.PIPE, deque[str](maxlen=1000)
    was_reached = was_let_go = False
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True, limit=LONGEST_LINE
        )
    except FileNotFoundError:
        raise LaunchError(NO_SSH) from None
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"echo {CONNECTED}\n{script}".encode())
        while True:
            try:
                async with asyncio.timeout(LET_GO_S if was_let_go else timeout_s):
                    async for raw in process.stdout:
                        line = visible(raw.decode(errors="replace").rstrip().rpartition("\r")[2])
                        if line == CONNECTED:
                            was_reached = True
                        elif line:
                            lines.append(line)
                            if tell is not None:
                                tell(host, line)
                    await exited(process)
                break
            except asyncio.CancelledError:
                was_let_go = True
                process.stdin.close()  # stops a command that is tied to its stdin
            except TimeoutError:
                break
    finally:
        status = process.returncode
        if status is None:
            with suppress(ProcessLookupError):  # it has just exited
                os.killpg(process.pid, signal.SIGKILL)
        await exited(process)
    return Outcome(host=host, status=status, lines=tuple(lines), was_reached=was_reached, was_let_go=was_let_go)


def start_ssh(
    words: Sequence[str], *, stderr: IO[bytes], stdin: int | IO[bytes] = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start ssh in its own session: Ctrl-C in the terminal goes to the caller, which then kills ssh."""
    try:
        return subprocess.Popen(words, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
    except FileNotFoundError:
        raise LaunchError(NO_SSH) from None


def end_ssh(process: subprocess.Popen[bytes]) -> None:
    """Kill ssh and the commands that its configuration started, such as a ProxyCommand."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def prefixed(hosts: Sequence[str], *, write: Callable[[str], None] = say) -> Tell:
    """Return a function that prints lines with the host's name in a column in front."""
    width = max(map(len, hosts), default=0)
    return lambda host, line: write(f"{host:<{width}} | {line}")
