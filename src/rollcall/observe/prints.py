"""What child processes print, passed on to stderr: without secrets, and above a live panel while one is on the screen.

What this process prints goes through ``sys.stdout`` and ``sys.stderr``, which the command guards and a panel redirects. A child,
and what it starts itself, has a file descriptor. So it gets a pipe, and a thread here prints what comes out of it.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading

from rollcall.redact import LONGEST_LINE, cut_line, redact


class ChildPrints:
    """``fd`` is for a child's stdout and stderr. Not our stdout: that may be somebody's JSON."""

    def __init__(self) -> None:
        read_fd, self.fd = os.pipe()
        # A daemon that ends with the last child, so that the output of a child that outlives its owner is still printed.
        self._thread = threading.Thread(target=_pass_on, args=(read_fd,), name="child prints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self.fd)
        self._thread.join(timeout=0.5)  # if no child is left, its last output comes before what follows


def _pass_on(read_fd: int) -> None:
    held: list[str] = []  # of a line that has not ended
    num_held = 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with os.fdopen(read_fd, "rb", buffering=0) as source:
        while data := source.read(1 << 16):
            whole, newline, rest = decoder.decode(data).rpartition("\n")
            if newline:
                _print(redact("".join([*held, whole])))
                held, num_held = [], 0
            held.append(rest)
            num_held += len(rest)
            if num_held > LONGEST_LINE:
                shown, kept = cut_line("".join(held))
                _print(shown)
                held, num_held = [kept], len(kept)
    if num_held:
        _print(redact("".join(held)))


def _print(text: str) -> None:
    # Carriage returns are of progress bars, which only work at the left edge of their own line.
    print(text.replace("\r\n", "\n").replace("\r", "\n"), file=sys.stderr, flush=True)
