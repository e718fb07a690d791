"""A worker's pulse: what it does, since when, how often it did something; and the look that its node takes at it.

The thread that does the work writes the pulse into a small file that only its own node reads. So a process whose
interpreter hangs in a call looks busy with that call, and a stopped process looks stopped. ``look`` reads pulses and
``/proc``. ``dump_stacks`` makes a process write the stacks of all its threads, by a handler in C that works even if Python
code is stuck. Both files are in memory and in no folder: others open them through ``/proc``, and they end with the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollcall.process import process_state

PULSE, STACKS = "rollcall-pulse", "rollcall-stacks"
STACKS_SIGNAL = signal.SIGUSR2
PAGE = 4096  # bytes of a pulse
METHOD_BYTES = 64
BEAT = struct.Struct(f"<{METHOD_BYTES}sdqq")  # method, since when, calls done, since when again: the last to be written
WORTH_S = 0.5  # a call is noted if it is this much longer than the longest before it
STACKS_WAIT_S = 3.0
SETTLED_S = 0.2  # stacks that have not grown for this long are complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A worker as its node sees it."""

    is_alive: bool
    state: str = ""  # as /proc has it: R, S, D, T (stopped), ...
    doing: str = ""  # a method; empty: it waits to be called
    busy_s: float = 0.0  # since it began with that
    num_done: int = 0  # calls
    longest_s: Mapping[str, float] | None = None  # by method, of those it has ended


class Pulse:
    """The worker writes it around each of its calls: a few bytes of shared memory, at no cost to the call."""

    def __init__(self, rank: int) -> None:
        self._file = os.fdopen(os.memfd_create(f"{PULSE}-{rank}"), "r+b", buffering=0)  # stays open: others find it so
        self._file.truncate(PAGE)
        self._memory = mmap.mmap(self._file.fileno(), PAGE)
        self._num_done = 0
        self._longest_s: dict[str, float] = {}
        self._write("", 0.0)

    @contextlib.contextmanager
    def doing(self, method: str) -> Iterator[None]:
        started = time.monotonic()
        self._write(method, started)
        try:
            yield
        finally:
            self._num_done += 1
            self._note(method, time.monotonic() - started)
            self._write("", 0.0)

    def _write(self, method: str, since_s: float) -> None:
        # CLOCK_MONOTONIC is the same for all processes of a host.
        BEAT.pack_into(self._memory, 0, method.encode()[:METHOD_BYTES], since_s, self._num_done, int(since_s * 1e6))

    def _note(self, method: str, took_s: float) -> None:
        if took_s < self._longest_s.get(method, -1.0) + WORTH_S:
            return
        self._longest_s[method] = round(took_s, 3)
        text = json.dumps(self._longest_s).encode()
        self._memory[BEAT.size :] = text.ljust(PAGE - BEAT.size)[: PAGE - BEAT.size]


def write_stacks_on_signal() -> None:
    """From now on, ``STACKS_SIGNAL`` makes this process add the stacks of all its threads to a file in its memory."""
    if _open_file(os.getpid(), STACKS) is None:
        faulthandler.register(STACKS_SIGNAL, file=os.memfd_create(STACKS), all_threads=True)


def look(pid: int) -> Seen:
    """The process and its pulse, now."""
    state = process_state(pid)
    if state in ("", "Z", "X"):
        return Seen(is_alive=False, state=state)
    pulse = _open_file(pid, PULSE)
    if pulse is None:  # not made yet
        return Seen(is_alive=True, state=state)
    try:
        data = pulse.read_bytes()
        method, since_s, num_done, again = BEAT.unpack_from(data)
        longest_s = json.loads(data[BEAT.size :].rstrip(b"\0") or b"{}")
    except (FileNotFoundError, ProcessLookupError, ValueError, struct.error):  # it has just ended, or is being written
        return Seen(is_alive=True, state=state)
    if int(since_s * 1e6) != again:
        return Seen(is_alive=True, state=state)
    doing = method.rstrip(b"\0").decode(errors="replace")
    return Seen(
        is_alive=True,
        state=state,
        doing=doing,
        busy_s=time.monotonic() - since_s if doing else 0.0,
        num_done=num_done,
        longest_s=longest_s,
    )


def _open_file(pid: int, name: str) -> Path | None:
    """The path through /proc of the process's memory file whose name begins so; None: it has none."""
    try:
        entries = sorted(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return None
    for entry in entries:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # closed meanwhile
            if os.readlink(entry).startswith(f"/memfd:{name}"):
                return entry
    return None


def dump_stacks(pid: int) -> str:
    """The stacks of all threads of a process that called ``write_stacks_on_signal``; a stopped one is woken for it."""
    path = _open_file(pid, STACKS)
    if path is None:
        return "it has no file for its stacks: it is gone, or has not begun"
    before = _size(path)
    try:
        os.kill(pid, STACKS_SIGNAL)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return "its process is gone, so its stacks are too"
    deadline = time.monotonic() + STACKS_WAIT_S
    size, grown_s = before, time.monotonic()
    while time.monotonic() < deadline:
        now = _size(path)
        if now != size:
            size, grown_s = now, time.monotonic()
        elif size > before and time.monotonic() - grown_s > SETTLED_S:
            break
        time.sleep(0.02)
    if size == before:
        return f"it wrote no stacks within {STACKS_WAIT_S:g} s: it is stuck in the kernel"
    try:
        return path.read_bytes()[before:].decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "its process is gone, so its stacks are too"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return 0
