"""The keyboard's echo while a panel is on the screen."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

try:
    import termios
except ImportError:  # no such terminal here
    termios = None


class QuietKeys:
    """Until ``close``, Ctrl-C does not write ``^C``: at the right edge of a panel it would begin a line, and what then
    erases the panel would miss one. Does nothing if stdin is not a terminal or this process is in the background."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None
        self._fd = -1
        if termios is None or not _in_foreground():
            return
        with contextlib.suppress(termios.error, OSError):
            self._fd = sys.stdin.fileno()
            before = termios.tcgetattr(self._fd)
            quiet = [*before]
            quiet[3] &= ~termios.ECHOCTL
            termios.tcsetattr(self._fd, termios.TCSANOW, quiet)
            self._before = before

    def close(self) -> None:
        before, self._before = self._before, None
        if before is None or termios is None or not _in_foreground():
            return
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(self._fd, termios.TCSANOW, before)


def _in_foreground() -> bool:
    """A process in the background that changes its terminal is stopped."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False
