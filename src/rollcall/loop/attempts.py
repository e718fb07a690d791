"""Runs the attempts of a run: each attempt builds its workers and continues from the newest checkpoint and the journal.

If a process or a node is lost, the attempt ends, and the next attempt resumes the run. An error in a worker's own code would happen
again, so it ends the run, unless it only reports that another worker is lost. The run also ends if processes or nodes are lost more often
than the budget allows; the message contains the last reason and the first traceback. If all roles are in this process, no process can be
lost while the run continues, so there is only one attempt. If all ranks run a micro-batch together and it does not fit, the next attempt
uses a smaller one.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rollcall.base.errors import BatchTooLargeError, ClusterError, NoRoomError, RestartsSpentError, WorkerLostError
from rollcall.base.wait import say
from rollcall.loop.tasks import wait_for_threads
from rollcall.loop.workers import Workers

T = TypeVar("T")


class RunError(RuntimeError):
    """The run cannot continue. The files on disk are intact, and the message says what to change."""


class Regrow(Exception):  # noqa: N818 - not an error: the attempt ended cleanly at a checkpoint
    """A node is back, and the next attempt will use it."""


class Budget:
    """Limits how many losses a run survives within a sliding time window. A loss is an error after which another attempt may succeed. If
    there is no new checkpoint between two losses, both count, however far apart they are, so that a slow crash loop also ends."""

    def __init__(self, *, most: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.window_s = window_s
        self._clock = clock
        self._losses: deque[float] = deque()
        self._first: BaseException | None = None
        self._reached: object = None

    def spend(self, loss: BaseException, *, reached: object = None) -> None:
        """Count a loss. Raises ``RestartsSpentError`` if the budget is spent. ``reached`` is any value that changes when the run makes
        progress."""
        self._first = self._first or loss
        if reached is None or reached != self._reached:
            while self._losses and self._clock() - self._losses[0] > self.window_s:
                self._losses.popleft()
        self._reached = reached
        if len(self._losses) >= self.most:
            raise RestartsSpentError(
                f"{headline(loss)}; this is failure {len(self._losses) + 1} within {self.window_s:g} s or since the "
                f"last checkpoint, but trainer.max_restarts is {self.most}. The files on disk are intact: fix the cause, then run the "
                f"same command again. The first failure was:\n{''.join(traceback.format_exception(self._first, limit=-20)).rstrip()}"
            ) from loss
        self._losses.append(self._clock())


def run_attempts(
    attempt: Callable[[int], T], *, budget: Budget, reached: Callable[[], object], note: Callable[[Exception], None]
) -> T:
    """Return the result of the first successful attempt. Attempts are numbered from 1. ``note`` is called with the reason for another
    attempt, which is an error or ``Regrow``. ``reached`` is passed to ``Budget.spend``."""
    number = 1
    while True:
        try:
            return attempt(number)
        except Regrow as news:
            note(news)
            say(f"{news}; the run continues with it from the checkpoint that was just saved")
        except Exception as error:
            loss = loss_of(error)
            if loss is None or (number == 1 and isinstance(loss, NoRoomError)):
                raise
            note(error)
            budget.spend(loss, reached=reached())
            say(f"{headline(loss)}; attempt {number + 1} continues from the newest checkpoint")
        number += 1


@contextmanager
def closing(workers: Workers) -> Iterator[None]:
    """Close the workers at the end. After a failure, an error while closing is only reported, because the failure is the error
    that matters."""
    try:
        yield
    except BaseException:
        try:
            workers.close()
        except ClusterError as problem:
            say(str(problem))
        # Calls that no caller is waiting for, such as writing a checkpoint, must not continue during the next attempt.
        if left := wait_for_threads(timeout_s=1):
            say(f"waiting up to 30 s for {', '.join(left)}")
            if left := wait_for_threads(timeout_s=29):
                say(f"still running from the last attempt: {', '.join(left)}")
        raise
    workers.close()


def loss_of(error: BaseException) -> BaseException | None:
    """Return the loss that caused this error, or None if something else caused it and another attempt would not help."""
    kinds = WorkerLostError | NoRoomError | BatchTooLargeError
    return next((one for one in causes(error) if isinstance(one, kinds)), None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, including those inside exception groups."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                yield from causes(one)
        yield error
        error = error.__cause__


def headline(loss: BaseException) -> str:
    """Return the first line of an error: what was lost and why.

    >>> headline(NoRoomError("no room for node 1\\nmore of it"))
    'no room for node 1'
    """
    lines = [line.strip() for line in str(loss).splitlines() if line.strip()]
    return lines[0] if lines else type(loss).__name__
