"""A worker's process: it sets the environment, creates the worker, calls it, and reports its exceptions.

The class is imported after the environment is set, so that its module can read RANK and see its accelerators.

A port is leased by binding a socket to it. The kernel lets only one process bind a port at a time, and does not use a bound port for
an outgoing connection. The lease does not listen and allows address reuse, so the group's rendezvous (torch's
TCPStore, which allows it too) can listen on the port while it is leased. The lease ends with the process.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

from rollcall.base.errors import MemoryShortError
from rollcall.base.importing import uncollected
from rollcall.base.process_table import environment_of
from rollcall.nodes.declared import open_sealed
from rollcall.process.debug.here import is_rays, post_mortem, serve
from rollcall.process.groups.dispatch import Drop, trim
from rollcall.process.groups.pulse import Pulse
from rollcall.process.groups.reachable import About, be_reachable

_FRAMES = "rollcall.process.groups."  # modules whose frames are above those of a worker's own code
DEBUG_HOST = "ROLLCALL_DEBUG_HOST"  # this node's address, at which terminals reach a stopped worker
GROUP_MARK = "ROLLCALL_GROUP"  # set for a group's processes and for all processes that they start


# What gloo, NCCL, TCPStore and sockets report when the other side is gone or silent.
_COMPLAINTS = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket closed",
    "gloo/transport", "NCCL", "ncclRemoteError", "failed to recv", "No route to host", "Timed out waiting",
)  # fmt: skip


def is_about_a_peer(error: BaseException | None, text: str) -> bool:
    """Return whether a worker's exception means that another process did not answer, rather than that its own code failed."""
    if isinstance(error, ConnectionError):
        return True
    names = {kind.__name__ for kind in type(error).__mro__} if error is not None else set()
    if names & {"DistBackendError", "DistNetworkError", "DistStoreError", "MissingPeerError"}:
        return True
    end = "\n".join(text.rstrip().splitlines()[-3:])
    return any(word in end for word in _COMPLAINTS)


class RemoteFailureError(Exception):
    """A worker's exception in the form in which the caller receives it: always as text, and also as an object if it can be pickled."""

    def __init__(self, text: str, pickled: bytes | None) -> None:
        super().__init__(text, pickled)
        self.text = text
        self.pickled = pickled

    def __str__(self) -> str:
        return self.text.rstrip()

    @classmethod
    def of(cls, error: Exception) -> RemoteFailureError:
        """Build the failure from an exception, without the frames that lead to the worker's own code."""
        inner = error.__traceback__
        while inner is not None and inner.tb_frame.f_globals.get("__name__", "").startswith(_FRAMES):
            inner = inner.tb_next
        # Leave out the traceback if memory ran out: the error's message explains the reason, and the line does not.
        frames = None if isinstance(error, MemoryShortError) else traceback.format_exception(type(error), error, inner)
        text = str(error) if frames is None else "".join(frames)
        try:
            pickled = pickle.dumps(error)
        except Exception:  # an exception may contain anything, and pickling runs its code
            pickled = None
        failure = cls(text, pickled)
        failure.__cause__ = error  # for a caller in this process; it is not pickled
        return failure

    @property
    def original(self) -> BaseException | None:
        if self.__cause__ is not None or self.pickled is None:
            return self.__cause__
        try:
            return pickle.loads(self.pickled)
        except Exception:  # its class may not exist in this process, or may reject its own arguments
            return None


def lease_port() -> socket.socket:
    """Return a bound socket that does not listen; its port is the lease."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    lease = socket.socket(family, socket.SOCK_STREAM)
    lease.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        lease.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # reserves the port for both families
    lease.bind(("", 0))
    return lease


def load_class(target: str | type) -> type:
    """Import the worker class, and remove Ray's decorator from it."""
    if isinstance(target, str):
        module, _, name = target.rpartition(".")
        with uncollected():
            found = getattr(importlib.import_module(module), name, None)
        if found is None:
            raise ValueError(f"module {module} has no {name}; write the worker as 'module.Class'")
        target = found
    metadata = getattr(target, "__ray_metadata__", None)
    target = target if metadata is None else metadata.modified_class
    if not isinstance(target, type):
        raise ValueError(f"a worker needs a class, but {target!r} is a {type(target).__name__}")
    return target


def call_method(
    worker: Any, method: str, args: Any, kwargs: Mapping[str, Any], *, loop: asyncio.AbstractEventLoop
) -> Any:
    """Run one method; run a coroutine to completion."""
    result = getattr(worker, method)(*args, **kwargs)
    return loop.run_until_complete(result) if inspect.iscoroutine(result) else result


class Host:
    """Runs in the worker's process. Ray prints its ``repr`` before every line of the worker's output."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._worker: Any = None
        self._lease: socket.socket | None = None
        self._loop = asyncio.new_event_loop()
        self._pulse: Pulse | None = None

    def __repr__(self) -> str:
        return self._name

    def greet(self, leads: bool) -> tuple[int, int]:
        """Return the id of this process and, if it leads its group, the port that it has leased for the group."""
        if leads:
            self._lease = lease_port()
        return os.getpid(), self._lease.getsockname()[1] if self._lease is not None else 0

    def start(self, env: Mapping[str, str], target: str | type, /, *args: Any, **kwargs: Any) -> None:
        """Create the worker."""
        open_sealed()
        os.environ.update(env)
        be_reachable(About(title=self._name))
        self._pulse = Pulse(int(env["RANK"]))
        if DEBUG_HOST in env:
            serve(host=env[DEBUG_HOST], on_stop=self._pulse.note_stop)
            if is_rays():
                # Ray's debugger does not report when it stops this process, so no call may count as too long.
                self._pulse.note_stop({})
        try:
            self._worker = load_class(target)(*args, **kwargs)
        except Exception as error:
            raise _examined(error) from None

    def call(self, method: str, drop: Drop, /, *args: Any, **kwargs: Any) -> Any:
        assert self._pulse is not None, "start comes first"
        try:
            with self._pulse.doing(method):
                return trim(call_method(self._worker, method, args, kwargs, loop=self._loop), drop)
        except Exception as error:
            raise _examined(error) from None


def _examined(error: Exception) -> RemoteFailureError:
    """Return the failure for the caller. If the user asked for it, open the debugger first, unless the worker only lost its peer."""
    failure = RemoteFailureError.of(error)
    if not is_about_a_peer(error, failure.text):
        post_mortem(error)
    return failure


def end_group(mark: str, *, timeout_s: float) -> list[int]:
    """Kill every process on this node that has the group's mark; return those that are still alive at the deadline."""
    deadline = time.monotonic() + timeout_s
    while marked := [pid for pid in marked_processes(mark) if pid != os.getpid()]:
        if time.monotonic() > deadline:
            return marked
        for pid in marked:
            with suppress(ProcessLookupError):  # it has exited in the meantime
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return []


def marked_processes(mark: str) -> list[int]:
    """Return the group's processes on this node, except zombies, whose environment cannot be read."""
    return [pid for pid in psutil.pids() if (environment_of(pid) or {}).get(GROUP_MARK) == mark]
