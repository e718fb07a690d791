"""Whether another process lives, seen by a counter that it advances in a shared file.

It is judged on this process's clock: the time of a file and the clock of another host mean nothing here.
"""

from __future__ import annotations

import time


class Heartbeat:
    """The counter of one process at a time. ``see`` takes what was read; with a new owner it begins again."""

    def __init__(self) -> None:
        self.has_moved = False  # since its owner was first seen
        self._seen: tuple[str | None, int | None] = (None, None)
        self._since = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Since it moved, or since its owner was first seen."""
        return time.monotonic() - self._since

    def see(self, owner: str, counter: int) -> None:
        if (owner, counter) != self._seen:
            self.has_moved = owner == self._seen[0]
            self._seen, self._since = (owner, counter), time.monotonic()
