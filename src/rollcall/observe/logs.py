"""Collects what processes print.

The output of child processes goes to stderr (``ChildPrints``). It is redacted, and appears above the live panel if there is one. This
process prints through ``sys.stdout`` and ``sys.stderr``, which the command redacts and a panel redirects. A child and its own children
write to a file descriptor instead. So they get a pipe, and a thread in this process prints what they write to it.

The last lines of each worker go to ``run_dir/logs/``, one short file per timeline lane. On a cluster, a worker's full output is in a
file on its own node (``ProcessState.log``). The controller gets the newest lines with the worker's regular status. They are redacted
before they are written.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from rollcall.base.atomic import write_atomic
from rollcall.base.redact import Redactor, redact

MOST_BYTES, KEPT_BYTES = 128 << 10, 64 << 10  # a file that exceeds the first size is cut to the second
LINES, LONGEST_LINE = 50, 2000  # lines to show, and characters per line


def log_path(run_dir: Path, lane: str) -> Path:
    return Path(run_dir) / "logs" / f"{re.sub('[^a-z0-9]+', '-', lane.lower()).strip('-')[:100] or 'worker'}.log"


def keep_logs(run_dir: Path, added: Mapping[str, bytes]) -> None:
    """Append the lines that workers have printed, by lane."""
    for lane, data in added.items():
        if not data:
            continue
        path = log_path(run_dir, lane)
        path.parent.mkdir(exist_ok=True)
        text = redact(data.decode(errors="replace")).encode()
        with path.open("ab") as file:
            file.write(text)
            size = file.tell()
        if size > MOST_BYTES:
            write_atomic(path, _end(path, KEPT_BYTES).partition(b"\n")[2], durable=False)


def read_log(run_dir: Path, lane: str, *, lines: int = LINES) -> list[str]:
    """Return the last lines of a worker's output, redacted; empty if it has printed nothing or is not on a cluster."""
    try:
        data = _end(log_path(run_dir, lane), KEPT_BYTES)
    except FileNotFoundError:
        return []
    return [line[:LONGEST_LINE] for line in data.decode(errors="replace").splitlines()[-lines:]]


def _end(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - count, 0))
        return file.read(count)


class ChildPrints:
    """Prints the output of child processes. Use ``fd`` as their stdout and stderr. The output goes to our stderr, as our stdout may
    contain JSON."""

    def __init__(self) -> None:
        read_fd, self.fd = os.pipe()
        # A daemon thread that runs until the last child has exited, so that a child can still print after ``close``.
        self._thread = threading.Thread(target=_pass_on, args=(read_fd,), name="child prints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self.fd)
        self._thread.join(timeout=0.5)  # if no child is left, print its last output before anything else


def _pass_on(read_fd: int) -> None:
    redactor = Redactor()
    # Turn carriage returns into newlines, because each state of a progress bar needs a separate line.
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    with os.fdopen(read_fd, "rb", buffering=0) as source:
        while data := source.read(1 << 16):
            _print(redactor.feed(decoder.decode(data)))
    _print(redactor.end())


def _print(text: str) -> None:
    if text:
        print(text, end="" if text.endswith("\n") else "\n", file=sys.stderr, flush=True)
