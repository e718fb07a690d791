"""The child's end of a line: stops at ``breakpoint()`` and exceptions in user code; the parent provides a terminal (debug/here.py).

Imports only the standard library, and the debugger only at the first stop, because reward and environment processes must start fast.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any


class Examined:
    """Places where exceptions have opened the debugger. Processes forked from its creator share it, so an error that occurs in all of
    them opens the debugger only once."""

    def __init__(self) -> None:
        self._entries = memoryview(mmap.mmap(-1, 8 * 512)).cast("q")

    def is_new(self, frames: TracebackType, kind: type) -> bool:
        """Return whether this kind of error is new at the line that raised it, and record it."""
        while frames.tb_next is not None:
            frames = frames.tb_next
        place = (frames.tb_frame.f_code.co_filename, frames.tb_lineno, kind.__qualname__)
        entry = hash(place) or 1  # forked processes compute the same hash
        for at, found in enumerate(self._entries):
            if found in (0, entry):
                self._entries[at] = entry
                return not found
        return False


class ChildLine:
    """Stops user code in a child process. ``around`` is the context of each prompt. ``of`` names the process's owner in messages."""

    def __init__(
        self,
        fd: int,
        *,
        of: str,
        examined: Examined | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._fd = fd
        self._of = of
        self._examined = examined or Examined()
        self._around = around
        self._pid = os.getpid()
        self._own = threading.local()  # the thread's debugger, which keeps the frames where the thread stopped

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Handle ``breakpoint()``. A breakpoint in code that is not in a file is ignored, because a model wrote that code."""
        caller = sys._getframe().f_back
        if os.getpid() != self._pid or caller is None or not os.path.exists(caller.f_code.co_filename):
            print(f"a breakpoint() that is not in a file of this {self._of} is ignored", file=sys.stderr)
            return
        self._open().stop(caller)  # must be the last statement of this function, because any code after it is traced

    def examine(self, error: BaseException) -> None:
        """Open the debugger where this exception was raised, once per line and kind of error."""
        frames = error.__traceback__
        if frames is None or not isinstance(error, Exception) or os.getpid() != self._pid:
            return
        if self._examined.is_new(frames, type(error)):
            self._open().post_mortem(error)

    def _open(self) -> Any:
        from rollcall.process.debug.stopped import LinePdb

        if not hasattr(self._own, "debugger"):
            self._own.debugger = LinePdb(self._fd, around=self._around)
        return self._own.debugger
