"""A process of a run that other processes of its host can find, look into and profile, without its help and without a port.

It says who it is in a small file in its memory, which others find through ``/proc`` as they find a pulse. Its stacks are read by
a signal (``pulse.dump_stacks``) or by py-spy. Only the user that runs the process, and root, can do either.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollcall.groups.profiling import serve_profiles
from rollcall.groups.pulse import dump_stacks, look, memory_file, write_stacks_on_signal
from rollcall.process import STOPPED, command_of, descendants, process_ids, process_state

ABOUT = "rollcall-about"
PAGE = 4096
SHOWN = 200  # characters of a command line
STACK = "most recent call first"  # what Python writes above each stack
CANNOT = "its stacks cannot be read: py-spy is not installed here, or may not look into it"
NATIVE_S = 60.0  # for py-spy to read the symbols of large libraries
_lock = threading.Lock()
_page: mmap.mmap | None = None
_descriptor = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    title: str  # such as "actor 0 + rollout 0"; empty: it is not part of a run now
    roles: tuple[str, ...] = ()
    run: str = ""  # the run directory as its host sees it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """What one process does now."""

    title: str
    pid: int
    state: str  # as /proc has it
    doing: str  # the call of a worker; empty: none, or it is not a worker
    busy_s: float
    text: str  # the stacks of all its threads, or why they cannot be read
    how: str  # "faulthandler", "py-spy"; empty: they cannot be read


def be_reachable(about: About) -> None:
    """From now on others can find this process, read its stacks and profile it. A second call changes what it says."""
    global _page, _descriptor
    with _lock:
        if _page is None:
            _descriptor = os.memfd_create(ABOUT)  # stays open: others find it so
            os.ftruncate(_descriptor, PAGE)
            _page = mmap.mmap(_descriptor, PAGE)
            write_stacks_on_signal()
            serve_profiles()
        data = json.dumps(asdict(about)).encode()[: PAGE - 1]
        _page[:] = data.ljust(PAGE, b"\0")


def _forget() -> None:
    """In a forked child, which is not the process that the page is about."""
    global _page, _descriptor, _lock
    if _page is not None:
        _page.close()
        os.close(_descriptor)
    _page, _descriptor, _lock = None, -1, threading.Lock()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def reachable(about: About) -> Iterator[None]:
    """While the block runs; after it, the process belongs to no run."""
    be_reachable(about)
    try:
        yield
    finally:
        be_reachable(About(title=""))


def about_process(pid: int) -> About | None:
    """None: it is not one of ours, or is gone."""
    path = memory_file(pid, ABOUT)
    try:
        found: dict[str, Any] = json.loads(path.read_bytes().rstrip(b"\0")) if path is not None else {}
        return About(title=found["title"], roles=tuple(found["roles"]), run=found["run"])
    except (OSError, ValueError, KeyError):
        return None


def reachable_here(*, run: str | None = None) -> dict[int, About]:
    """The processes of this host that are part of a run, of this one if it is named; by process id."""
    found = {pid: about for pid in sorted(process_ids()) if (about := about_process(pid)) is not None and about.title}
    return {pid: about for pid, about in found.items() if run is None or about.run == run}


def stacks_here(*, run: str | None = None, native: bool = False) -> list[Stacks]:
    """The processes of runs on this host, and what they have started, such as those that run reward functions."""
    known = reachable_here(run=run)
    found: dict[int, str] = {pid: about.title for pid, about in known.items()}
    for pid, about in known.items():
        for process in descendants(pid):
            if process.pid != os.getpid() and process.pid not in found:
                found[process.pid] = f"started by {about.title}: {command_of(process.pid)[:SHOWN].strip()}"
    return [_stacks(pid, title, native=native, answers=pid in known) for pid, title in found.items()]


def _stacks(pid: int, title: str, *, native: bool, answers: bool) -> Stacks:
    """``answers``: it writes its stacks itself, when asked by a signal."""
    seen, state = look(pid), process_state(pid)
    text, how = "", ""
    if answers and not native and state not in STOPPED:
        text = dump_stacks(pid, wake=False)
        how = "faulthandler" if STACK in text else ""
        text = "\n\n".join(reversed(text.strip().split("\n\n")))  # the thread that works first
    if not how:
        told = read_by_py_spy(pid, native=native)
        text, how = (told, "py-spy") if told else (text or CANNOT, "")
    return Stacks(
        title=title, pid=pid, state=state, doing=seen.doing, busy_s=round(seen.busy_s, 1), text=text.strip(), how=how
    )


def find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def read_by_py_spy(pid: int, *, native: bool) -> str:
    """Empty: there is no py-spy here, or it was refused. Native frames hold the process for a moment, Python's do not."""
    program = find_py_spy()
    if program is None:
        return ""
    options = ["--native"] if native else ["--nonblocking"]
    text = _run([program, "dump", "--pid", str(pid), *options])
    if not text and native:  # not on every architecture
        text = _run([program, "dump", "--pid", str(pid), "--nonblocking"])
    return text


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NATIVE_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
