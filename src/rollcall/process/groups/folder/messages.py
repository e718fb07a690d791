"""Messages and heartbeats between processes that share only a folder.

FOLDER/messages/
  master/presence.json      identifies the master, its current worker group (``epoch``) and how the run ended
  node-0001/presence.json   identifies worker 1
  node-0001/inbox/          calls to worker 1, which removes each call when it reads it
  answers/                  answers of all workers; the master removes each answer when it reads it

A message is a file. It is written under a temporary name in the same folder and renamed, so that no reader sees an incomplete one;
the reader removes it. Its name contains the label of a conversation (master, worker, epoch) and a number. The reader reads
messages in the order of their numbers, and waits if the next number is not in the folder yet. A message with a different label belongs
to an earlier conversation and is never answered.

A process shows that it is alive through a file that contains its incarnation, which is unique to the process, and a counter that it
keeps increasing (``Heartbeat``, ``base/lease.py``). The counter of a dead process no longer changes.

On NFS, a process that looks up a new file by name may not find it for a while, but a process that lists the folder finds it at once.
So every check lists the folder first. A reader gets ENOENT or ESTALE when a file is replaced during the read; it then tries again.

Messages are pickles: a process that can write one can run code here. So the folder must be closed to other users (0700), which
is checked. The file system then keeps others out, and no token is needed.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollcall.base.atomic import TEMPORARY, write_atomic
from rollcall.base.errors import ClusterError
from rollcall.base.lease import Heartbeat
from rollcall.base.patience import DiskError, persist
from rollcall.base.version import __version__
from rollcall.base.wait import warn

BEAT_S = 1.0  # between two increments of the counter
SILENT_S = 20.0  # a process whose counter has not changed for this long is considered gone
PRESENCE = "presence.json"


class State(StrEnum):
    """The state that a process reports: the first three are a master's, the others a worker's."""

    RUNNING = "running"
    ENDED = "ended"
    BROKE_OFF = "broke off"
    HERE = "here"
    LEFT = "left"


class Messages:
    """The message folders in a shared folder."""

    def __init__(self, shared: Path) -> None:
        self.root = shared / "messages"
        self.master = self.root / "master"
        self.answers = self.root / "answers"

    def node(self, rank: int) -> Path:
        return self.root / f"node-{rank:04d}"

    def inbox(self, rank: int) -> Path:
        return self.node(rank) / "inbox"


def label_of(*, master: str, worker: str, epoch: int) -> str:
    return f"{master}-{worker}-{epoch:05d}"


def about_this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rollcall": __version__,
        "python": platform.python_version(),
    }


def new_id() -> str:
    return uuid.uuid4().hex[:12]


def own_folder(path: Path) -> Path:
    """Create the folder if it does not exist, and refuse a folder that is open to other users."""
    path = path.absolute()
    path.mkdir(parents=True, mode=0o700, exist_ok=True)
    if (found := path.stat()).st_uid != os.geteuid():
        raise ClusterError(
            f"{path} belongs to user {found.st_uid}, but this process runs as user {os.geteuid()}. The nodes exchange Python pickles "
            "there, so the folder must be your own; give another folder"
        )
    if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        raise ClusterError(
            f"{path} is open to other users (mode {mode:03o}). The nodes exchange Python pickles there, which can run code, so it "
            f"must be closed to others: run `chmod 700 {path}`"
        )
    return path.resolve()


@contextmanager
def _unless_gone() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
            raise


def names(folder: Path) -> list[str]:
    """List the folder's files, sorted, without those that are being written. The list is empty if the folder does not exist."""
    with _unless_gone():
        return sorted(name for name in os.listdir(folder) if not name.startswith(TEMPORARY))
    return []


def read(path: Path) -> bytes | None:
    """Read the file; return None if it is gone or is being replaced."""
    with _unless_gone():
        return path.read_bytes()
    return None


def remove(path: Path) -> None:
    with _unless_gone():
        path.unlink()


