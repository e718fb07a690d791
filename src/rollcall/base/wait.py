"""Prints messages for the user (``say``), and during a wait regularly reports what the process is waiting for.

A process has one output channel (voice). It is stderr, unless a block changes it with ``speaking``; a run's console, for example, prints
through its panel. Messages that the user needs even in a quiet run are warnings (``warn``). They go to the logger ``rollcall``, which the
calling program may redirect.

A process records what it is waiting for (``waiting``). A controller copies this to its lease file, from which `rollcall status` reads it.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

Say = Callable[[str], None]
SHORTEST_S = 0.001  # a socket treats a timeout of 0 as "do not wait"


def on_stdout(text: str) -> None:
    print(text, flush=True)


def in_silence(text: str) -> None:
    return None


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_voice: Say = _on_stderr  # not stdout, which may contain JSON output


def say(text: str) -> None:
    """Print a line for the user."""
    _voice(text)


def is_silent() -> bool:
    """Whether output is turned off. Libraries must be silent then too."""
    return _voice is in_silence


def warn(text: str) -> None:
    logging.getLogger("rollcall").warning("%s", text)


@contextmanager
def speaking(voice: Say) -> Iterator[None]:
    """While the block runs, send the messages of all threads in this process to ``voice``."""
    global _voice
    before, _voice = _voice, voice
    try:
        yield
    finally:
        _voice = before


class Wait:
    """A wait that begins when the object is created. ``tell`` prints first after ``first_s``, then every ``every_s`` seconds. ``stalls``
    means that the run makes no progress meanwhile, so `rollcall status` shows the wait. Pass False for work that is only slow."""

    def __init__(
        self, timeout_s: float = math.inf, *, first_s: float = 2.0, every_s: float = 10.0, stalls: bool = True
    ) -> None:
        self.timeout_s = timeout_s
        self.what = ""
        self._stalls = stalls
        self._noted = -math.inf
        self._began = time.monotonic()
        self._next = self._began + first_s
        self._every_s = every_s

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        return max(self.timeout_s - self.waited_s, SHORTEST_S)

    @property
    def is_over(self) -> bool:
        return self.waited_s >= self.timeout_s

    @property
    def is_word_due(self) -> bool:
        return time.monotonic() >= self._next

    @property
    def until_word_s(self) -> float:
        """Seconds until ``tell`` prints the next message or the time is up."""
        return max(min(self._next - time.monotonic(), self.left_s), SHORTEST_S)

    def excuse(self, seconds: float) -> None:
        """Exclude this many seconds from the wait, because a debugger had stopped the awaited process."""
        self._began += seconds
        self._next += seconds

    def note(self, text: str) -> None:
        """Record the current wait for ``waiting``. Repeat the call while the wait lasts; otherwise the record expires."""
        self.what, self._noted = text, time.monotonic()
        with _lock:
            _waits.add(self)

    def tell(self, text: str) -> None:
        """Print what this process is waiting for, if a message is due."""
        if self._stalls and (self.is_word_due or self.what):
            self.note(text)
        if self.is_word_due:
            self._next = time.monotonic() + self._every_s
            waited_s = round(self.waited_s)
            say(f"{text} ({waited_s} s)" if waited_s else text)

    def again(self, text: str, *, after_s: float) -> bool:
        """Sleep before another check, and print the wait if a message is due. Returns False at once if the time is up."""
        if self.is_over:
            return False
        self.tell(text)
        time.sleep(min(after_s, self.left_s))
        return True


_waits: WeakSet[Wait] = WeakSet()  # in this process, in any thread
_lock = threading.Lock()


def waiting() -> tuple[str, float] | None:
    """Return this process's longest current wait and its start (unix time), or `None` if it is not waiting."""
    with _lock:
        found = [wait for wait in _waits if time.monotonic() - wait._noted < wait._every_s + 5]
    oldest = max(found, key=lambda wait: wait.waited_s, default=None)
    return None if oldest is None else (oldest.what, time.time() - oldest.waited_s)
