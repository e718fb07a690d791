"""The processes of this host, as psutil lists them.

Records on disk name a process by its number and its start since boot. psutil gives the start as a time of day, which moves when
somebody sets the clock, as its time of the boot does: the difference stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)  # held by SIGSTOP or a debugger
DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process on this host. A later one with the same number is another."""

    pid: int
    started: int  # hundredths of a second after the boot

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process with this number; None if there is none, or only its zombie."""
        try:
            found = psutil.Process(pid)
            if found.status() in DEAD:
                return None
            return cls(pid=pid, started=round((found.create_time() - psutil.boot_time()) * 100))
        except psutil.Error:
            return None

    def is_alive(self) -> bool:
        return Process.of(self.pid) == self


def living() -> Iterator[psutil.Process]:
    """All processes but zombies and those that the kernel hides; ``info`` has the parent (``ppid``) and the user (``uids``)."""
    for process in psutil.process_iter(["ppid", "status", "uids"]):
        if process.info["status"] not in (None, *DEAD):
            yield process


def descendants(*pids: int) -> list[Process]:
    """The children of these processes, their children, and so on."""
    started: dict[int, list[int]] = {}
    for process in living():
        started.setdefault(process.info["ppid"], []).append(process.pid)
    found: list[int] = []
    wanted = list(pids)
    while wanted:
        below = started.pop(wanted.pop(0), [])
        found += below
        wanted += below
    return [process for pid in found if (process := Process.of(pid)) is not None]


def status_of(pid: int) -> str:
    """psutil's word, such as ``sleeping``; empty: there is no such process."""
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return ""


def command_of(pid: int) -> str:
    """Its command line, or the title that it gave itself; empty: there is no such process."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def environment_of(pid: int) -> dict[str, str] | None:
    """The variables that it was started with; None if it has ended, or is another user's.

    psutil stops reading at an empty entry, and ``redact.hide_from_proc`` leaves such.
    """
    try:
        lines = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:
        return None
    return {name: value for name, _, value in (line.partition("=") for line in lines)}
