"""A run's list of the processes that are waiting in a debugger, and how `rollcall debug` finds them.

The controller has one board. It lists stopped workers (which the supervisor reports), rewards and environments, and the controller
itself. The board tells the user how to attach a terminal, and writes ``RUN_DIR/debugger.json``. Only the owner can read that file,
because it contains the secrets for the doors. On Ray, the head's store has a copy (process/ray/connect.py) for nodes that do not see
the run directory.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollcall.base.atomic import write_atomic
from rollcall.base.redact import redact
from rollcall.base.wait import say, warn
from rollcall.base.words import visible
from rollcall.process.pause import is_paused

FILE = "debugger.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A process that has stopped in the debugger."""

    number: int  # for `rollcall debug NUMBER`; does not change while the process waits
    run: str  # the run directory
    role: str  # "actor", "reward", "environment", "controller", ...
    rank: int
    node: int  # the node's rank
    who: str  # its name in messages
    file: str
    line: int
    function: str
    why: str  # "breakpoint", or the exception
    since: float  # seconds since the epoch
    until: float  # when it continues by itself if nobody is attached
    address: str
    port: int
    secret: str = field(repr=False)

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields for `rollcall debug --json`: all except the door's address and secret."""
        return {name: value for name, value in asdict(self).items() if name not in ("address", "port", "secret")}


class Board:
    """Tracks which processes of a run have stopped. Any thread may call it."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self._run_dir: Path | None = None
        self._num_posted = 0
        self._lock = threading.RLock()
        self.publish: Callable[[Sequence[Waiting]], None] | None = None  # to the cluster

    @property
    def is_held(self) -> bool:
        """Whether somebody is debugging a process of this run. If so, the run's deadlines are paused."""
        return bool(self._waiting) or is_paused()

    @property
    def is_public(self) -> bool:
        """Whether `rollcall debug` can find the processes on this board."""
        return self._run_dir is not None or self.publish is not None

    @contextmanager
    def of_run(self, run_dir: Path) -> Iterator[None]:
        """Set the run whose processes post to this board during the block."""
        was_there = run_dir.is_dir()
        with self._lock:
            self._run_dir, self._num_posted = run_dir, 0
            self._show()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.clear()
                self._show()
                self._run_dir = None
            if not was_there:
                with suppress(OSError):  # the folder was never created, or a run has written files to it
                    run_dir.rmdir()

    def post(self, key: str, place: Mapping[str, Any] | None, *, role: str, rank: int, node: int, who: str) -> None:
        """Record where a process has stopped, or with None that it continues. ``key`` identifies the process."""
        with self._lock:
            before = self._waiting.get(key)
            if place is None:
                if before is not None:
                    del self._waiting[key]
                    self._show()
                    say(f"{who} continues")
                return
            if before is not None and all(getattr(before, name) == place[name] for name in ("port", "line", "file")):
                return
            if before is None:
                self._num_posted += 1
            number = self._num_posted if before is None else before.number
            run = str(self._run_dir.absolute()) if self._run_dir else ""
            about: dict[str, Any] = {**place, "why": redact(place["why"]), "since": time.time()}
            waits = Waiting(number=number, run=run, role=role, rank=rank, node=node, who=who, **about)
            self._waiting[key] = waits
            self._show()
        if before is None:
            until = time.strftime("%H:%M:%S", time.localtime(waits.until))
            where = f"{self._run_dir} " if self._run_dir else ""
            ends = "continues" if waits.why == "breakpoint" else "ends with this error"
            warn(
                visible(
                    f"{who} is waiting in the debugger at {waits.where} ({waits.why}). Attach a terminal with `rollcall debug "
                    f"{where}{number}`; if nobody attaches, it {ends} at {until}"
                )
            )

    def _show(self) -> None:
        """Write the list for the run, and publish it on the cluster."""
        waiting = sorted(self._waiting.values(), key=lambda one: one.number)
        if self._run_dir is not None:
            path = self._run_dir / FILE
            try:
                if waiting:
                    # A run that is still loading its data, model and rewards has no directory yet.
                    self._run_dir.mkdir(exist_ok=True)
                    write_atomic(path, dump_board(waiting), durable=False, private=True)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                warn(
                    f"{path} cannot be written ({error}), so `rollcall debug {self._run_dir}` does not list the processes that are waiting"
                )
        if self.publish is not None:
            self.publish(waiting)


BOARD = Board()


def read_board(run_dir: Path) -> list[Waiting]:
    """Read a run's waiting processes from the file that its controller wrote."""
    try:
        return parse_board((run_dir / FILE).read_text())
    except FileNotFoundError:
        return []


def parse_board(text: str) -> list[Waiting]:
    return [Waiting(**one) for one in json.loads(text)]


def dump_board(waiting: Sequence[Waiting]) -> str:
    return json.dumps([asdict(one) for one in waiting])
