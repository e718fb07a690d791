"""Tells whether another process is alive, by a counter that it advances in a shared file.

Only this process's clock is used: file times and other hosts' clocks cannot be trusted.
"""

from __future__ import annotations

import time


class Heartbeat:
    """Watches one process's counter at a time. Pass each reading to ``see``; a new owner restarts the watch."""

    def __init__(self) -> None:
        self.has_moved = False  # since its owner was first seen
        self._seen: tuple[str | None, int | None] = (None, None)
        self._since = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the counter moved, or since its owner was first seen."""
        return time.monotonic() - self._since

    def see(self, owner: str, counter: int) -> None:
        if (owner, counter) != self._seen:
            self.has_moved = owner == self._seen[0]
            self._seen, self._since = (owner, counter), time.monotonic()
