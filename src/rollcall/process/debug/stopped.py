"""The debugger in the process that stops: plain pdb at the process's own terminal, or pdb over a line to a porter.

``breakpoint()`` calls the process's hook (``here.py``), and an exception calls the same debugger's ``post_mortem``. The stopped
thread waits at the prompt while the other threads run. The messages on a line:

    {"stopped": {file, line, function, why}}   a prompt opens           {"attach": true}   a terminal has attached: show the position
    {"here": true}                             answers "attach": the next messages are for that terminal
    {"text": ...}, {"prompt": ...}             pdb's output and prompt  {"line": ...}      a line that somebody typed
    {"left": true}                             `quit`: the terminal may disconnect, and the thread keeps waiting
    {"goes": true}                             the thread continues
"""

from __future__ import annotations

import io
import os
import pdb
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from traceback import format_exception_only, walk_tb
from types import FrameType, TracebackType
from typing import Any

from rollcall.base.stop import Stopped, heeded
from rollcall.nodes.framing import json_frame, read_exactly, read_json_frame
from rollcall.process.pause import paused

PIECE = 1 << 16  # characters of text in one message
LEFT = "The worker keeps waiting. To let it run, attach again with `rollcall debug` and type `continue`."
_one = threading.RLock()  # only one prompt at a time in a process
_lenders: list[Callable[[], AbstractContextManager[None]]] = []


def has_terminal() -> bool:
    """Return whether a user can type at this process: stdin and stdout are terminals, and it runs in the foreground."""
    try:
        return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def lend_terminal(lender: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Register a context manager that is entered while a prompt is on the screen. Return a function that removes it again."""
    _lenders.append(lender)
    return partial(_lenders.remove, lender)


@contextmanager
def borrowed_terminal() -> Iterator[None]:
    """Hide the panels on the screen, and let Ctrl-C interrupt only the prompt."""
    with ExitStack() as opened:
        for lender in list(_lenders):
            opened.enter_context(lender())
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            opened.callback(lambda: signal.signal(signal.SIGINT, before or signal.SIG_DFL))
        yield


class _Debugger(pdb.Pdb):
    """The base class of both debuggers. A signal that stops the run also ends the prompt, and is raised where the thread stopped."""

    def __init__(self, **streams: Any) -> None:
        # Ctrl-C after `continue` stops the run as usual; pdb's own handler would open the debugger again.
        super().__init__(nosigint=True, skip=["rollcall.process.debug.*"], **streams)
        self._heard: BaseException | None = None
        self._ends_prompt: type[BaseException] = Stopped
        self._error: BaseException | None = None  # the exception that post_mortem examines
        self._is_open = False
        self._only: FrameType | None = None  # the frame that called breakpoint(), until the prompt opens

    def stop(self, caller: FrameType | None) -> None:
        """Stop where ``breakpoint()`` was called. Code that is run at a prompt does not stop again, because the prompt's frames would be
        lost."""
        if self._is_open:
            self.message(
                "a breakpoint() in code that you evaluate at the prompt is ignored; use `debug f()` to step into a call"
            )
            return
        self._only = caller
        self.set_trace(caller)  # must be the last statement of this function, because any code after it is traced

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether to stop in ``frame``. Only the caller's frame counts, because the garbage collector may call some function
        before the caller's next line."""
        return (self._only is None or frame is self._only) and super().stop_here(frame)

    @contextmanager
    def _open(self) -> Iterator[None]:
        self._is_open, self._only = True, None
        try:
            yield
        finally:
            self._is_open = False

    def cmdloop(self, intro: Any = None) -> None:
        try:
            with heeded().at_prompt():
                super().cmdloop(intro)
        except self._ends_prompt as heard:
            self._heard = heard

    def post_mortem(self, error: BaseException) -> None:
        """Open a prompt at the frame that raised the error, and return when the user leaves it."""
        self._error = error
        self.reset()
        try:
            self.interaction(None, error.__traceback__)
        finally:
            self._error = None

    def _tell_error(self) -> None:
        if self._error is not None:
            self.message("".join(format_exception_only(self._error)).rstrip())

    def _raise_heard(self) -> None:
        heard, self._heard = self._heard, None
        if heard is None:
            return
        self.set_continue()
        if isinstance(heard, Stopped) and heeded().num_shields:
            return  # a checkpoint is being written: it is completed, and the run stops after it
        raise heard

    def do_run(self, arg: str) -> None:
        """Refuse to restart the process, because the run itself restarts it if necessary."""
        self.error("a process of a run cannot be started again from its debugger")

    do_restart = do_run


class TerminalPdb(_Debugger):
    """pdb at this process's terminal. `quit` stops the run, as Ctrl-C does."""

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None = None, *rest: Any) -> None:
        with _one, paused(), borrowed_terminal(), self._open():
            self.stdout = sys.stdout  # while a panel is shown, sys.stdout is a different stream
            self._tell_error()
            super().interaction(frame, traceback, *rest)
        self._raise_heard()

    def do_quit(self, arg: str) -> bool:
        """q(uit)
        Stop the run, as Ctrl-C does. Run the same command again to continue it.
        """
        if self._error is None:
            asked = heeded().asked  # the terminal was closed: SIGHUP, and the end of the input
            self._heard = KeyboardInterrupt() if asked is None else Stopped(asked)
        return True

    do_q = do_exit = do_EOF = do_quit


