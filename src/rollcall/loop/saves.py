"""The checkpoint that is being written while the run goes on: at most one.

``begin`` returns at once. ``settle`` waits for the checkpoint and says so; the next save calls it, and the end of the run.
``poll`` never waits. Both return a checkpoint once, when it is committed, and raise what its save raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from rollcall.errors import CheckpointError
from rollcall.loop.aside import start
from rollcall.stop import heeded
from rollcall.wait import Wait

FIRST_WORD_S = 1.0  # a wait shorter than this is not worth a message
LOOK_S = 0.5
LONGEST_S = 6 * 3600.0  # for one checkpoint; a terabyte over a slow network takes two hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    step: int
    path: Path


class Saves:
    def __init__(self) -> None:
        self._under_way: tuple[int, Future[Path]] | None = None
        self._lock = threading.Lock()  # the loop looks, and the next save waits, in threads of their own

    def begin(self, step: int, save: Callable[[], Path]) -> None:
        """``save`` writes and commits; it runs in a thread."""
        assert self._under_way is None, "settle comes first"
        self._under_way = step, start(save)

    def poll(self) -> Saved | None:
        """None: nothing is under way, or it still is."""
        with self._lock:
            if self._under_way is None or not self._under_way[1].done():
                return None
            (step, save), self._under_way = self._under_way, None
        return Saved(step=step, path=save.result())

    def settle(self) -> Saved | None:
        """Wait for what is under way; None: nothing is. CheckpointError if it takes longer than any disk needs."""
        if (under_way := self._under_way) is None:
            return None
        step, save = under_way
        word, deadline = Wait(first_s=FIRST_WORD_S), time.monotonic() + LONGEST_S
        while not save.done():
            word.tell(f"waiting for the checkpoint of step {step}, which is still being written")
            wait([save], timeout=min(word.until_word_s, LOOK_S))
            if heeded().is_interrupted:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the checkpoint of step {step} is not written after a wait of {LONGEST_S / 3600:,.1f} hours: the disk, or a node "
                    "that writes its part, does not answer; see whether checkpoint files can be written there, then start the run "
                    "again: it goes on from the newest whole checkpoint"
                )
        saved = self.poll()
        save.result()  # raises here too, if a look at the same moment was told of the failure
        return saved
