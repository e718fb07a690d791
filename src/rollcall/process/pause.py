"""Measures the time that this process has spent at a debugger's prompt. This time does not count towards a run's time limits.

This file uses only the standard library, because every reward and environment process imports it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_total_s = 0.0
_since: list[float] = []  # when each open prompt was opened


def is_paused() -> bool:
    return bool(_since)


def running_s() -> float:
    """Read a clock that stops while a prompt is open."""
    with _lock:
        now = time.monotonic()
        return now - _total_s - sum(now - since for since in _since)


@contextmanager
def paused() -> Iterator[None]:
    """Stop the clock during the block because a prompt is open."""
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
    """Create an event loop whose clock stops while a prompt is open, so that its timers are not overdue afterwards."""
    import asyncio  # imported late: few processes need it, and processes must start fast

    loop = asyncio.new_event_loop()
    loop.time = running_s  # type: ignore[method-assign]
    return loop