class LinePdb(_Debugger):
    """pdb that talks over a line with this file descriptor. ``around`` is entered while a prompt is open."""

    def __init__(self, fd: int, *, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._talk = _Talk(fd, introduce=self._introduce)
        self._around = around
        super().__init__(stdin=self._talk, stdout=self._talk, readrc=False)  # a worker's directory is not the user's
        self._ends_prompt = KeyboardInterrupt
        self._goes_on = False

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None = None, *rest: Any) -> None:
        with _one, paused(), self._around(), self._open():
            self._goes_on = self._error is not None
            self._talk.say(stopped=self._place(frame, traceback))
            self._tell_error()
            super().interaction(frame, traceback, *rest)
            if self._goes_on or self._heard is not None:
                self._talk.say(goes=True)
        self._raise_heard()

    def _place(self, frame: FrameType | None, traceback: TracebackType | None) -> dict[str, Any]:
        why = "breakpoint" if self._error is None else format_exception_only(self._error)[-1].strip()
        *_, (where, line) = walk_tb(traceback) if frame is None else [(frame, frame.f_lineno)]
        return dict(file=where.f_code.co_filename, line=line, function=where.f_code.co_name, why=why)

    def _introduce(self) -> None:
        self._tell_error()
        if self.stack:
            self.print_stack_entry(self.stack[self.curindex])

    def do_continue(self, arg: str) -> Any:
        """c(ont(inue))
        Continue the run. The next breakpoint() stops again.
        """
        self._goes_on = True
        return super().do_continue(arg)

    do_c = do_cont = do_EOF = do_continue  # EOF: the line is closed, and no terminal can attach any longer

    def do_quit(self, arg: str) -> None:
        """q(uit)
        Leave the debugger. The worker keeps waiting; to let it run, type `continue` instead, or attach again later.
        """
        self.message(LEFT)
        self._talk.say(left=True)

    do_q = do_exit = do_quit

    def do_interact(self, arg: str) -> None:
        """interact
        Start an interactive interpreter with the names of this frame; exit() returns to the debugger.
        """
        before = sys.stdin, sys.stdout, sys.stderr
        sys.stdin = sys.stdout = sys.stderr = self._talk  # type: ignore[assignment]
        try:
            super().do_interact(arg)
        except SystemExit:
            self.message("back in the debugger")
        finally:
            sys.stdin, sys.stdout, sys.stderr = before


class _Talk(io.TextIOBase):
    """pdb's streams. Once pdb reads input, the text after the last newline is the prompt. They only read and write the line, because a
    confined process may do nothing else with a socket."""

    encoding = "utf-8"

    def __init__(self, fd: int, *, introduce: Callable[[], None]) -> None:
        self._fd = fd
        self._introduce = introduce
        self._tail = ""

    def say(self, **message: Any) -> None:
        data = memoryview(json_frame(message))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # the porter is gone; the next read reports that
            return

    def write(self, text: str) -> int:
        whole, newline, self._tail = (self._tail + text).rpartition("\n")
        shown = whole + newline
        for begin in range(0, len(shown), PIECE):
            self.say(text=shown[begin : begin + PIECE])
        return len(text)

    def close(self) -> None:
        """Keep the line open, because `exit()` in an interpreter closes standard input."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        prompt, self._tail = self._tail[-PIECE:], ""
        self.say(prompt=prompt)
        while True:
            try:
                heard = read_json_frame(partial(read_exactly, partial(os.read, self._fd)))
            except OSError:
                return ""
            if "line" in heard:
                return f"{heard['line']}\n"
            if "attach" in heard:
                self.say(here=True)
                self._introduce()
                self.say(prompt=prompt)
