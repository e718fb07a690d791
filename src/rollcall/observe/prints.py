"""Where child processes print: on stderr, or, while a live panel is on the screen, above it.

What this process prints goes through ``sys.stdout`` and ``sys.stderr``, which the panel redirects. A child has a file
descriptor and would write across the panel, so it gets a pipe, and a thread here prints what comes out of it.
"""

from __future__ import annotations

import os
import threading

from rollcall.wait import say

STDERR = 2
_fd = STDERR


def child_output() -> int:
    """The descriptor for a child's stdout and stderr. Not our stdout: that may be somebody's JSON."""
    return _fd


class ChildPrints:
    """From now until ``close``, children that start print through this process."""

    def __init__(self) -> None:
        global _fd
        read_fd, self._write_fd = os.pipe()
        _fd = self._write_fd
        # A daemon that ends with the last child, so that the output of a child that outlives the panel is still printed.
        self._thread = threading.Thread(target=_pass_on, args=(read_fd,), name="child prints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        global _fd
        if _fd == self._write_fd:
            _fd = STDERR
        os.close(self._write_fd)
        self._thread.join(timeout=0.5)  # if no child is left, its last output comes before what follows


def _pass_on(read_fd: int) -> None:
    held = b""
    with os.fdopen(read_fd, "rb", buffering=0) as source:
        while data := source.read(1 << 16):
            *lines, held = (held + data).split(b"\n")
            if lines:
                _print(b"\n".join(lines))
    if held:
        _print(held)


def _print(text: bytes) -> None:
    # Carriage returns are of progress bars, which only work at the left edge of their own line.
    shown = text.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    say(shown)
