"""One script on one host through the user's own `ssh`, and the same on many hosts at once.

The script goes to `bash -s` over stdin: nothing of it, and no secret, is in an argument that others could read, and the login
shell there has nothing to quote. stdin stays open until the script has ended, so a command that is tied to its stdin
(``nodes/tied.py``) ends when this machine lets go. `ssh` decides by its own configuration how a host is reached and which
host keys are known; it is only told to ask nobody.

Each host has an `ssh` and threads that read it; the caller's thread waits for all, and Ctrl-C reaches it there.
"""

from __future__ import annotations

import codecs
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
from rollcall.redact import LONGEST_LINE, cut_line, redact
from rollcall.wait import say
from rollcall.words import visible

CONNECT_S = 20  # for a connection, with its jump hosts
UNREACHABLE = 255  # the exit status of ssh itself
NO_FORWARDS = ("-o", "ClearAllForwardings=yes")  # those of the user's configuration belong to another session
LAST_LINES = 12
LONGEST_PIECE = 1 << 16  # bytes; of a longer line a piece at a time
MOST_KEPT = 1 << 20  # characters of what a script printed
QUIET_S, DRAIN_S = 1.0, 30.0  # for what a script that has ended printed: without a new line, and in all
LET_GO_S = 60.0  # for a tied command to remove what it began
LOOK_EVERY_S = 0.05
NO_SSH = "`ssh` is not on this machine's PATH; install OpenSSH's client (Debian: openssh-client)"

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
            *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
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
    out: str  # the end of what it printed on stdout
    last: tuple[str, ...]  # its last lines, of stdout and stderr
    was_let_go: bool = False  # it was told to end, because another host failed

    @property
    def is_good(self) -> bool:
        return self.status == 0

    @property
    def was_reached(self) -> bool:
        return self.status != UNREACHABLE

    @property
    def was_dropped(self) -> bool:
        """Whether a server hung up before the login. sshd does, of a jump host too, when many connect at once (MaxStartups)."""
        return not self.was_reached and not self.out and any(map(_DROPPED.match, self.last))

    @property
    def problem(self) -> str:
        """The host's name, what went wrong there, and its last lines."""
        shown = "".join(f"\n    {line}" for line in self.last)
        if not self.was_reached:
            return f"{self.host}: ssh cannot reach it{shown}{_advice(shown)}"
        if self.status is None:
            return f"{self.host}: not done in time{shown}"
        return f"{self.host}: failed with status {self.status}{shown}"


def start_ssh(
    words: Sequence[str], *, stderr: int | IO[bytes] = subprocess.PIPE, bufsize: int = -1
) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C in the terminal is for the launcher, which then ends this in its own way."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True, bufsize=bufsize)
    except FileNotFoundError:
        raise LaunchError(NO_SSH) from None


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(BrokenPipeError):  # what was not sent is for nobody
            if pipe is not None:
                pipe.close()


class RemoteShell:
    """A script that runs on a host."""

    def __init__(self, words: Sequence[str], *, host: str, script: str, tell: Tell | None = None) -> None:
        self.host = host
        self._words, self._script, self._tell = words, script, tell
        self._tries_left = DROPPED_TRIES
        self._connect()

    def _connect(self) -> None:
        self._tries_left -= 1
        self._again_at: float | None = None  # when it connects again; None: it does not
        self._status: int | None = None  # None: it runs, or has not been looked at since it ended
        self._out: deque[str] = deque()
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._num_read = 0  # lines
        process = self._process = start_ssh(self._words)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._stdin = process.stdin
        self._lock = threading.Lock()
        threading.Thread(target=self._send, args=(self._script.encode(),), daemon=True).start()
        self._readers = [
            threading.Thread(target=self._read, args=(process.stdout, self._out), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr, None), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def is_over(self) -> bool:
        """As `look` last found it."""
        return self._status is not None and self._again_at is None

    @property
    def has_failed(self) -> bool:
        return self.is_over and self._status != 0

    def look(self) -> None:
        """Note whether it has ended. If a server dropped it before the login, connect again after a moment."""
        if self._again_at is not None:
            if time.monotonic() >= self._again_at:
                self._connect()
        elif self._status is None and (status := self._process.poll()) is not None:
            self._status = status
            if status != 0 and self._tries_left > 0 and self.outcome().was_dropped:
                self._again_at = time.monotonic() + random.uniform(0.1, DROPPED_S)

    def let_go(self) -> None:
        """Close its stdin, which ends a command that is tied to it."""
        self._tries_left, self._again_at = 0, None
        self._close()

    def _close(self) -> None:
        with self._lock:
            if not self._stdin.closed:
                try:
                    self._stdin.close()
                except BrokenPipeError:
                    return  # it has ended

    def kill(self) -> None:
        """End the connection."""
        self._process.kill()
        self._process.wait()

    def outcome(self) -> Outcome:
        """Of one that is over, or whose time is."""
        status = self._process.poll()
        if status is None:
            self.kill()
        self._drain()
        was_let_go = self._tries_left == 0 and self._stdin.closed
        self._close()
        return Outcome(
            host=self.host,
            status=status,
            out="".join(self._out),
            last=tuple(map(redact, self._last)),
            was_let_go=was_let_go,
        )

    def _drain(self) -> None:
        """Wait for what is in the pipes. A connection that the user's ssh shares with others may hold them longer."""
        give_up, num_read = time.monotonic() + DRAIN_S, -1
        while num_read != self._num_read and time.monotonic() < give_up:
            num_read = self._num_read
            for reader in self._readers:
                reader.join(QUIET_S)
            if not any(reader.is_alive() for reader in self._readers):
                return

    def _send(self, script: bytes) -> None:
        with self._lock:
            try:
                self._stdin.write(script)
                self._stdin.flush()
            except (BrokenPipeError, ValueError):
                return  # ssh has ended, and says why

    def _read(self, pipe: IO[bytes], kept: deque[str] | None) -> None:
        """Lines of the host, which may print what it likes: in pieces, without an end, or what a terminal acts on."""
        num_kept, held = 0, ""  # of a line that has not ended
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with pipe:
            while raw := pipe.readline(LONGEST_PIECE):
                line = decoder.decode(raw)
                self._num_read += 1
                if kept is not None:
                    kept.append(line)
                    num_kept += len(line)
                    while num_kept > MOST_KEPT:
                        num_kept -= len(kept.popleft())
                held += line
                if held.endswith("\n"):
                    self._show(held)
                    held = ""
                elif len(held) > LONGEST_LINE:
                    shown, held = cut_line(held)
                    self._show(shown)
        self._show(held)

    def _show(self, line: str) -> None:
        """A secret in it is redacted where it is printed; none goes on in the next line."""
        if text := visible(line.rstrip().rpartition("\r")[2]):
            self._last.append(text)
            if self._tell is not None:
                self._tell(self.host, text)


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
        while time.monotonic() < give_up:
            for shell in shells:
                shell.look()
            if not (going := [shell for shell in shells if not shell.is_over]):
                break
            if together and any(shell.has_failed for shell in shells):
                _let_go(going)
                break
            time.sleep(LOOK_EVERY_S)
        return [shell.outcome() for shell in shells]
    except BaseException:
        _let_go([shell for shell in shells if not shell.is_over])
        for shell in shells:
            shell.outcome()
        raise


def _let_go(shells: Sequence[RemoteShell]) -> None:
    for shell in shells:
        shell.let_go()
    give_up = time.monotonic() + LET_GO_S
    while time.monotonic() < give_up:
        for shell in shells:
            shell.look()
        if all(shell.is_over for shell in shells):
            break
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
