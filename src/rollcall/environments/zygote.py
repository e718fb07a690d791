"""The process that environments are forked from, and its children. A child runs one environment, which is reset between episodes.

The parent process calls the methods of ``Zygote`` (process/child.py). The zygote imports the user's module once, so a child starts in a
millisecond and shares its memory. ``control_fd`` receives each child's file descriptors: its socket and its connection to the debugger
(process/debug/child.py). ``lifeline_fd`` is the read end of a pipe whose write end only the parent has. When that pipe closes, the
children stop, even if this process was killed. The lifeline of this process cannot be used for that, because it closes before the parent
has found what the children started. ``line_fd`` is the connection to the debugger, for breakpoints.

Nothing that a child starts outlives it: its group is killed before its status is collected, and processes that left the group are adopted
here and killed. When the parent hangs up or dies, all children stop, and then this process stops.

A child works on untrusted text, which might find a way to control what the child sends. The child therefore sends JSON, and the parent
treats it as untrusted data.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import inspect
import json
import os
import resource
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncio  # noqa: F401 isort:skip - imported here so that the children share it
from rollcall.base.redact import guard_streams, remember
from rollcall.environments import class_env, stepwise
from rollcall.environments.class_env import ClassPlayer, load_class
from rollcall.environments.stepwise import StepPlayer, WrongResult, load_stepwise
from rollcall.nodes.framing import JSON, Body
from rollcall.process.child import end_with, own_fds, serve, user_error
from rollcall.process.debug.child import ChildLine, Examined
from rollcall.process.pause import patient_loop
from rollcall.reward.confine import limit, see_no_others

MAX_ANSWER_BYTES = 32 << 20
_MB = 1 << 20
# Tracebacks leave out frames in these files, because they do not help the author of an environment.
_OWN_FILES = (__file__, class_env.__file__, stepwise.__file__)
Player = ClassPlayer | StepPlayer


class Zygote:
    hears = JSON

    def __init__(self, control_fd: int, lifeline_fd: int, line_fd: int) -> None:
        self._control = socket.socket(fileno=control_fd)
        self._lifeline_fd = lifeline_fd
        self._line = ChildLine(line_fd, of="environment")
        self._kinds: dict[str, Player] = {}
        self._pids: set[int] = set()
        self._examined = Examined()

    def load(self, setup: dict[str, Any]) -> dict[str, Any]:
        """Load the classes. Return the tools of each kind. Raise ValueError if a class cannot be used."""
        # User code may print the environment variables that it was given.
        remember(os.environ.get(name, "") for name in setup["env"])
        guard_streams()
        see_no_others()
        sys.path[:0] = [entry for entry in setup["sys_path"] if entry not in sys.path]
        sys.breakpointhook = self._line.stop
        self._memory_mb, self._post_mortem = setup["memory_mb"], setup["post_mortem"]
        self._kinds = {
            name: load_stepwise(**given) if "call_format" not in given else load_class(**given)
            for name, given in setup["kinds"].items()
        }
        gc.collect()
        gc.freeze()  # garbage collection in a child would write to the shared pages and so copy them
        _adopt_orphans()
        self._not_ours = {*_children()}  # started by the user's module during its import
        # From here on, this process does not exit before it has stopped its children, even if its parent dies. If it is suspended when
        # that happens, SIGCONT resumes it.
        atexit.register(_end_all)
        if hasattr(fcntl, "F_SETSIG"):
            fcntl.fcntl(own_fds()[1], fcntl.F_SETSIG, signal.SIGCONT)
        return {name: kind.schemas for name, kind in self._kinds.items()}

    def start(self, kind: str) -> int:
        """Fork a child and return its process ID."""
        _, (connection_fd, line_fd), _, _ = socket.recv_fds(self._control, 1, 2)
        try:
            # Python warns about threads of the user's module, which a child does not have.
            with warnings.catch_warnings(action="ignore"):
                pid = os.fork()
            if pid == 0:
                self._become_child(connection_fd, line_fd, kind)
        finally:
            os.close(connection_fd)
            os.close(line_fd)
        self._pids.add(pid)
        return pid

    def end(self, pid: int) -> int:
        """Kill a child and everything it started, unless it has exited. Return its status."""
        self._pids.remove(pid)
        _kill(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        _kill(pid)  # kills what is left of its group
        status = os.waitpid(pid, 0)[1]
        while left := {*_children()} - self._pids - self._not_ours:  # processes that left its group were adopted here
            for each in left:
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, 0)
        return os.waitstatus_to_exitcode(status)

    def _become_child(self, connection_fd: int, line_fd: int, kind: str) -> None:
        """Run as a child from the fork until the parent hangs up. This never returns to the zygote's loop."""
        status = 1
        try:
            self._control.close()
            os.close(own_fds()[0])
            line = ChildLine(line_fd, of="environment", examined=self._examined)
            os.setsid()  # so that killing its group stops what user code started
            _end_with_parent(self._lifeline_fd)
            _adopt_orphans()
            sys.breakpointhook = line.stop
            # Do not limit the address space, because browsers and GPU libraries reserve memory that they never use.
            limit(resource.RLIMIT_DATA, self._memory_mb * _MB)
            limit(resource.RLIMIT_CORE, 0)
            _reseed()

            def examine(error: BaseException) -> None:
                if self._post_mortem and not isinstance(error, WrongResult):
                    frames, _ = user_error(error, own_files=_OWN_FILES, memory_mb=self._memory_mb)
                    if frames is not None:
                        line.examine(error.with_traceback(frames))

            player = self._kinds[kind]
            player.examine = examine
            serve(connection_fd, EnvironmentChild(player, memory_mb=self._memory_mb))
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            _flush()
            os._exit(status)


