"""The debugger of this process: ``serve`` makes ``breakpoint()`` open it, and ``post_mortem`` opens it where an exception was
raised. A DebugLine does the same for a child process that runs user code.

A different debugger that is already installed is kept: that of an IDE, a notebook or pytest (which set ``sys.breakpointhook``), the
user's ``PYTHONBREAKPOINT``, and Ray's debugger if ``RAY_DEBUG`` is set (docs/debugging.md).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any

from rollcall.base.stop import heeded
from rollcall.base.wait import warn
from rollcall.process.debug.attach import End, OnStop, Porter, converse
from rollcall.process.debug.board import BOARD
from rollcall.process.debug.child import Examined
from rollcall.process.debug.stopped import LinePdb, TerminalPdb, borrowed_terminal, has_terminal
from rollcall.process.pause import paused

POST_MORTEM = "ROLLCALL_POST_MORTEM"  # set for a run's processes: exceptions open the debugger
RAY_DEBUG = "RAY_DEBUG"
LOOPBACK = "127.0.0.1"
PROMPT_S = 10.0  # from the first byte of a stopped process to its prompt


@dataclass(slots=True, kw_only=True)
class _Served:
    """How to reach this process when it stops without a terminal."""

    host: str
    node: int  # the node's rank
    on_stop: OnStop
    is_on: bool = False
    line: socket.socket | None = None  # to the porter
    pid: int = 0  # the process that created the line; its children have no porter


def _tell_board(place: Mapping[str, Any] | None) -> None:
    node = _served.node
    who = f"the controller on node {node}"
    BOARD.post(f"process {os.getpid()}", place, role="controller", rank=0, node=node, who=who)


_served = _Served(host=LOOPBACK, node=0, on_stop=_tell_board)
_stops: dict[str, Mapping[str, Any]] = {}  # stops in this process and its children: who, and where
_telling = threading.Lock()
_making = threading.Lock()
_own = threading.local()  # the thread's debuggers; each keeps the frames where it stopped
_serials = count()  # numbers the lines of this process
# The places where exceptions have opened the debugger. A zygote's children each create their own at the first exception.
_examined = cache(Examined)


def serve(*, host: str | None = None, node: int | None = None, on_stop: OnStop | None = None) -> None:
    """Stop at breakpoints from now on, unless a different debugger handles them. Terminals on other nodes reach this machine at
    ``host``; ``node`` is its rank. ``on_stop`` is called at each stop; by default, it posts to this process's board."""
    _served.host, _served.on_stop = host or _served.host, on_stop or _served.on_stop
    _served.line = None  # the next stop gets a porter with these values
    _served.node = _served.node if node is None else node
    _served.is_on = True
    named = os.environ.get("PYTHONBREAKPOINT", "")
    # Ray sets its hook in each of its processes (2.60), even if the user has not set RAY_DEBUG.
    is_named = named not in ("", "0") and not named.startswith("ray.util.")
    if not is_rays() and not is_named and sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = _hook


def is_rays() -> bool:
    """Return whether the user has chosen Ray's own debugger for this process."""
    return bool(os.environ.get(RAY_DEBUG))


def is_watched() -> bool:
    """Return whether this process is a worker of a run. A worker does not post its stops on a board of its own."""
    return _served.is_on and _served.on_stop is not _tell_board


def tell(who: str, place: Mapping[str, Any] | None) -> None:
    """Report that ``who`` has stopped at ``place``, or continues. A worker can show only one stop at a time, so other stops wait."""
    with _telling:
        if place is None:
            _stops.pop(who, None)
        else:
            _stops[who] = place
        _served.on_stop(next(iter(_stops.values()), None))


