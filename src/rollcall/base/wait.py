"""One way to speak to the user (``say``), and one way to wait: up to a time limit, saying now and then what for.

A process has one voice. It is on stderr, unless a block runs ``speaking`` otherwise: a run's console speaks through its panel.
What a user has to know even in a quiet run is a warning (``warn``). It goes to the logger ``rollcall``, which is a program's to
direct.

What a process waits for is known to it (``waiting``): the holder of a run directory writes it where `rollcall status` finds it.
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
SHORTEST_S = 0.001  # as a timeout, 0 means "do not wait" to a socket


def on_stdout(text: str) -> None:
    print(text, flush=True)


def in_silence(text: str) -> None:
    return None


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_voice: Say = _on_stderr  # not stdout, which may be somebody's JSON


def say(text: str) -> None:
    """A line for the user."""
    _voice(text)


def is_silent() -> bool:
    """Whether libraries have to be silent too."""
    return _voice is in_silence


def warn(text: str) -> None:
    logging.getLogger("rollcall").warning("%s", text)


@contextmanager
def speaking(voice: Say) -> Iterator[None]:
    """While the block runs, what any thread of this process says goes to ``voice``."""
    global _voice
    before, _voice = _voice, voice
    try:
        yield
    finally:
        _voice = before


class Wait:
    """Begins when it is made. ``tell`` speaks first after ``first_s``, then every ``every_s`` seconds. ``stalls``: nothing else
    happens meanwhile, so the status of a run shows it; work that takes its time does not stall."""

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
        """How long to wait at most before ``tell`` has something to say, or the time is over."""
        return max(min(self._next - time.monotonic(), self.left_s), SHORTEST_S)

    def excuse(self, seconds: float) -> None:
        """So much of what was waited does not count: a debugger held what is waited for."""
        self._began += seconds
        self._next += seconds

    def note(self, text: str) -> None:
        """Note the current wait. It counts while it is noted again and again, and while this object lives."""
        self.what, self._noted = text, time.monotonic()
        with _lock:
            _waits.add(self)

    @property
    def is_noted(self) -> bool:
        return time.monotonic() - self._noted < self._every_s + 5

    def tell(self, text: str) -> None:
        """Say what is waited for, if that is due."""
        if self._stalls and (self.is_word_due or self.what):
            self.note(text)
        if self.is_word_due:
            self._next = time.monotonic() + self._every_s
            waited_s = round(self.waited_s)
            say(f"{text} ({waited_s} s)" if waited_s else text)

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, self.left_s))

    def again(self, text: str, *, after_s: float) -> bool:
        """Whether to look again: says what is waited for, if that is due, and sleeps. False, at once: the time is over."""
        if self.is_over:
            return False
        self.tell(text)
        self.sleep(after_s)
        return True


_waits: WeakSet[Wait] = WeakSet()  # of this process, in any thread
_lock = threading.Lock()


def waiting() -> tuple[str, float] | None:
    """The longest current wait of this process, and since when (unix time); `None` if there is none."""
    with _lock:
        found = [wait for wait in _waits if wait.is_noted]
    oldest = max(found, key=lambda wait: wait.waited_s, default=None)
    return None if oldest is None else (oldest.what, time.time() - oldest.waited_s)
