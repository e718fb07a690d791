"""Runs in a child process, started as ``python -m rollcall.process.child MODULE:CLASS SOCKET LIFELINE CRASH FD...``.

Creates an object of the class from the descriptors FD..., and calls its methods one at a time, as the parent requests. If a method is a
generator, each value that it yields is sent at once, and its return value at the end. The class may choose how messages are encoded:
calls are pickles (``hears``) and answers are JSON (``says``), unless it sets a different Body.

SOCKET carries the calls and the answers, so output of user code cannot mix with them. LIFELINE is the read end of a
pipe that closes only when the parent dies. CRASH is a file for stack dumps. This file uses only the standard library.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import inspect
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Collection
from functools import partial
from types import TracebackType
from typing import Any

from rollcall.nodes.framing import CALL, DONE, HEAD, JSON, PART, PICKLE, RAISED, Body, frame, read_exactly, read_frame

STACK_SIGNAL = signal.SIGUSR1
MAX_WHY = 20_000  # characters of a traceback


def main(arguments: list[str]) -> None:
    target, *fds = arguments
    socket_fd, lifeline_fd, crash_fd, *others = map(int, fds)
    end_with(lifeline_fd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # buffered output is lost when a process is killed
    dump_stacks_to(crash_fd)
    # If every process of a run gets a stop signal, only the controller acts on it, because it still needs the answers. This sets a
    # handler instead of ignoring the signal, because processes that user code starts would inherit the ignored signal.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    for fd in (socket_fd, lifeline_fd, crash_fd, *others):
        os.set_inheritable(fd, False)  # processes started by user code must not keep them open
    module, _, name = target.partition(":")
    serve(socket_fd, getattr(importlib.import_module(module), name)(*others))


def own_fds() -> tuple[int, int, int]:
    """Return this process's socket, lifeline and file for stack dumps."""
    socket_fd, lifeline_fd, crash_fd = map(int, sys.argv[2:5])
    return socket_fd, lifeline_fd, crash_fd


def serve(fd: int, target: Any) -> None:
    """Answer calls to the methods of ``target`` until the parent hangs up. This uses only read and write, because a confined process
    may do nothing else with a socket."""
    hears: Body = getattr(target, "hears", PICKLE)
    says: Body = getattr(target, "says", JSON)
    own_pid = os.getpid()
    read = partial(read_exactly, partial(os.read, fd))

    def say(number: int, kind: int, body: bytes) -> None:
        if os.getpid() != own_pid:
            # User code forked this process, and this is the forked copy. The parent would take its answer for the answer to another call.
            os._exit(1)
        data = memoryview(frame(HEAD.pack(number, kind) + body))
        try:
            while data:
                data = data[os.write(fd, data) :]
        except ConnectionError:
            os._exit(0)  # the parent has hung up

    while True:
        try:
            message = read_frame(read)
        except ConnectionError:
            return
        number, kind = HEAD.unpack_from(message)
        assert kind == CALL, "a parent sends only calls"
        try:
            method, arguments = hears.loads(message[HEAD.size :])
            returned = getattr(target, method)(*arguments)
            while inspect.isgenerator(returned):
                try:
                    say(number, PART, says.dumps(next(returned)))
                except StopIteration as stop:
                    returned = stop.value
            body = says.dumps(returned)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, even SystemExit
            say(number, RAISED, raised_body(error))
        else:
            say(number, DONE, body)


def raised_body(error: BaseException) -> bytes:
    """Encode the class, message and traceback of an error."""
    shown = "".join(traceback.format_exception(error)).rstrip()
    return JSON.dumps([type(error).__name__, cut(str(error)), cut(shown)])


def user_error(error: BaseException, *, own_files: Collection[str], memory_mb: int) -> tuple[TracebackType | None, str]:
    """Return the traceback of an error in user code, as an object and as text. It begins at the first frame of the user's code, because
    our own frames do not help the user."""
    frames = error.__traceback__
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file not in own_files and f"{os.sep}asyncio{os.sep}" not in file:
            break
        frames = frames.tb_next
    if isinstance(error, MemoryError):
        error = MemoryError(f"{error} (this process is limited to memory_mb={memory_mb})".strip())
    return frames, "".join(traceback.format_exception(type(error), error, frames))


def cut(text: str, longest: int = MAX_WHY) -> str:
    """Cut the middle out of a long string: a traceback's beginning shows where the call came from, and its end shows the error."""
    return text if len(text) <= longest else f"{text[: longest // 2]}\n...\n{text[-longest // 2 :]}"


def dump_stacks_to(fd: int) -> None:
    """Dump the stacks to this file when the process crashes, and when its parent asks where it hangs."""
    faulthandler.enable(fd)
    faulthandler.register(STACK_SIGNAL, fd)


def end_with(lifeline_fd: int) -> None:
    """Make the kernel kill this process, and its group if it leads one, when the lifeline closes. The lifeline is the read end of a
    pipe; only the parent has the other end.

    While user code hangs inside C (a runaway regular expression), no Python thread or signal handler can run. A parent-death signal does
    not work either, because the kernel sends it when the parent's thread exits, not when its process exits.
    """
    pid = os.getpid()
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -pid if os.getpgrp() == pid else pid)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:  # it closed before this process requested the signal
        os._exit(1)


if __name__ == "__main__":
    # When run as a module, this file is `__main__`, but other modules need its definitions under the importable name.
    importlib.import_module("rollcall.process.child").main(sys.argv[1:])
