"""A command that a launcher runs through a connection, and that must not outlive it.

While the block runs, stdin is read. Its end means that the launcher is gone or has changed its mind. The command and what it
runs are then interrupted, as a terminal does on Ctrl-C, and remove what they began.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rollcall.errors import ClusterError


@contextmanager
def tied_to_stdin() -> Iterator[None]:
    try:
        os.fstat(0)
    except OSError:  # another file could get its number
        raise ClusterError("--tied ends the command with its stdin, and stdin is closed; give it one") from None
    done = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            continue
        if not done.is_set():
            os.killpg(0, signal.SIGINT)

    # A shell starts a command in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=watch, name="stdin", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
