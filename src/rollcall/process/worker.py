"""The parent's handle for a child process. ``await worker.call(method, ...)`` returns the method's result. It raises Raised if the
method raised an error, and Lost if the process is gone.

    Worker --numbered calls, as frames--> Link --bytes--> the process: serve (child.py), or its own server
       ^                                    |
       +---- parts, answers, errors --------+

A worker has no thread of its own and is not tied to an event loop. ``call`` waits in the running event loop; ``ask`` and ``wait``
block the calling thread. Any number of calls may be in progress, and the child may answer them in any order. Event loops must not
overlap: while calls wait in one loop, no other loop may make calls.

A call's deadline limits how long the process may be silent: it restarts with each part of the answer, and with each byte of the call
that the process accepts. Time at a debugger's prompt does not count (pause.py). A process that misses a deadline, has exited or sends
something invalid is killed together with all processes that it started. Every call then raises Lost, including later calls.

The Link determines how a process is reached: as a child of this process (here.py), forked by a zygote, or on another node.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter

from rollcall.base.words import visible
from rollcall.nodes.framing import CALL, DONE, HEAD, LONGEST, PART, PICKLE, RAISED, Body, Frames, frame
from rollcall.process.pause import running_s

if TYPE_CHECKING:
    from rollcall.process.debug.here import DebugLine

Reader = Callable[[bytes], Any]
"""Decodes a value that a process sent; raises ValueError if the value is invalid."""
_DIED = "died"
EXIT_S = 1.0  # how long a process may take to exit once its connection has closed
_LONGEST_LOOK_S, _HELD_LOOK_S = 60.0, 1.0


class Raised(RuntimeError):  # noqa: N818 - an outcome
    """The process raised an error during a call."""

    def __init__(self, who: str, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{who} raised {kind}: {message}\n{trace}")
        self.who, self.kind, self.message, self.trace = who, kind, message, trace


class Lost(RuntimeError):  # noqa: N818
    """The process is gone. ``status`` is None if its exit status is unknown; ``stack`` is its last stack, if it could dump one."""

    def __init__(self, who: str, where: str, why: str, *, is_late: bool, status: int | None, stack: str) -> None:
        super().__init__(f"{who} ({where}) {why}" + (f"\nit was at\n{stack}" if stack else ""))
        self.who, self.where, self.why = who, where, why
        self.is_late, self.status, self.stack = is_late, status, stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended: a description, and the exit status from ``subprocess`` if there is one."""

    how: str
    status: int | None
    stack: str = ""  # dumped by the process


class Link(ABC):
    """A connection to a process: a socket pair, or a socket through a door (nodes/door.py). It also stops the process, and reports why
    it ended. Only ``end`` blocks."""

    pid: int
    where: str  # for messages

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(False)

    def fileno(self) -> int:
        return self.connection.fileno()

    @abstractmethod
    def end(self, *, grace_s: float, ask_stack: bool = False) -> Ending:
        """Hang up, wait ``grace_s`` for the process to exit, then kill it and all processes that it started. With ``ask_stack``, first
        make it dump its stack."""


class Call:
    """A call in progress."""

    def __init__(self, number: int, method: str, deadline_s: float, each: Callable[[Any], None] | None) -> None:
        self.number, self.method = number, method
        self._deadline_s, self._each = deadline_s, each
        self.waiter: asyncio.Future[None] | None = None
        self.is_done = False
        self._returned: Any = None
        self._error: BaseException | None = None
        self.restart()

    def restart(self) -> None:
        self._until_s = running_s() + self._deadline_s

    @property
    def left_s(self) -> float:
        return self._until_s - running_s()

    def take_part(self, value: Any) -> None:
        self.restart()
        if self._each is not None:
            self._each(value)

    def finish(self, returned: Any = None, error: BaseException | None = None) -> None:
        self.is_done, self._returned, self._error = True, returned, error
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._returned


