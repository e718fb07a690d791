"""Passes what child processes print on to stderr: without secrets, and above a live panel while one is on the screen.

What this process prints goes through ``sys.stdout`` and ``sys.stderr``, which the command guards and a panel redirects. A child,
and what it starts itself, writes to a file descriptor. So it gets a pipe, and a thread here prints what comes out of it.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import threading

from rollcall.base.redact import Redactor


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
    redactor = Redactor()
    # Carriage returns become line ends: a progress bar only works at the left edge of its own line.
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    with os.fdopen(read_fd, "rb", buffering=0) as source:
        while data := source.read(1 << 16):
            _print(redactor.feed(decoder.decode(data)))
    _print(redactor.end())


def _print(text: str) -> None:
    if text:
        print(text, end="" if text.endswith("\n") else "\n", file=sys.stderr, flush=True)
