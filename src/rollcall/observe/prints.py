"""Forwards the output of child processes to stderr, redacted and above the live panel if there is one.

This process prints through ``sys.stdout`` and ``sys.stderr``, which the command redacts and a panel redirects. A child and its own
children write to a file descriptor instead. So they get a pipe, and a thread here prints what comes out of it.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import threading

from rollcall.base.redact import Redactor


class ChildPrints:
    """``fd`` is for a child's stdout and stderr. We do not use our stdout, because it may carry JSON for another program."""

    def __init__(self) -> None:
        read_fd, self.fd = os.pipe()
        # A daemon thread that ends with the last child, so that a child that outlives its owner can still print.
        self._thread = threading.Thread(target=_pass_on, args=(read_fd,), name="child prints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self.fd)
        self._thread.join(timeout=0.5)  # if no child is left, print its last output before anything else


def _pass_on(read_fd: int) -> None:
    redactor = Redactor()
    # Turn carriage returns into newlines, because a progress bar needs a line of its own.
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    with os.fdopen(read_fd, "rb", buffering=0) as source:
        while data := source.read(1 << 16):
            _print(redactor.feed(decoder.decode(data)))
    _print(redactor.end())


def _print(text: str) -> None:
    if text:
        print(text, end="" if text.endswith("\n") else "\n", file=sys.stderr, flush=True)
