"""A command that runs on a lab host: its output in files, its end waited for with a deadline, its children ended with it.

Output goes to files because a daemon that the command leaves behind would hold a pipe open for ever.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TAG = "LAB_COMMAND"  # in the environment of a command and of all that it starts
KILL_S = 30.0  # for a killed process to be gone


class LabError(RuntimeError):
    """The lab could not do what it was asked."""


class CommandTimeout(LabError):
    """A command passed its timeout; it has been killed with its children."""


class Command:
    """A process on a host, in the background. Its number here is `nsenter`'s; on the host it has another."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        host: str,
        enter: Sequence[str],
        env: Mapping[str, str],
        logs: tuple[Path, Path],
        alive: Callable[[], Mapping[int, int]],
    ) -> None:
        """``enter`` is what precedes a command to run it on the host; ``alive`` gives the parents of the host's processes."""
        self.arguments = [str(argument) for argument in arguments]
        self.host = host
        self.log, self.error_log = logs
        self._tag = f"{TAG}={self.log}"
        self._alive = alive
        # Both to append: they may be one file, and a writer with a place of its own would write over the other's lines.
        with self.log.open("ab") as out, self.error_log.open("ab") as err:
            # A session of its own, made on the host: the leader of an inherited one would be out of its sight.
            self._process = subprocess.Popen(
                [*enter, *self.arguments],
                env={**env, TAG: str(self.log)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def __repr__(self) -> str:
        return f"{self.host}: {shlex.join(self.arguments)}"

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def errors(self) -> str:
        """What it printed on stderr; of a background command that is part of ``output``."""
        return self.error_log.read_text(errors="replace")

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, *, timeout_s: float) -> int:
        """Its exit status. Past the timeout it is killed with its children, and the error shows what it printed."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        printed = self.output + ("" if self.log == self.error_log else self.errors)
        raise CommandTimeout(f"{self} did not end in {timeout_s:g} s and was killed; it printed:\n{printed}")

    def kill(self) -> None:
        """SIGKILL it and what it started, daemons too: found as descendants, or by the tag in their environment.

        Both, because a daemon has lost its parent, and a process that renames itself may write over its environment.
        """
        give_up = time.monotonic() + KILL_S
        while (family := self._family()) or self._process.poll() is None:
            # With no family, `nsenter` has not entered yet, or its command has ended just now.
            for pid in family or {self._process.pid}:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > give_up:
                raise LabError(f"{self} was killed {KILL_S:g} s ago and is still there: {sorted(family)}")
            time.sleep(0.01)

    def reap(self) -> None:
        """Collect it once its host is down; it has ended with the host."""
        self._process.wait(KILL_S)

    def _family(self) -> set[int]:
        """Numbers, as seen here, of those processes on the host that belong to the command."""
        parents = self._alive()
        family = {pid for pid in parents if self._is_tagged(pid)}
        grown = {self._process.pid} if self._process.poll() is None else set()
        while grown:
            family |= grown & parents.keys()
            grown = {pid for pid, parent in parents.items() if parent in grown and pid not in family}
        return family

    def _is_tagged(self, pid: int) -> bool:
        try:
            return self._tag.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False