def _end_all() -> None:
    while children := _children():
        for pid in children:
            _kill(pid)
        os.waitpid(-1, 0)


def _kill(pid: int) -> None:
    """Kill a process and its group. Its status has not been collected yet, so no other process has its ID."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it does not lead a group, or does not lead one yet
        os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Return the child process IDs of this process, including adopted children."""
    try:
        lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread ended in the meantime
        return _children()
    if lists:
        return [int(pid) for pids in lists for pid in pids.split()]
    import psutil  # this kernel does not provide the `children` files

    return [child.pid for child in psutil.Process().children()]


# A child


def _adopt_orphans() -> None:
    """Adopt the orphaned processes of this process's children, so they can be found and killed."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _end_with_parent(lifeline_fd: int) -> None:
    """Let the kernel kill this process when the parent dies. Reopen the pipe, because the signal belongs to the open file description,
    and all children share the description that they inherit."""
    try:
        own_fd = os.open(f"/proc/self/fd/{lifeline_fd}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # without /proc, this process exits when its socket closes
        return
    os.close(lifeline_fd)
    end_with(own_fd)


def _reseed() -> None:
    """Reseed numpy and torch, which would produce the same random numbers in every child. Python reseeds itself after a fork."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "seed"):
        torch.seed()


def _encoded(answer: Any) -> bytes:
    body = JSON.dumps(answer)
    if len(body) > MAX_ANSWER_BYTES:
        raise RuntimeError(f"its answer is {len(body) / _MB:.1f} MB long; the limit is {MAX_ANSWER_BYTES / _MB:g} MB")
    return body


class EnvironmentChild:
    hears, says = JSON, Body(_encoded, json.loads)

    def __init__(self, player: Player, *, memory_mb: int) -> None:
        self._player = player
        self._memory_mb = memory_mb
        self._runner: Any = None

    def reset(self, row: dict[str, Any]) -> str | None:
        return self._tried(lambda: self._player.reset(row, self._run))

    def step(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        return self._tried(lambda: self._player.step(text, token_ids, self._run))

    def reward(self) -> float | None:
        return self._tried(lambda: self._player.reward(self._run))

    def attributes(self) -> dict[str, Any]:
        return self._tried(lambda: _attributes(self._player.instance))

    def _tried(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, even SystemExit
            self._player.examine(error)
            if isinstance(error, WrongResult):
                raise RuntimeError(str(error)) from None
            raise RuntimeError(user_error(error, own_files=_OWN_FILES, memory_mb=self._memory_mb)[1].rstrip()) from None
        finally:
            _flush()

    def _run(self, returned: Any) -> Any:
        """Wait for the result if a method is async. The process keeps one event loop so that the user's clients stay connected."""
        if not inspect.isawaitable(returned):
            return returned

        async def wait() -> Any:
            return await returned

        self._runner = self._runner or asyncio.Runner(loop_factory=patient_loop)
        return self._runner.run(wait())


def _attributes(instance: Any) -> dict[str, Any]:
    """Return an object's attributes and properties, as far as JSON can represent them."""
    found: dict[str, Any] = {}
    for name in dir(instance):
        if name.startswith("__"):
            continue
        try:
            value = getattr(instance, name)
            text = json.dumps(value, default=lambda held: held.tolist(), allow_nan=False)  # for numpy and torch
            if len(text) <= 1_000_000 and _depth(plain := json.loads(text)) <= 50:
                found[name] = plain
        except Exception:  # noqa: BLE001 - a method, a client, a property that raises, or deep nesting
            continue
    return found


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def _flush() -> None:
    """Flush what user code printed, so that it appears before the call's answer."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # user code removed or closed it
            stream.flush()
