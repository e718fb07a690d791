"""Decides who may write to a run directory: one controller at a time, on any host.

The lease is a file next to the run directory (so that ``--fresh`` can move the directory), ``.<name>.lease-<number>``. It contains the
holder and a counter, which the holder advances every ``BEAT_S``. The highest number counts. A controller takes the lease by creating the
file with the next number, using ``link``, because if several controllers try, only one succeeds, even on NFS. A released lease file stays
and is marked as free, so numbers never decrease. Clocks and file times of other hosts are never compared.

A second controller takes over only if the first is provably gone: at once if its process ran on this host and has exited, otherwise when
its counter has not moved for ``WATCH_S`` by the second controller's own clock. Otherwise the second controller refuses to start and names
the holder. If the first controller was only frozen, it finds the file with the next number and stops, because it calls ``check`` before
each write to the journal and before it moves a checkpoint into place.

The file is overwritten in place, so that a full disk cannot make a holder look dead or hide that it is waiting.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rollcall.base.atomic import create_atomic
from rollcall.base.errors import ConfigError
from rollcall.base.patience import persist, refusing
from rollcall.base.process_table import STOPPED, Process, status_of
from rollcall.base.redact import redact
from rollcall.base.wait import waiting, warn

BEAT_S = 2.0
WATCH_S = 20.0
LOOK_S = 0.5  # seconds between two checks of another controller's counter
SURE_S = WATCH_S / 2  # for this long after a beat, no other controller can have taken over
_LENGTH, _LONGEST_WAIT = 4096, 500  # bytes in a lease file; characters in its description of the holder's wait
_KINDS = {"owner": str, "host": str, "pid": int, "place": str, "process_start": int, "since": str, "released": bool,
          "waits": str, "waits_since": int}  # fmt: skip


class Heartbeat:
    """Detects whether another process is alive, from the counter that the other process advances in a shared file. Pass each reading to
    ``see``. If the file has a new owner, the watch begins again. Uses only this process's clock, because file times and other hosts'
    clocks cannot be trusted."""

    def __init__(self) -> None:
        self.has_moved = False  # since this owner was first seen
        self._seen: tuple[str | None, int | None] = (None, None)
        self._since = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the counter moved, or since its owner was first seen."""
        return time.monotonic() - self._since

    def see(self, owner: str, counter: int) -> None:
        if (owner, counter) != self._seen:
            self.has_moved = owner == self._seen[0]
            self._seen, self._since = (owner, counter), time.monotonic()


class LeaseLostError(RuntimeError, ValueError):
    """Another controller owns this run directory now; this process has stopped writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The contents of a lease file."""

    owner: str
    host: str
    pid: int
    place: str  # boot and process-id namespace in which ``pid`` is valid; "" if unknown
    process_start: int  # in ticks since boot; 0 if unknown
    since: str  # by the holder's own clock; only for display
    number: int
    counter: int
    released: bool
    waits: str = ""  # what the holder is waiting for; empty if it is not waiting
    waits_since: int = 0  # unix time

    @property
    def is_here(self) -> bool:
        return bool(self.place) and (self.place, self.host) == (_place(), socket.gethostname())

    @property
    def is_gone(self) -> bool:
        """Whether the holder is provably gone: it has released the lease, or it ran on this host and has exited."""
        return self.released or (self.is_here and not Process(pid=self.pid, started=self.process_start).is_alive())

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host} (since {self.since})"


