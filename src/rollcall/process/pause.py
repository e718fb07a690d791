"""The time that this process has spent in a debugger's prompt. No limit of a run counts it.

Standard library only: every process of a reward and of an environment imports it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_total_s = 0.0
_since: list[float] = []  # of the prompts that are open


def is_paused() -> bool:
    return bool(_since)


def running_s() -> float:
    """A clock that does not run while a prompt is open."""
    with _lock:
        now = time.monotonic()
        return now - _total_s - sum(now - since for since in _since)


@contextmanager
def paused() -> Iterator[None]:
    """Stops the clock while the block runs: a prompt is open."""
    global _total_s
    began = time.monotonic()
    with _lock:
        _since.append(began)
    try:
        yield
    finally:
        with _lock:
            _since.remove(began)
            _total_s += time.monotonic() - began


def patient_loop() -> Any:
    """An event loop whose clock does not run while a prompt is open, so that nothing in it is late afterwards."""
    import asyncio  # few processes need it, and they have to start fast

    loop = asyncio.new_event_loop()
    loop.time = running_s  # type: ignore[method-assign]
    return loop