def put(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file atomically, and wait while the folder is full or not mounted. A ``durable`` file survives a power cut."""

    def write() -> None:
        try:
            write_atomic(path, data, durable=durable)
        except FileNotFoundError as error:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error

    persist(write, path=path, what="a message")


def sweep(folder: Path) -> None:
    """Remove the temporary files of killed writers. If a writer is still alive, it writes its file again."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # remaining files are removed at the next start
            path.unlink()


class Rhythm:
    """How long to wait between two checks: briefly after something happened, then longer and longer."""

    wait_s = 0.02

    def note(self, *, happened: bool) -> None:
        self.wait_s = 0.02 if happened else min(self.wait_s * 1.2, 0.5)


class Inbox:
    """Takes the messages with one label from a folder, in the order of their numbers."""

    def __init__(self, folder: Path, *, label: str) -> None:
        self._folder, self._label, self._next = folder, label, 1

    def take(self) -> tuple[int, bytes] | None:
        """Take the next message; return None if there is none yet."""
        name = message_name(self._label, self._next)
        if name not in names(self._folder) or (data := read(self._folder / name)) is None:
            return None
        remove(self._folder / name)
        self._next += 1
        return self._next - 1, data


def message_name(label: str, number: int) -> str:
    return f"{label}.{number:09d}"


def read_name(name: str) -> tuple[str, int]:
    """Split a name into label and number; a file that is not a message has no label."""
    label, _, number = name.rpartition(".")
    return (label, int(number)) if number.isdigit() else ("", 0)


class Presence:
    """What this process publishes about itself: its incarnation, facts about it, and a counter that a thread keeps increasing.

    ``each_beat`` runs in that thread at each beat. ``changing`` returns facts that change at each beat.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        each_beat: Callable[[], None] = lambda: None,
        changing: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._path = folder / PRESENCE
        self._facts = {**facts, "incarnation": new_id()}
        self._each_beat = each_beat
        self._changing = changing
        self._counter = 0
        self._one_writes = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"presence in {folder.name}", daemon=True)

    @property
    def incarnation(self) -> str:
        return self._facts["incarnation"]

    def begin(self) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._write(durable=True)
        self._thread.start()

    def say(self, **facts: Any) -> None:
        """Change the facts; other processes can see the change once this returns."""
        with self._one_writes:
            self._facts |= facts
        self._write(durable=True)

    def end(self, **facts: Any) -> None:
        """Stop the counter, and write these facts to the presence file one last time."""
        self._ended.set()
        self._thread.join(timeout=2 * BEAT_S)
        self.say(**facts)

    def _write(self, *, durable: bool) -> None:
        with self._one_writes:
            self._counter += 1
            facts = {**self._facts, **self._changing(), "counter": self._counter}
            put(self._path, json.dumps(facts).encode(), durable=durable)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._write(durable=False)
                self._each_beat()
            except (OSError, DiskError) as error:
                # Other processes see that the counter does not change, and wait until the folder is available again.
                warn(f"{self._path} cannot be written: {error}")


class Peer:
    """Another process, as described by its presence file."""

    def __init__(self, folder: Path) -> None:
        self.facts: Mapping[str, Any] = {}
        self._folder = folder
        self.beat = Heartbeat()

    @property
    def incarnation(self) -> str | None:
        return self.facts.get("incarnation")

    @property
    def is_alive(self) -> bool:
        return self.beat.has_moved and self.beat.silent_s < SILENT_S

    def look(self) -> None:
        if PRESENCE not in names(self._folder) or (data := read(self._folder / PRESENCE)) is None:
            return
        with suppress(ValueError):  # a power cut left an incomplete file
            self.facts = json.loads(data)
            self.beat.see(self.facts["incarnation"], self.facts["counter"])


def refuse_second(folder: Path, *, who: str) -> None:
    """Refuse to start if a process with this name is already running, that is, if its counter advances while this process watches."""
    peer = Peer(folder)
    peer.look()
    if not peer.facts or peer.facts.get("state") not in (State.RUNNING, State.HERE):
        return
    until = time.monotonic() + 3 * BEAT_S
    while time.monotonic() < until:
        time.sleep(0.2)
        peer.look()
        if peer.beat.has_moved:
            raise ClusterError(
                f"{who} is already running, as process {peer.facts['pid']} on {peer.facts['host']}, in {folder.parent.parent}; end it "
                "first, or give another --log-path"
            )
