"""Reads this host's processes through psutil, and sets this process's limit on open files.

Records on disk identify a process by its id and its start time since boot. psutil reports both the start and the boot as wall-clock
times. Both shift when somebody sets the clock, but their difference does not.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)  # stopped by SIGSTOP or a debugger
DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process on this host. A later process with the same id is a different one."""

    pid: int
    started: int  # hundredths of a second since boot

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process with this id, or None if it does not exist or is a zombie."""
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
    """Yield all visible processes except zombies. ``info`` contains the parent (``ppid``) and the user (``uids``)."""
    for process in psutil.process_iter(["ppid", "status", "uids"]):
        if process.info["status"] not in (None, *DEAD):
            yield process


def descendants(*pids: int) -> list[Process]:
    """Return the children of these processes, their children, and so on."""
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
    """Return psutil's status, such as ``sleeping``; empty if there is no such process."""
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return ""


def command_of(pid: int) -> str:
    """Return the command line, or the title that the process gave itself. Empty if there is no such process."""
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
    """Return the variables that the process was started with; None if it has exited or belongs to another user.

    Does not use psutil, because psutil stops reading at an empty entry, and ``redact.hide_from_proc`` leaves empty entries.
    """
    try:
        lines = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:
        return None
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def allow_files(count: int) -> int:
    """Let this process open ``count`` files plus 1024 others, as far as the system allows. Returns how many it may open at least."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count + 1024 if hard == resource.RLIM_INFINITY else min(count + 1024, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def refuse_few_files() -> None:
    """Raise an error if the limit on open files is too low. Otherwise the run would fail later with an unclear error."""
    if (limit := allow_files(0)) < 256:  # a run with two reward processes opens 60
        raise ValueError(
            f"this shell allows only {limit} open files per process (ulimit -Hn), but a run needs 256; use a shell that allows more"
        )