def debugger() -> TerminalPdb | LinePdb:
    """Return this thread's debugger. It uses this process's terminal or, if there is none, a line whose porter waits for terminals."""
    if has_terminal():
        if not hasattr(_own, "terminal"):
            _own.terminal = TerminalPdb()
        return _own.terminal
    with _making:
        if _served.line is None or _served.pid != os.getpid():
            _served.line, porters = socket.socketpair()
            _served.pid = os.getpid()
            Porter(porters, host=_served.host, on_stop=partial(tell, f"process {os.getpid()}"))
        line = _served.line
    if getattr(_own, "line", None) is not line:
        _own.line, _own.over_line = line, LinePdb(line.fileno())
    return _own.over_line


def _hook(*args: Any, **kwargs: Any) -> None:
    """Handle ``breakpoint()`` in this process."""
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    found, caller = debugger(), sys._getframe().f_back
    found.stop(caller)  # must be the last statement of this function, because any code after it is traced


def post_mortem(error: BaseException) -> None:
    """Open the debugger where this exception was raised, if the run was started with `--post-mortem`. Rollcall's own errors do not
    open it, because their messages say what to do. It opens only once for each line and kind of error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    is_asked = _served.is_on and os.environ.get(POST_MORTEM) and not is_rays()
    if not is_asked or type(error).__module__.startswith("rollcall.") or error.__traceback__ is None:
        return
    if _examined().is_new(error.__traceback__, type(error)):
        debugger().post_mortem(error)


class DebugLine:
    """The parent's end of the line to a child that runs user code: a reward's or an environment's process (child.py has the other end).

    The child has no terminal and perhaps no network, so the parent provides a terminal: its own, or those that connect to a porter.
    Text from the child is displayed and never interpreted. While somebody debugs the child, its time limits are paused (``is_held``,
    ``Board.is_held``). ``theirs`` is the child's socket. ``role`` and ``number`` identify the child.
    """

    def __init__(self, *, role: str, number: int) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._role = role
        self._number = number
        self._key = f"{role} {os.getpid()} {next(_serials)}"
        self.is_held = False
        self._is_closed = False

    @property
    def fd(self) -> int:
        return self._ours.fileno()

    def answer(self) -> bool:
        """Handle a stop: connect the process to this terminal until it continues, and return True. Without a terminal, start a porter
        that reads the line. If the data is not from a debugger, close the line, so that the process continues. Do the same if the
        command has no run directory, because then nobody could find the porter."""
        try:
            if self._ours.recv(1, socket.MSG_PEEK) == b"":
                return False  # the child has exited; its owner notices that
        except OSError:
            return False  # the child has exited without reading all data
        if not (has_terminal() or BOARD.is_public or is_watched()):
            warn_ignored(self._role)
            self.close()
            return False
        if not has_terminal():
            Porter(self._ours, host=_served.host, on_stop=self._note)
            return False
        with paused(), borrowed_terminal():
            end = converse(self._ours, again=True, opens_within_s=PROMPT_S)
        if end is End.LEFT:
            heeded().check()  # raises if the terminal was closed, which sends SIGHUP and ends the input
            raise KeyboardInterrupt
        if end is End.LOST:
            self.close()
        return end is not End.LOST

    def _note(self, place: Mapping[str, Any] | None) -> None:
        if self._is_closed:
            place = None  # a process that is being terminated must not pause any time limits
        self.is_held = place is not None
        if not BOARD.is_public and is_watched():
            tell(self._key, place)
            return
        node = _served.node
        who = f"{self._role} process {self._number} on node {node}"
        BOARD.post(self._key, place, role=self._role, rank=self._number, node=node, who=who)

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):  # the process has exited, which closed its end
            self._ours.shutdown(socket.SHUT_RDWR)  # wakes the porter, whose thread then exits
        self._ours.close()


@cache
def warn_ignored(role: str) -> None:
    """Warn only once, because hundreds of processes may reach the same line."""
    article = "an" if role[0] in "aeiou" else "a"
    warn(f"a breakpoint() in {article} {role} is ignored: this command has neither a terminal nor a run directory")