class Lease:
    """A lease that this process holds. A thread advances its counter."""

    def __init__(self, run_dir: Path, me: Holder) -> None:
        self.run_dir = run_dir
        self.me = me
        self._path = _path(run_dir, me.number)
        self._fd = os.open(self._path, os.O_RDWR)
        self._counter = 0
        self._beaten = _now()
        self._lost: str | None = None
        self._has_failed = False  # the last beat could not be written
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLostError if another controller has the lease. Reads no file while the last beat is recent."""
        if self._lost is None and _now() - self._beaten > SURE_S:
            self._look()
        if self._lost is not None:
            raise LeaseLostError(self._lost)

    def release(self) -> None:
        self._done.set()
        self._thread.join()
        try:
            if self._lost is None:
                self._write(released=True)
        except OSError as error:
            warn(f"{self._path}: cannot release the lease: {error}; the next controller will wait {WATCH_S:g} s")
        finally:
            os.close(self._fd)

    def _keep(self) -> None:
        while not self._done.wait(BEAT_S) and self._lost is None:
            self._beat()

    def _beat(self) -> None:
        self._counter += 1
        what, since = waiting() or ("", 0)
        what = redact(what)
        what = what if len(what) <= _LONGEST_WAIT else what[: _LONGEST_WAIT - 3] + "..."
        self.me = replace(self.me, waits=what, waits_since=int(since))
        try:
            self._write(released=False)
        except OSError as error:
            if not self._has_failed:
                warn(f"{self._path}: cannot renew the lease: {error.strerror}; trying again every {BEAT_S:g} s")
            self._has_failed = True
            return
        self._has_failed = False
        now = _now()
        self._look()
        if self._lost is None:
            self._beaten = now

    def _write(self, *, released: bool) -> None:
        os.pwrite(self._fd, _encode(self.me, counter=self._counter, released=released), 0)
        os.fsync(self._fd)  # so that other hosts see it if the folder is shared

    def _look(self) -> None:
        """Check whether another controller has taken over and thereby removed this file. On a shared folder, opening the file shows
        this at once, while a directory listing may be a minute old."""
        is_there = True
        try:
            try:
                os.close(os.open(self._path, os.O_RDONLY))
            except FileNotFoundError:
                is_there = False
            newest = read_holder(self.run_dir)
        except OSError as error:
            warn(f"{self._path}: cannot read the lease: {error.strerror}")
            return
        if is_there and newest is not None and newest.number == self.me.number:
            return
        by = f"by {newest}" if newest is not None else "(its lease file is gone)"
        self._lost = (
            f"run.dir={self.run_dir} was taken over {by} while this process ({self.me.pid} on {self.me.host}) gave no sign of "
            "life; this process stops and leaves the directory to the other controller"
        )


@contextmanager
def hold(run_dir: Path) -> Iterator[Lease]:
    """Hold the lease on a run directory while the block runs. Raises ConfigError if another controller has it."""
    with refusing(run_dir, folder=run_dir.parent):
        run_dir.parent.mkdir(parents=True, exist_ok=True)
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run.dir={run_dir} is a file, but a run needs a folder; choose another run.dir")
    lease = _take(run_dir)
    try:
        yield lease
    finally:
        lease.release()


def _take(run_dir: Path) -> Lease:
    while True:
        holder = read_holder(run_dir)
        if holder is not None and not holder.is_gone:
            if holder.is_here:
                _refuse(run_dir, holder)
            warn(
                f"run.dir={run_dir} is in use by {holder}; watching it for {WATCH_S:g} s to see whether it is still alive"
            )
            _watch(run_dir, holder)
        if holder is not None and not holder.released:
            warn(f"run.dir={run_dir}: {holder} is gone; taking over")
        me = _myself(number=holder.number + 1 if holder else 1)
        path, data = _path(run_dir, me.number), _encode(me, counter=0, released=False)
        # If the folder is not writable, a new run raises at once, and a resumed run waits.
        if holder is None:
            with refusing(run_dir, folder=run_dir.parent):
                made = create_atomic(path, data)
        else:
            made = persist(partial(create_atomic, path, data), path=path, what="the lease")
        if made:
            for path, number in _files(run_dir):
                if number < me.number:
                    path.unlink(missing_ok=True)
            return Lease(run_dir, me)
        # Another controller created the file first, so check again.


def _watch(run_dir: Path, holder: Holder) -> None:
    """Return once the holder's counter has not moved for ``WATCH_S``."""
    beat = Heartbeat()
    beat.see(holder.owner, holder.counter)
    while beat.silent_s < WATCH_S:
        time.sleep(LOOK_S)
        now = read_holder(run_dir)
        if now is None or now.released:
            return
        beat.see(now.owner, now.counter)
        if beat.has_moved or now.owner != holder.owner:
            _refuse(run_dir, now)


def _refuse(run_dir: Path, holder: Holder) -> None:
    stopped = holder.is_here and status_of(holder.pid) in STOPPED
    raise ConfigError(
        f"another process is training in run.dir={run_dir}: {holder}{', which is stopped (SIGSTOP)' if stopped else ''}; "
        "wait for it or stop it, or choose another run.dir"
    )


def read_holder(run_dir: Path) -> Holder | None:
    """Return the last holder of the lease. Its ``released`` is true if nobody holds the lease now."""
    while files := sorted(_files(run_dir), key=lambda item: -item[1]):
        for path, number in files:
            try:
                return _read(path, number)
            except FileNotFoundError:
                continue  # replaced by a newer file since the folder was listed
        time.sleep(0.02)  # only an empty list means that nobody has the lease
    return None


def _read(path: Path, number: int) -> Holder:
    text = path.read_bytes()
    try:
        fields = json.loads(text)
        if not all(isinstance(fields[name], kind) for name, kind in _KINDS.items()):
            raise TypeError("not what a holder writes")
        return Holder(**{**fields, "counter": int(fields["counter"]), "number": number})
    except (ValueError, KeyError, TypeError, RecursionError):
        # Another version wrote this, or a power loss truncated it. We can only watch whether the file changes.
        return Holder(
            owner=text.hex(), host="unknown", pid=0, place="", process_start=0, since="unknown", number=number,
            counter=0, released=False,
        )  # fmt: skip


def _files(run_dir: Path) -> list[tuple[Path, int]]:
    if not run_dir.parent.is_dir():
        return []
    name = re.compile(rf"\.{re.escape(run_dir.name)}\.lease-(\d+)")
    found = ((path, name.fullmatch(path.name)) for path in run_dir.parent.iterdir())
    return [(path, int(match.group(1))) for path, match in found if match]


def _path(run_dir: Path, number: int) -> Path:
    return run_dir.parent / f".{run_dir.name}.lease-{number}"


def _encode(holder: Holder, *, counter: int, released: bool) -> bytes:
    """Encode to a fixed length, so that the file can be overwritten in place."""
    fields = asdict(holder) | {"counter": counter, "released": released}
    return f"{json.dumps(fields):<{_LENGTH - 1}}\n".encode()


def _myself(*, number: int) -> Holder:
    own = Process.of(os.getpid())
    return Holder(
        owner=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        place=_place(),
        process_start=own.started if own else 0,
        since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        number=number,
        counter=0,
        released=False,
    )


def _now() -> float:
    """Read the clock that also counts while the machine sleeps, or the monotonic clock if the system has no such clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _place() -> str:
    """Return the boot and namespace in which this host's process ids are valid. Empty if they are unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