class Worker:
    """The handle for one process. ``answers`` contains a decoder for each method, which decodes the method's answer and the answer's
    parts. A process may send anything, so its messages are never unpickled."""

    def __init__(
        self,
        link: Link,
        *,
        name: str,
        answers: Mapping[str, Reader],
        hears: Body = PICKLE,
        longest: int = LONGEST,
        line: DebugLine | None = None,
    ) -> None:
        self.name = name
        self.link = link
        self.line = line
        self._hears, self._answers = hears, answers
        self._frames = Frames(longest)
        self._outbox = bytearray()
        self._calls: dict[int, Call] = {}
        self._dropped: set[int] = set()  # calls that nobody is waiting for any longer
        self._num_calls = self._num_waiting = 0
        self._gone = ""  # why the process can no longer answer; empty: it can
        self._interrupted: BaseException | None = None  # raised while the user was at the prompt
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that watches it
        self._is_line_watched = line is not None
        self._ending = threading.Lock()
        self._ended: Ending | None = None
        self._is_late = False

    @property
    def pid(self) -> int:
        return self.link.pid

    @property
    def is_lost(self) -> bool:
        return bool(self._gone)

    async def call(self, method: str, *args: Any, deadline_s: float, each: Callable[[Any], None] | None = None) -> Any:
        """Call a method and await its result. ``each`` is called with every part of the answer, and raises ValueError if a part is
        invalid. If the call is cancelled, the process still finishes it."""
        call = self._begin(method, args, deadline_s, each)
        try:
            return await self.result_of(call)
        finally:
            self._forget(call)

    async def result_of(self, call: Call) -> Any:
        """Await the result of a call that has begun. It can be awaited again after a cancellation."""
        loop = asyncio.get_running_loop()
        assert self._loop in (None, loop), f"{self.name} is called from two event loops at once"
        self._num_waiting += 1
        try:
            while True:
                self._pump()
                if call.is_done:
                    self._forget(call)
                    return call.result()
                if self._gone or self._is_too_late(call):
                    self._unwatch()
                    self._wake_all()
                    raise await asyncio.to_thread(self._lose)
                self._watch(loop)
                call.waiter = loop.create_future()
                await asyncio.wait({call.waiter}, timeout=self._look_s(call))
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._unwatch()

    def ask(self, method: str, *args: Any, deadline_s: float, each: Callable[[Any], None] | None = None) -> Any:
        """Call a method like ``call``, but block this thread until the result is available."""
        return self.wait(self.begin(method, *args, deadline_s=deadline_s, each=each))

    def begin(self, method: str, *args: Any, deadline_s: float, each: Callable[[Any], None] | None = None) -> Call:
        """Begin a call. ``wait`` returns its result. When this returns, the process has received the call or will never receive it."""
        call = self._begin(method, args, deadline_s, each)
        self._block(call, lambda: not self._outbox, None, deadline_s)
        return call

    def wait(self, call: Call, *, meanwhile: Callable[[float], None] | None = None, every_s: float = 10.0) -> Any:
        """Wait in this thread for the result. ``meanwhile`` is called every ``every_s`` seconds with the number of seconds waited."""
        try:
            self._block(call, lambda: False, meanwhile, every_s)
            if not call.is_done:
                raise self._lose()
            return call.result()
        finally:
            self._forget(call)

    async def end(self, *, grace_s: float = 0.0) -> Ending:
        """Stop the process and all processes that it started, after ``grace_s`` for it to exit by itself."""
        self._leave()
        return await asyncio.to_thread(self._end, grace_s=grace_s)

    def close(self, *, grace_s: float = 0.0) -> Ending:
        """Stop the process like ``end``, but block this thread until it has ended."""
        self._leave()
        return self._end(grace_s=grace_s)

    def _begin(self, method: str, args: tuple[Any, ...], deadline_s: float, each: Callable[[Any], None] | None) -> Call:
        self._num_calls += 1
        call = Call(self._num_calls & 0xFFFFFFFF, method, deadline_s, each)
        self._outbox += frame(HEAD.pack(call.number, CALL) + self._hears.dumps((method, args)))
        self._calls[call.number] = call
        return call

    def _forget(self, call: Call) -> None:
        if self._calls.pop(call.number, None) is not None and not call.is_done:
            self._dropped.add(call.number)

    def _block(
        self, call: Call, is_enough: Callable[[], bool], meanwhile: Callable[[float], None] | None, every_s: float
    ) -> None:
        began_s = said_s = running_s()
        while True:
            self._pump()
            if call.is_done or self._gone or is_enough() or self._is_too_late(call):
                return
            poll = select.poll()  # `select.select` refuses descriptors from 1024 on
            poll.register(self.link.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0))
            if self._is_line_watched and self.line is not None:
                poll.register(self.line.fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(1000 * min(self._look_s(call), every_s))}
            if self._is_line_watched and self.line is not None and self.line.fd in ready:
                self._is_line_watched = self.line.answer()
                self._restart_all()
            if meanwhile is not None and running_s() - said_s >= every_s:
                said_s = running_s()
                meanwhile(said_s - began_s)

    def _is_too_late(self, call: Call) -> bool:
        if self.line is not None and self.line.is_held:
            self._restart_all()
            return False
        if call.left_s > 0:
            return False
        self._gone, self._is_late = f"has not answered {call.method} within {call._deadline_s:g} s", True
        return True

    def _look_s(self, call: Call) -> float:
        is_held = self.line is not None and self.line.is_held
        return min(max(call.left_s, 0.0) + 0.001, _HELD_LOOK_S if is_held else _LONGEST_LOOK_S)

    def _pump(self) -> None:
        """Write and read as much as possible without waiting."""
        if self._interrupted is not None:
            error, self._interrupted = self._interrupted, None
            raise error
        if self._gone:
            return
        before = len(self._outbox)
        try:
            while self._outbox:
                with memoryview(self._outbox) as data:
                    count = self.link.connection.send(data)
                del self._outbox[:count]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()  # the process is gone; the reads below notice that too, once they have received all that it sent
        if len(self._outbox) < before:
            self._restart_all()
        try:
            for _ in range(64):  # a process that writes endlessly must not block this process
                if not (data := self.link.connection.recv(1 << 18)):
                    self._is_gone(_DIED)
                    break
                for message in self._frames.feed(data):
                    self._take(message)
        except BlockingIOError:
            pass
        except OSError:  # also when the kernel declares the process's node dead
            self._is_gone(_DIED)
        except (ValueError, RecursionError):
            self._is_gone("sent an invalid message")

    def _is_gone(self, why: str) -> None:
        self._gone = why
        self._wake_all()

    def _restart_all(self) -> None:
        for call in self._calls.values():
            call.restart()

    def _wake_all(self) -> None:
        for call in self._calls.values():
            call.wake()

    def _take(self, message: bytes) -> None:
        if len(message) < HEAD.size:
            raise ValueError("the message is shorter than its header")
        number, kind = HEAD.unpack_from(message)
        call = self._calls.get(number)
        if call is None or call.is_done:
            if number not in self._dropped:
                raise ValueError("the message answers no call")
            if kind != PART:
                self._dropped.remove(number)
            return
        body = message[HEAD.size :]
        if kind == PART:
            call.take_part(self._answers[call.method](body))
        elif kind == DONE:
            call.finish(self._answers[call.method](body))
        elif kind == RAISED:
            call.finish(error=Raised(self.name, *map(visible, _texts(body))))
        else:
            raise ValueError("unknown kind of message")

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the event loop wake the waiting calls when the connection becomes readable or writable."""
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self.link.fileno(), self._on_ready)
            if self._is_line_watched and self.line is not None:
                loop.add_reader(self.line.fd, self._on_stop)
        if self._outbox:
            loop.add_writer(self.link.fileno(), self._on_ready)
        else:
            loop.remove_writer(self.link.fileno())

    def _unwatch(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        loop.remove_reader(self.link.fileno())
        loop.remove_writer(self.link.fileno())
        if self.line is not None and self.line.fd >= 0:
            loop.remove_reader(self.line.fd)

    def _on_ready(self) -> None:
        self._pump()
        if self._loop is not None and not self._outbox:
            self._loop.remove_writer(self.link.fileno())

    def _on_stop(self) -> None:
        """Handle a stop in the debugger. If this process has a terminal, the prompt opens there at once, and everything else waits."""
        assert self.line is not None and self._loop is not None
        self._loop.remove_reader(self.line.fd)
        try:
            self._is_line_watched = self.line.answer()
        except BaseException as error:  # noqa: BLE001 - the terminal was closed or Ctrl-C was pressed; the calls raise the error
            self._interrupted = error
            self._wake_all()
        else:
            self._restart_all()  # a porter is about to report that the process has stopped in the debugger
            if self._is_line_watched and self._loop is not None:
                self._loop.add_reader(self.line.fd, self._on_stop)

    def _leave(self) -> None:
        self._unwatch()
        self._is_gone(self._gone or "was ended by this process")

    def _lose(self) -> Lost:
        has_died = self._gone == _DIED
        ending = self._end(grace_s=EXIT_S if has_died else 0.0)
        why = f"{self._gone} ({ending.how})" if has_died else self._gone
        return Lost(self.name, self.link.where, why, is_late=self._is_late, status=ending.status, stack=ending.stack)

    def _end(self, *, grace_s: float) -> Ending:
        with self._ending:
            if self._ended is None:
                self._ended = self.link.end(grace_s=grace_s, ask_stack=self._is_late)
                if self.line is not None:
                    self.line.close()
            return self._ended


def reader(kind: Any) -> Reader:
    """Return a function that parses JSON, validates it against this type and raises ValueError if it is invalid."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
    return adapter.validate_json


_texts = reader(tuple[str, str, str])  # an error's class, message and traceback
