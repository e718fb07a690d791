"""A worker's pulse: its current call and when that began, its earlier calls, and where it has stopped in a debugger. The worker's
node reads the pulse and the worker's output.

The thread that runs the calls writes the pulse into a small file that only its own node reads. So a process whose
interpreter hangs in a call looks busy with that call, and a suspended process looks stopped. The pulse contains the last calls; a
reader keeps the file open, so a killed worker's calls are not lost. ``Reader`` reads pulses, and asks psutil about the process. The file
is in memory and in no folder: other processes open it through ``/proc``, and it disappears with the process.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import psutil

from rollcall.base.process_table import DEAD
from rollcall.base.redact import redact
from rollcall.process.pause import running_s

PULSE = "rollcall-pulse"
PAGE = 4096  # bytes
METHOD_BYTES = 64
BEAT = struct.Struct(f"<{METHOD_BYTES}sdqq")  # method, start, number of finished calls, and last the start once more
HEAD = struct.Struct("<qq")  # number of calls written to the ring, bytes of accelerator memory
CALL = struct.Struct("<48sddq")  # method, start, end, count
NUM_CALLS = 256  # capacity of the ring
RING = PAGE + HEAD.size
STOP = RING + NUM_CALLS * CALL.size  # where the process has stopped in a debugger, as JSON
STOP_BYTES = 1 << 16  # more than any place takes: debug/attach.py cuts its texts
SIZE = STOP + STOP_BYTES
JOIN_S = 0.05  # calls of one method with a shorter pause between them become one entry
LONGEST_JOIN_S = 30.0  # the longest such entry
DEVICE_EVERY_S = 1.0  # between two checks of accelerator memory
WORTH_S = 0.5  # a call is recorded as a method's longest only if it exceeds the previous longest by this much
LOG_BYTES = 16 << 10  # limit for one read of a log
OF_RAY = (b":job_id:", b":actor_name:", b":task_name:")  # log lines that Ray writes for itself


def device_bytes() -> int:
    """Return the bytes of accelerator memory that torch has reserved in this process. This neither imports torch nor starts CUDA."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0
    return sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))


