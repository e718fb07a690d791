"""The process that environments are forked from: ``python -m rollcall.environments.zygote CONTROL READY LIFELINE LINE``.

It imports the user's module once, so that a child starts in a millisecond and shares its memory. The setup comes as JSON on stdin, READY
takes one JSON object: the tools of each kind, or why there are none. Then CONTROL, a socket that keeps messages apart, brings
``{"start": number, "kind": ...}`` with the child's socket and its line to the debugger (debug/child.py), and ``{"end": number}``; it takes ``{"started": number, "pid": ...}`` and
``{"ended": number, "status": ...}``, or ``"why"`` in place of a status where nothing could be started.

Nothing that a child starts outlives it: its group is killed before its status is taken, and what left its group is adopted here and
killed. When CONTROL closes, which it does when the parent dies, all of them end, and then this process does. LIFELINE, the read end of a
pipe that only the parent holds, ends a child also when this process has been killed. LINE is for a breakpoint in a module that is imported here.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import json
import os
import select
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
from rollcall.process.child import end_with
from rollcall.redact import guard_streams, remember
from rollcall.reward.confine import see_no_others

_MAX_MESSAGE_BYTES = 1 << 16
_MAX_WHY = 20_000
_LOOK_S = 1.0  # between two looks at children, should a signal be lost

Kind = ClassKind | StepKind


def main(arguments: list[str]) -> None:
    control_fd, ready_fd, lifeline_fd, line_fd = map(int, arguments)
    end_with(lifeline_fd)  # while user code is imported, which may hang
    for fd in (control_fd, ready_fd, lifeline_fd, line_fd):
        os.set_inheritable(fd, False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # buffered output is lost when a child is ended
    faulthandler.enable(sys.__stderr__ or 2)
    # When every process of a run gets a signal to stop, only the controller acts on it. A handler, since what user code starts
    # would inherit an ignored signal.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    setup = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # User code may print the variables that it was given.
    remember(os.environ.get(name, "") for name in setup["env"])
    guard_streams()
    see_no_others()
    sys.path[:0] = [entry for entry in setup["sys_path"] if entry not in sys.path]
    # Nobody reads this line once the module is imported: what stops here later goes on at once.
    sys.breakpointhook = ChildLine(line_fd, of="environment").stop
    try:
        kinds = _load(setup)
    except ValueError as error:
        _tell(ready_fd, {"refused": str(error)[:_MAX_WHY]})
        return
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, the pages that all share
    _wait_for_control(lifeline_fd)
    _tell(ready_fd, {"tools": {name: kind.schemas for name, kind in kinds.items()}})
    control = socket.socket(fileno=control_fd)
    limits = Limits(memory_mb=setup["memory_mb"], post_mortem=setup["post_mortem"])
    _Zygote(control, kinds, lifeline_fd=lifeline_fd, limits=limits).serve()


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


def _tell(ready_fd: int, message: dict[str, Any]) -> None:
    with os.fdopen(ready_fd, "wb") as sink:
        sink.write(json.dumps(message).encode())


def _wait_for_control(lifeline_fd: int) -> None:
    """From here on this process outlives its parent for as long as it takes to end its children. One that is stopped is woken for it."""
    import fcntl

    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGCONT)


class _Zygote:
    def __init__(self, control: socket.socket, kinds: dict[str, Kind], *, lifeline_fd: int, limits: Limits) -> None:
        self._control = control
        self._kinds = kinds
        self._lifeline_fd = lifeline_fd
        self._limits = limits
        self._pids: dict[int, int] = {}  # number -> process
        self._examined = Examined()
        adopt_orphans()
        self._not_ours = set(_children())  # that the user's module started when it was imported
        self._wake_fd, wake_write_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(wake_write_fd, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        self._fds = (self._wake_fd, wake_write_fd)

    def serve(self) -> None:
        """Until the parent hangs up. It returns in a child too, once that has ended."""
        while True:
            ready, _, _ = select.select([self._control, self._wake_fd], [], [], _LOOK_S)
            if self._wake_fd in ready:
                try:
                    os.read(self._wake_fd, 1 << 16)
                except BlockingIOError:
                    pass  # somebody else's signal
            self._reap()
            if self._control in ready and not self._hear():
                break
        self._end_all()

    def _hear(self) -> bool:
        """A message of the parent's; False: it is gone."""
        try:
            body, fds, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE_BYTES, 2)
        except ConnectionError:
            return False
        if not body:
            return False
        message = json.loads(body)
        if "start" in message:
            self._start(message["start"], message["kind"], *(socket.socket(fileno=fd) for fd in fds))
        elif (pid := self._pids.get(message["end"])) is not None:
            _kill(pid)
        return True

    def _start(self, number: int, kind: str, connection: socket.socket, line: socket.socket) -> None:
        with connection, line:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # threads of the user's module, which do not run in a child
                    pid = os.fork()
            except OSError as error:
                self._say({"ended": number, "why": f"no process can be started ({error})"})
                return
            if pid == 0:
                self._become_child(connection, line, kind)
        self._pids[number] = pid
        self._say({"started": number, "pid": pid})

    def _become_child(self, connection: socket.socket, line: socket.socket, kind: str) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for fd in self._fds:
                os.close(fd)
            run_child(
                connection,
                self._kinds[kind].make,
                line=ChildLine(line.fileno(), of="environment", examined=self._examined),
                lifeline_fd=self._lifeline_fd,
                limits=self._limits,
            )
            status = 0
        except ConnectionError:
            pass  # the parent hung up while this process answered, or user code closed the socket
        except BaseException:  # noqa: BLE001 - nothing may get back into the zygote's loop
            import traceback

            traceback.print_exc()
        finally:
            flush()
            os._exit(status)

    def _reap(self) -> None:
        """Take the status of what has ended, after ending what it leaves behind."""
        has_ended = False
        numbers = {pid: number for number, pid in self._pids.items()}
        while (found := _ended()) is not None:
            if found in numbers:
                _kill(found)  # what is left of its group
            status = os.waitpid(found, 0)[1]
            has_ended = True
            if found in numbers:
                del self._pids[numbers[found]]
                self._say({"ended": numbers[found], "status": os.waitstatus_to_exitcode(status)})
        if has_ended:
            known = {*self._pids.values(), *self._not_ours}
            for pid in _children():
                if pid not in known:
                    os.kill(pid, signal.SIGKILL)  # it left its group, and its episode has ended

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            pass  # the parent is gone; the next look at the socket says so

    def _end_all(self) -> None:
        for pid in self._pids.values():
            _kill(pid)
        while children := _children():
            for pid in children:
                _kill(pid)
            os.waitpid(-1, 0)


def _ended() -> int | None:
    """A child that has ended and whose status nobody has taken."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


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


if __name__ == "__main__":
    main(sys.argv[1:])
