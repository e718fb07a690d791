"""The process that environments are forked from; its parent calls a ``Zygote`` (process/child.py).

It imports the user's module once, so that a child starts in a millisecond and shares its memory. CONTROL brings the descriptors of each
child: its socket, and its line to the debugger (debug/child.py). LIFELINE, the read end of a pipe that only the parent holds, ends the
children also when this process has been killed. LINE is for a breakpoint in a module that is imported here.

Nothing that a child starts outlives it: its group is killed before its status is taken, and what left its group is adopted here and
killed. When the parent hangs up or dies, all of them end, and then this process does.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import asyncio  # noqa: F401 isort:skip - children share it
from rollcall.debug.child import ChildLine, Examined
from rollcall.environments.child import Limits, adopt_orphans, flush, run_child
from rollcall.environments.class_env import ClassKind, load_class
from rollcall.environments.stepwise import StepKind, load_stepwise
from rollcall.process.child import cut, own_fds
from rollcall.process.framing import JSON
from rollcall.redact import guard_streams, remember
from rollcall.reward.confine import see_no_others

Kind = ClassKind | StepKind


class Zygote:
    hears = says = JSON

    def __init__(self, control_fd: int, lifeline_fd: int, line_fd: int) -> None:
        self._control = socket.socket(fileno=control_fd)
        self._lifeline_fd = lifeline_fd
        self._line = ChildLine(line_fd, of="environment")
        self._kinds: dict[str, Kind] = {}
        self._pids: dict[int, int] = {}  # number -> process
        self._examined = Examined()

    def load(self, setup: dict[str, Any]) -> dict[str, Any]:
        """The tools of each kind, or why there are none."""
        # User code may print the variables that it was given.
        remember(os.environ.get(name, "") for name in setup["env"])
        guard_streams()
        see_no_others()
        sys.path[:0] = [entry for entry in setup["sys_path"] if entry not in sys.path]
        sys.breakpointhook = self._line.stop
        self._limits = Limits(memory_mb=setup["memory_mb"], post_mortem=setup["post_mortem"])
        try:
            self._kinds = _load(setup)
        except ValueError as error:
            return {"refused": cut(str(error))}
        gc.collect()
        gc.freeze()  # a collection in a child would write to, and so copy, the pages that all share
        adopt_orphans()
        self._not_ours = {*_children()}  # that the user's module started when it was imported
        self._end_children_first()
        return {"tools": {name: kind.schemas for name, kind in self._kinds.items()}}

    def start(self, number: int, kind: str) -> int:
        """Fork a child; its process id."""
        _, fds, _, _ = socket.recv_fds(self._control, 1, 2)
        connection_fd, line_fd = fds
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # threads of the user's module, which do not run in a child
                pid = os.fork()
            if pid == 0:
                self._become_child(connection_fd, line_fd, kind)
        finally:
            os.close(connection_fd)
            os.close(line_fd)
        self._pids[number] = pid
        return pid

    def end(self, number: int) -> int:
        """Kill a child with all that it started, unless it has ended; its status."""
        pid = self._pids.pop(number)
        _kill(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        _kill(pid)  # what is left of its group
        status = os.waitpid(pid, 0)[1]
        known = {*self._pids.values(), *self._not_ours}
        while left := {*_children()} - known:  # what left its group was adopted here
            for each in left:
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, 0)
        return os.waitstatus_to_exitcode(status)

    def _end_children_first(self) -> None:
        """From here on this process outlives its parent for as long as it takes to end its children. One that is stopped is woken."""
        import fcntl

        atexit.register(_end_all)
        if hasattr(fcntl, "F_SETSIG"):
            fcntl.fcntl(own_fds()[1], fcntl.F_SETSIG, signal.SIGCONT)

    def _become_child(self, connection_fd: int, line_fd: int, kind: str) -> None:
        status = 1
        try:
            self._control.close()
            os.close(own_fds()[0])
            line = ChildLine(line_fd, of="environment", examined=self._examined)
            run_child(
                connection_fd, self._kinds[kind].make, line=line, lifeline_fd=self._lifeline_fd, limits=self._limits
            )
            status = 0
        except BaseException:  # noqa: BLE001 - nothing may get back into the zygote's loop
            import traceback

            traceback.print_exc()
        finally:
            flush()
            os._exit(status)


def _load(setup: dict[str, Any]) -> dict[str, Kind]:
    """The classes by kind; ValueError: one of them cannot be used."""
    kinds: dict[str, Kind] = {}
    paths: dict[str, Any] = setup["paths"] or {"": None}
    for name, path in paths.items():
        key = f"environment.path.{name}" if name else "environment.path"
        kwargs = setup["kwargs"].get(name, {})
        if setup["type"] == "step":
            kinds[name] = load_stepwise(path, key=key, kwargs=kwargs)
        else:
            kinds[name] = load_class(
                path,
                key=key,
                kwargs=kwargs,
                functions=setup["tools"],
                call_format=setup["call_format"],
                is_chat=setup["is_chat"],
            )
    return kinds


def _end_all() -> None:
    while children := _children():
        for pid in children:
            _kill(pid)
        os.waitpid(-1, 0)


def _kill(pid: int) -> None:
    """With its group. Its status has not been taken, so the number is still its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own, or not yet
        os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Of this process, adopted ones too."""
    try:
        lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread ended meanwhile
        return _children()
    if lists:
        return [int(pid) for pids in lists for pid in pids.split()]
    import psutil  # a kernel without these lists

    return [child.pid for child in psutil.Process().children()]
