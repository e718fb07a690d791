"""One script on one host through the user's own `ssh`, and the same on many hosts at once.

The script goes to `bash -s` over stdin: nothing of it, and no secret, is in an argument that others could read, and the login
shell there has nothing to quote. stdin stays open until the script has ended, so a command that is tied to its stdin
(``nodes/here.py``) ends when this machine lets go. `ssh` decides by its own configuration how a host is reached and which
host keys are known; it is only told to ask nobody.

Each host has an `ssh` and a thread that reads it; the caller's thread waits for all, and Ctrl-C reaches it there.
"""

from __future__ import annotations

import math
import random
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rollcall.launch.errors import LaunchError
from rollcall.redact import redact
from rollcall.wait import say
from rollcall.words import visible

CONNECT_S = 20  # for a connection, with its jump hosts
NO_FORWARDS = ("-o", "ClearAllForwardings=yes")  # those of the user's configuration belong to another session
CONNECTED = "rollcall-is-connected"  # the first line of every script: no error of ssh itself comes after it
LAST_LINES, MOST_LINES = 12, 1000  # of its output: shown with a problem, and kept
LET_GO_S = 60.0  # for a tied command to remove what it began
LOOK_EVERY_S = 0.05

DROPPED_TRIES = 5
DROPPED_S = 2.0  # at most between two of them
_DROPPED = re.compile(r"(kex|ssh)_exchange_identification: |Connection (closed|reset) by \S+ port \d+")

Tell = Callable[[str, str], None]  # host, line


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How hosts are reached, beside what ssh's own configuration says."""

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
    was_let_go: bool = False  # it was told to end, because another host failed

    @property
    def is_good(self) -> bool:
        return self.status == 0

    @property
    def answer(self) -> str | None:
        """The last line with an object in JSON: what a command of Rollcall answers."""
        found = [line for line in self.lines if line.startswith("{")]
        return found[-1] if self.is_good and found else None

    @property
    def was_dropped(self) -> bool:
        """Whether a server hung up before the login. sshd does, of a jump host too, when many connect at once (MaxStartups)."""
        return not self.was_reached and any(map(_DROPPED.match, self.lines))

    @property
    def problem(self) -> str:
        """The host's name, what went wrong there, and its last lines."""
        shown = "".join(f"\n    {redact(line)}" for line in self.lines[-LAST_LINES:])
        if self.status is None:
            return f"{self.host}: not done in time{shown}"
        if not self.was_reached:
            return f"{self.host}: ssh cannot reach it{shown}{_advice(shown)}"
        return f"{self.host}: failed with status {self.status}{shown}"


def start_ssh(
    words: Sequence[str], *, stderr: int | IO[bytes] = subprocess.PIPE, bufsize: int = -1
) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C in the terminal is for the launcher, which then ends this in its own way."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True, bufsize=bufsize)
    except FileNotFoundError:
        raise LaunchError(
            "`ssh` is not on this machine's PATH; install OpenSSH's client (Debian: openssh-client)"
        ) from None


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(BrokenPipeError):  # what was not sent is for nobody
            if pipe is not None:
                pipe.close()


class RemoteShell(threading.Thread):
    """A script that runs on a host. If a server drops it before the login, it is connected again after a moment."""

    def __init__(self, words: Sequence[str], *, host: str, script: str, tell: Tell | None = None) -> None:
        super().__init__(daemon=True)
        self._words, self._host, self._tell = words, host, tell
        self._script = f"echo {CONNECTED}\n{script}".encode()
        self._let_go, self._killed = threading.Event(), False
        self._process = start_ssh(words, stderr=subprocess.STDOUT)
        self.outcome = Outcome(host=host, status=None, lines=(), was_reached=False)
        self.start()

    def run(self) -> None:
        for tries_left in reversed(range(DROPPED_TRIES)):
            self.outcome = self._read()
            if not self.outcome.was_dropped or not tries_left or self._let_go.wait(random.uniform(0.1, DROPPED_S)):
                return
            self._process = start_ssh(self._words, stderr=subprocess.STDOUT)

    def _read(self) -> Outcome:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError, ValueError):  # ssh has ended, and says why; or it was let go
            stdin.write(self._script)
            stdin.flush()
        lines: deque[str] = deque(maxlen=MOST_LINES)
        was_reached = False
        for raw in stdout:
            line = visible(raw.decode(errors="replace").rstrip().rpartition("\r")[2])
            if line == CONNECTED:
                was_reached = True
            elif line:
                lines.append(line)
                if self._tell is not None:
                    self._tell(self._host, line)
        status = self._process.wait()
        close_pipes(self._process)
        return Outcome(
            host=self._host,
            status=None if self._killed else status,
            lines=tuple(lines),
            was_reached=was_reached,
            was_let_go=self._let_go.is_set(),
        )

    @property
    def has_failed(self) -> bool:
        return not self.is_alive() and not self.outcome.is_good

    def let_go(self) -> None:
        """Close its stdin, which ends a command that is tied to it."""
        self._let_go.set()
        if self.is_alive() and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def kill(self) -> None:
        """End the connection, if it is open still."""
        if self.is_alive():
            self._let_go.set()
            self._killed = True
            self._process.kill()
            self.join(LOOK_EVERY_S * 20)


def run_on_all(
    login: Login,
    scripts: Mapping[str, str],
    *,
    timeout_s: float = math.inf,
    tell: Tell | None = None,
    together: bool = False,
) -> list[Outcome]:
    """Each host's script on that host, all at once; the outcomes in the order of ``scripts``.

    ``together``: when one fails, the others are let go. Ctrl-C lets all of them go and waits for them.
    """
    shells: list[RemoteShell] = []
    give_up = time.monotonic() + timeout_s
    try:
        for host, script in scripts.items():
            shells.append(RemoteShell(login.words(host, *NO_FORWARDS), host=host, script=script, tell=tell))
        while any(shell.is_alive() for shell in shells) and time.monotonic() < give_up:
            if together and any(shell.has_failed for shell in shells):
                _let_go(shells)
                break
            time.sleep(LOOK_EVERY_S)
    except BaseException:
        _let_go(shells)
        raise
    finally:
        for shell in shells:
            shell.kill()
    return [shell.outcome for shell in shells]


def _let_go(shells: Sequence[RemoteShell]) -> None:
    going = [shell for shell in shells if shell.is_alive()]
    for shell in going:
        shell.let_go()
    give_up = time.monotonic() + LET_GO_S
    while any(shell.is_alive() for shell in going) and time.monotonic() < give_up:
        time.sleep(LOOK_EVERY_S)


def prefixed(hosts: Sequence[str], *, write: Callable[[str], None] = say) -> Tell:
    """Lines with the host's name in front, in a column of its own."""
    width = max(map(len, hosts), default=0)
    return lambda host, line: write(f"{host:<{width}} | {line}")


def _advice(shown: str) -> str:
    if "Host key verification failed" in shown or "host key is known" in shown:
        return "\n    look at its key with `ssh HOST` by hand, and accept it there if it is the right one"
    if "Permission denied" in shown:
        return "\n    `ssh HOST` by hand has to work without a question: see launch.ssh.user and launch.ssh.key, or ssh-agent"
    return ""