class RecordedCall(NamedTuple):
    """A finished call, or several short calls of one method. Times are monotonic in a pulse, and unix time everywhere else."""

    name: str  # the method
    start_s: float
    end_s: float
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A worker as its node sees it."""

    is_alive: bool
    state: str = ""  # psutil's status: running, sleeping, disk-sleep, stopped, ...
    doing: str = ""  # a method; empty: it is waiting for a call
    busy_s: float = 0.0  # since the method began
    num_done: int = 0  # finished calls
    longest_s: Mapping[str, float] | None = None  # the longest finished call of each method
    # Monotonic: when the call began, or the first of several short calls; if the worker is idle, when its last call ended.
    since_s: float | None = None
    calls: tuple[RecordedCall, ...] = ()  # finished since the previous look
    memory_bytes: int = 0
    device_bytes: int = 0  # reserved by torch
    stop: Mapping[str, Any] | None = field(default=None, repr=False)  # where a debugger has stopped it, and its address


class Pulse:
    """Written by a worker before and after each of its calls: a few bytes of shared memory, at almost no cost to the call."""

    def __init__(self, rank: int) -> None:
        self._file = os.fdopen(os.memfd_create(f"{PULSE}-{rank}"), "r+b", buffering=0)  # stays open for others to find
        self._file.truncate(SIZE)
        self._memory = mmap.mmap(self._file.fileno(), SIZE)
        self._num_done = 0
        self._longest_s: dict[str, float] = {}
        self._last: RecordedCall | None = None
        self._num_kept = 0
        self._device_bytes = 0
        self._device_s = 0.0
        self._write("", 0.0)

    @contextlib.contextmanager
    def doing(self, method: str) -> Iterator[None]:
        started, began = time.monotonic(), running_s()
        self._write(method, started)
        try:
            yield
        finally:
            ended = time.monotonic()
            self._num_done += 1
            took_s = running_s() - began
            if took_s >= self._longest_s.get(method, -1.0) + WORTH_S:
                self._longest_s[method] = round(took_s, 3)
                text = json.dumps(self._longest_s).encode()
                self._memory[BEAT.size : PAGE] = text.ljust(PAGE - BEAT.size)[: PAGE - BEAT.size]
            self._keep(method, started, ended)
            self._write("", 0.0)

    def _write(self, method: str, since_s: float) -> None:
        # CLOCK_MONOTONIC is the same for all processes on a host.
        BEAT.pack_into(self._memory, 0, method.encode()[:METHOD_BYTES], since_s, self._num_done, int(since_s * 1e6))

    def note_stop(self, place: Mapping[str, Any] | None) -> None:
        """Record where this process has stopped in a debugger; None means that it is running again."""
        text = b"" if place is None else json.dumps(place).encode()
        self._memory[STOP:] = text.ljust(STOP_BYTES, b"\0")

    def _keep(self, method: str, started: float, ended: float) -> None:
        """Write a call into the ring, or merge it into the last entry."""
        last = self._last
        if last is not None and _goes_on(last, method, started) and ended - last.start_s < LONGEST_JOIN_S:
            call = RecordedCall(method, last.start_s, ended, last.count + 1)
        else:
            call = RecordedCall(method, started, ended)
            self._num_kept += 1
        place = RING + (self._num_kept - 1) % NUM_CALLS * CALL.size
        CALL.pack_into(self._memory, place, method.encode()[:48], call.start_s, call.end_s, call.count)
        if ended - self._device_s > DEVICE_EVERY_S:
            self._device_s, self._device_bytes = ended, device_bytes()
        HEAD.pack_into(self._memory, PAGE, self._num_kept, self._device_bytes)
        self._last = call


def _goes_on(last: RecordedCall, method: str, start_s: float) -> bool:
    return last.name == method[:48] and start_s - last.end_s < JOIN_S


class Reader:
    """Looks at a process repeatedly and reports each of its calls once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._process: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)
        self._file: BinaryIO | None = None
        self._told = 0  # calls reported so far
        self._last: RecordedCall | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def look(self) -> Seen:
        """Return the state of the process and its pulse."""
        state, memory_bytes = "", 0
        with contextlib.suppress(psutil.Error):
            if self._process is not None and self._process.is_running():  # not a later process with the same id
                state, memory_bytes = self._process.status(), self._process.memory_info().rss
        is_alive = state != "" and state not in DEAD
        now = time.monotonic()
        data = self._read()
        try:
            method, since_s, num_done, again = BEAT.unpack_from(data)
            longest_s = json.loads(data[BEAT.size : PAGE].rstrip(b"\0") or b"{}")
            stop = json.loads(data[STOP:].rstrip(b"\0") or b"null")
        except (ValueError, struct.error):  # not created yet, or being written
            return Seen(is_alive=is_alive, state=state)
        if int(since_s * 1e6) != again:
            return Seen(is_alive=is_alive, state=state, stop=stop)
        doing = method.rstrip(b"\0").decode(errors="replace")
        calls = self._calls(data, doing=doing, since_s=since_s, now=now if is_alive else math.inf)
        last = self._last
        if last is not None and (doing == "" or _goes_on(last, doing, since_s)):
            since = last.start_s if doing or now - last.end_s < JOIN_S else last.end_s
        else:
            since = since_s if doing else None
        return Seen(
            is_alive=is_alive,
            state=state,
            doing=doing,
            busy_s=now - since_s if doing else 0.0,
            num_done=num_done,
            longest_s=longest_s,
            since_s=since,
            calls=calls,
            memory_bytes=memory_bytes,
            device_bytes=HEAD.unpack_from(data, PAGE)[1],
            stop=stop,
        )

    def _read(self) -> bytes:
        """Return the bytes of the pulse, or none if there is no pulse yet."""
        try:
            if self._file is None:
                path = memory_file(self._pid, PULSE)
                if path is None:
                    return b""
                self._file = path.open("rb", buffering=0)
            return os.pread(self._file.fileno(), SIZE, 0)
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # the process has just exited
            return b""

    def _calls(self, data: bytes, *, doing: str, since_s: float, now: float) -> tuple[RecordedCall, ...]:
        """Return the new calls, without the last one if later calls may still be merged into it."""
        kept, _ = HEAD.unpack_from(data, PAGE)
        found: list[RecordedCall] = []
        for number in range(max(self._told, kept - NUM_CALLS), kept):
            name, start_s, end_s, count = CALL.unpack_from(data, RING + number % NUM_CALLS * CALL.size)
            found.append(RecordedCall(name.rstrip(b"\0").decode(errors="replace"), start_s, end_s, count))
        self._told = kept
        if found:
            last = self._last = found[-1]
            if now < math.inf and (_goes_on(last, doing, since_s) if doing else now - last.end_s < JOIN_S):
                self._told = kept - 1
                found.pop()
        return tuple(found)


def look(pid: int) -> Seen:
    """Look once at a process and its pulse."""
    with contextlib.closing(Reader(pid)) as reader:
        return reader.look()


def memory_file(pid: int, name: str) -> Path | None:
    """Find the process's memory file whose name starts with ``name``; return its path in /proc, or None."""
    with contextlib.suppress(OSError):  # the process is gone, or belongs to another user
        for entry in sorted(Path(f"/proc/{pid}/fd").iterdir()):
            with contextlib.suppress(OSError):  # it was closed in the meantime
                if os.readlink(entry).startswith(f"/memfd:{name}"):
                    return entry
    return None


class LogTail:
    """Reads the files that a process's standard output and standard error go to, as they grow. Each read returns complete lines without
    secrets, up to a limited number of bytes."""

    def __init__(self, pid: int) -> None:
        self._ends: dict[str, int] = {}  # how far each file has been read
        for number in (1, 2):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/{pid}/fd/{number}")
                if os.path.isabs(path) and os.path.isfile(path):
                    self._ends.setdefault(path, max(os.path.getsize(path) - LOG_BYTES // 2, 0))
        self.path = next(iter(self._ends), "")  # the first of the files; empty if the process prints to none

    def read(self) -> bytes:
        """Return the new lines."""
        return b"".join(self._read(path) for path in self._ends)

    def _read(self, path: str) -> bytes:
        try:
            size = os.path.getsize(path)
            begin = max(min(self._ends[path], size), size - LOG_BYTES)
            with open(path, "rb") as file:
                file.seek(begin)
                data = file.read(size - begin)
        except OSError:  # the file was removed
            return b""
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) >= LOG_BYTES:
            whole = len(data)  # a line that is longer than one read
        self._ends[path] = begin + whole
        lines = [line for line in data[:whole].splitlines(keepends=True) if not line.startswith(OF_RAY)]
        return redact(b"".join(lines).decode(errors="replace")).encode()
