"""The debugger of this process: ``serve`` makes ``breakpoint()`` stop here, ``post_mortem`` opens it where an exception came from.

Where somebody else has a debugger in place it stays: an IDE, a notebook or pytest (their own ``sys.breakpointhook``), a
``PYTHONBREAKPOINT`` of the user's, and Ray's own debugger where ``RAY_DEBUG`` is set (docs/debugging.md).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollcall.debug.board import BOARD, DebugSeat
from rollcall.debug.porter import OnStop, Porter
from rollcall.debug.stopped import LinePdb, TerminalPdb, has_terminal, innermost, stops_by

POST_MORTEM = "ROLLCALL_POST_MORTEM"  # in the environment of a run's processes: exceptions open the debugger
RAY_DEBUG = "RAY_DEBUG"
LOOPBACK = "127.0.0.1"


@dataclass(slots=True, kw_only=True)
class _Served:
    """What this process does when it stops without a terminal."""

    host: str
    node: int  # its rank
    told: OnStop
    is_on: bool = False
    line: socket.socket | None = None  # to the porter
    pid: int = 0  # of the process that made the line; a child of it has no porter


def _tell_board(place: Mapping[str, Any] | None) -> None:
    title = f"the controller on node {node_here()}"
    BOARD.post(f"process {os.getpid()}", DebugSeat(role="controller", rank=0, node=node_here(), title=title), place)


_served = _Served(host=LOOPBACK, node=0, told=_tell_board)
_stops: dict[str, Mapping[str, Any]] = {}  # of this process and its children: who, and where
_telling = threading.Lock()
_making = threading.Lock()
_own = threading.local()  # the debuggers of a thread: each keeps the frames where that one stopped
_opened: set[tuple[str, int, type]] = set()  # where exceptions have opened the debugger


def serve(*, host: str | None = None, node: int | None = None, told: OnStop | None = None) -> bool:
    """Stop at breakpoints from now on; False: somebody else's debugger does. ``host`` and ``node``: this machine, as
    terminals of other nodes reach it; ``told``: who hears of a stop, by default the board of this process."""
    before = (_served.host, _served.told)
    _served.host, _served.told = host or _served.host, told or _served.told
    if before != (_served.host, _served.told):
        _served.line = None  # the next stop has a porter that knows them
    _served.node = _served.node if node is None else node
    _served.is_on = True
    if is_others():
        return False
    sys.breakpointhook = _hook
    return True


def is_rays() -> bool:
    """Whether the user has chosen Ray's own debugger for this process."""
    return bool(os.environ.get(RAY_DEBUG))


def is_others() -> bool:
    named = os.environ.get("PYTHONBREAKPOINT", "")
    # Ray names its hook in every process of its own (2.60); without RAY_DEBUG nobody has asked for it.
    is_named = named not in ("", "0") and not named.startswith("ray.util.")
    return is_rays() or is_named or sys.breakpointhook not in (sys.__breakpointhook__, _hook)


def host_here() -> str:
    """Where terminals come to that want to reach this process or its children."""
    return _served.host


def node_here() -> int:
    return _served.node


def is_watched() -> bool:
    """Whether somebody else than the board of this process hears of its stops: this is a worker of a run."""
    return _served.is_on and _served.told is not _tell_board


def tell(who: str, place: Mapping[str, Any] | None) -> None:
    """``who`` has stopped there; None: it goes on. A worker can show one stop at a time, so the others come when it goes on."""
    with _telling:
        if place is None:
            _stops.pop(who, None)
        else:
            _stops[who] = place
        _served.told(next(iter(_stops.values()), None))


def debugger() -> TerminalPdb | LinePdb:
    """That of this thread: at the terminal of this process if it has one; else over a line, with a porter that waits for
    terminals."""
    if has_terminal():
        if not hasattr(_own, "terminal"):
            _own.terminal = TerminalPdb()
        return _own.terminal
    with _making:
        if _served.line is None or _served.pid != os.getpid():
            _served.line, porters = socket.socketpair()
            _served.pid = os.getpid()
            Porter(porters, host=_served.host, told=partial(tell, f"process {os.getpid()}"))
        line = _served.line
    if getattr(_own, "line", None) is not line:
        _own.line, _own.over_line = line, LinePdb(line.recv, line.send)
    return _own.over_line


def wants_post_mortem(error: BaseException) -> bool:
    """Whether this exception opens the debugger: `--post-mortem` was given, and it comes from code, not from a refusal of ours,
    which says what to do. One line opens it once for a kind of error."""
    if (
        not (_served.is_on and os.environ.get(POST_MORTEM))
        or is_rays()
        or type(error).__module__.startswith("rollcall.")
    ):
        return False
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    place = (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno, type(error))
    if place in _opened:
        return False
    _opened.add(place)
    return True


def post_mortem(error: BaseException) -> None:
    """Open the debugger where this exception was raised, if the run was started with `--post-mortem`."""
    error = innermost(error)
    if wants_post_mortem(error):
        debugger().post_mortem(error)


_hook = stops_by(debugger)
