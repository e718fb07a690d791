"""One script on one host through the user's own `ssh`, and the same on many hosts at once.

The script goes to `bash -s` over stdin: nothing of it, and no secret, is in an argument that others could read, and the login
shell there has nothing to quote. stdin stays open until the script has ended, so a command that is tied to its stdin
(``nodes/machine.py``) ends when this machine lets go. `ssh` decides by its own configuration how a host is reached and which
host keys are known; it only must not ask questions.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

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
    was_let_go: bool  # another host failed, or Ctrl-C ended all

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
    sessions = [
        _Session(login.words(host, *NO_FORWARDS), host, script, timeout_s=timeout_s, tell=tell)
        for host, script in scripts.items()
    ]
    with ThreadPoolExecutor(len(sessions)) as pool:
        running = [pool.submit(session.run) for session in sessions]
        try:
            for ended in as_completed(running):
                if not ended.result().is_good and together:
                    break
        finally:
            for session in sessions:
                session.let_go()
        return [each.result() for each in running]


class _Session:
    """A script on a host, run by one thread; another may let it go."""

    def __init__(
        self, words: Sequence[str], host: str, script: str, *, timeout_s: float | None, tell: Tell | None
    ) -> None:
        self._words, self._host, self._timeout_s, self._tell = words, host, timeout_s, tell
        self._script = f"echo {CONNECTED}\n{script}".encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._let_go = threading.Event()

    def run(self) -> Outcome:
        for _ in range(4):
            outcome = self._connect()
            # sshd, of a jump host too, hangs up before the login when many connect at once (MaxStartups).
            if outcome.was_reached or not any(map(_DROPPED.match, outcome.lines)):
                return outcome
            if self._let_go.wait(random.uniform(0.1, DROPPED_S)):
                return replace(outcome, was_let_go=True)
        return self._connect()

    def let_go(self) -> None:
        """Ends the script's stdin, which ends a command that is tied to it."""
        self._let_go.set()
        process = self._process
        if process is not None and process.stdin is not None and process.poll() is None:
            process.stdin.close()
            self._end_after(LET_GO_S, process)

    def _connect(self) -> Outcome:
        lines: deque[str] = deque(maxlen=1000)
        was_reached = False
        with start_ssh(self._words, stderr=subprocess.STDOUT) as process:
            assert process.stdin is not None and process.stdout is not None
            self._process = process
            limit = None if self._timeout_s is None else self._end_after(self._timeout_s, process)
            with suppress(BrokenPipeError, ValueError):  # ssh has ended; it was let go
                os.write(process.stdin.fileno(), self._script)
            if self._let_go.is_set():
                process.stdin.close()
            for raw in process.stdout:
                line = visible(raw.decode(errors="replace").rstrip().rpartition("\r")[2])
                if line == CONNECTED:
                    was_reached = True
                elif line:
                    lines.append(line)
                    if self._tell is not None:
                        self._tell(self._host, line)
            was_let_go = self._let_go.is_set()
            status = process.wait()
            if limit is not None:
                limit.cancel()
        return Outcome(
            host=self._host,
            status=None if status == -signal.SIGKILL else status,
            lines=tuple(lines),
            was_reached=was_reached,
            was_let_go=was_let_go,
        )

    def _end_after(self, seconds: float, process: subprocess.Popen[bytes]) -> threading.Timer:
        timer = threading.Timer(seconds, end_ssh, [process])
        timer.daemon = True
        timer.start()
        return timer


def start_ssh(words: Sequence[str], *, stderr: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """In its own session: Ctrl-C in the terminal is for the caller, who then ends this."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True)
    except FileNotFoundError:
        raise LaunchError(
            "`ssh` is not on this machine's PATH; install OpenSSH's client (Debian: openssh-client)"
        ) from None


def end_ssh(process: subprocess.Popen[bytes]) -> None:
    """With the commands of its configuration, such as a ProxyCommand."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def prefixed(hosts: Sequence[str], *, write: Callable[[str], None] = say) -> Tell:
    """Prints lines with the host's name in front, in its own column."""
    width = max(map(len, hosts), default=0)
    return lambda host, line: write(f"{host:<{width}} | {line}")
