"""The last lines that each worker in a run has printed: ``run_dir/logs/``, one short file per timeline lane.

On a cluster, a worker's full output is in a file on its own node (``ProcessState.log``). The controller gets the newest lines
with the worker's regular status. They are redacted before they are written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rollcall.base.atomic import write_atomic
from rollcall.base.redact import redact

LOGS = "logs"
MOST_BYTES, KEPT_BYTES = 128 << 10, 64 << 10  # a file that exceeds the first is cut to the second
LINES, LONGEST_LINE = 50, 2000  # lines to show, and characters per line


def log_path(run_dir: Path, lane: str) -> Path:
    return Path(run_dir) / LOGS / f"{re.sub('[^a-z0-9]+', '-', lane.lower()).strip('-')[:100] or 'worker'}.log"


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
