"""What the kernel tells of processes and memory. Linux: ``/proc``.

A start time in clock ticks since boot tells a process from a later one with the same number. psutil has it only as a time
of day, which moves when somebody sets the clock; records on disk need one that does not.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOPPED = ("T", "t")  # states of a process that SIGSTOP or a debugger holds
_DEAD = ("Z", "X")
SPARE_FILES = 1024  # for all that a process opens besides
FEWEST_FILES = 256  # a run with two reward processes has 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process on this node."""

    pid: int
    started: int  # clock ticks since boot

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """None when there is no such process, or only its zombie."""
        row = read_row(pid)
        return row.process if row is not None and row.state not in _DEAD else None

    def is_alive(self) -> bool:
        return Process.of(self.pid) == self


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    process: Process
    name: str
    state: str  # R, S, D, T (stopped), Z (dead, its parent has not asked for its status)
    parent: int
    session: int


def read_row(pid: int) -> ProcessRow | None:
    """None: there is no such process."""
    try:
        # A name is any bytes: the kernel cuts it to 15, also within a character.
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # a name may hold anything, also ")"
    fields = tail.split()
    return ProcessRow(
        process=Process(pid=pid, started=int(fields[19])),
        name=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
    )


def process_state(pid: int) -> str:
    """Its state's letter; empty: there is no such process."""
    row = read_row(pid)
    return "" if row is None else row.state


def command_of(pid: int) -> str:
    """Its command line, or the title that it gave itself; empty: there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    """The memory that it holds; 0: there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def device_bytes() -> int:
    """What torch has taken of the accelerators of this process. It neither imports torch nor starts CUDA."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0
    return sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))


def process_ids() -> list[int]:
    """Of all processes on this node."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def descendants(*pids: int) -> list[Process]:
    """What they have started, and what these have."""
    started: dict[int, list[Process]] = {}
    for row in (read_row(each) for each in process_ids()):
        if row is not None:
            started.setdefault(row.parent, []).append(row.process)
    found: list[Process] = []
    wanted = list(pids)
    while wanted:
        below = started.pop(wanted.pop(0), [])
        found += below
        wanted += [process.pid for process in below]
    return found


def environment_of(pid: int) -> dict[str, str] | None:
    """The variables that it was started with; None: it has ended, or is another user's."""
    try:
        lines = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:
        return None
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def available_memory() -> int:
    """Bytes that new processes on this node can have."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def allow_files(count: int) -> int:
    """Raise this process's own limit of open files, as far as it may be raised, to this many and some for all else. The limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count + SPARE_FILES if hard == resource.RLIM_INFINITY else min(count + SPARE_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def refuse_few_files() -> None:
    """Before a run loads anything: without files it fails later, in places that cannot say why."""
    if (limit := allow_files(0)) < FEWEST_FILES:
        raise ValueError(
            f"this shell allows a process {limit} open files (ulimit -Hn), and a run needs {FEWEST_FILES}; start it where more are allowed"
        )
