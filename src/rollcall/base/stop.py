"""Stops a run on a signal: SIGTERM (Slurm, Kubernetes, `rollcall job stop`), SIGUSR1, which Slurm's `--signal` sends before the time
limit, and SIGHUP, which a closed SSH session sends. Under `nohup`, SIGHUP stays ignored.

The first signal asks the run to stop. Before training there is nothing to save, so the command exits right away, as with Ctrl-C. During
training (``waiting``), the controller stops at the end of its step. If the grace period ends before that, ``Stopped`` is raised in the
main thread, whatever it is doing, except within ``shielded``, where weights or a checkpoint may be half-written. A second signal kills
the process at once. Ctrl-C is different: it ends a run without saving (``noting_interrupts``).

Signal handlers are per process and run in the main thread, so there is only one ``Stop``: ``heed`` installs it, ``heeded`` returns it. If
the main thread already has an event loop (a notebook), another thread does the work, and the main one forwards signals (``outside_loop``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# EX_TEMPFAIL: the run is not finished, but nothing is wrong, and the same command continues it. No supervisor treats it as a crash by
# default, and each can be configured to restart such a command (Slurm: `scontrol requeue`; systemd: RestartForceExitStatus).
STOPPED = 75
INTERRUPTED = 130  # by Ctrl-C
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_S = 2.0  # one request may arrive twice, because all processes in a job get it, and their parent forwards it too


def status_words(status: int) -> str:
    """Describe how a run ended, from its command's exit status or a ``subprocess`` ``returncode``.

    >>> status_words(0), status_words(143), status_words(-9)
    ('succeeded (status 0)', 'was ended by SIGTERM (status 143)', 'was ended by SIGKILL (status 137)')
    """
    status = 128 - status if status < 0 else status
    if status == STOPPED:
        how = "was stopped; its progress is saved, and the same command continues it"
    elif status == INTERRUPTED:
        how = "was interrupted by Ctrl-C; the same command continues it"
    elif status in (128 + number for number in signal.Signals):
        how = f"was ended by {signal.Signals(status - 128).name}"
    else:
        how = "failed" if status else "succeeded"
    return f"{how} (status {status})"


class Stopped(KeyboardInterrupt):
    """This process received the named signal and must stop. Code that handles Ctrl-C handles this too."""


def ended_by(heard: KeyboardInterrupt) -> tuple[str, int]:
    """Return the name of the signal that ended a command, and the command's exit status."""
    return (str(heard), STOPPED) if isinstance(heard, Stopped) else ("Ctrl-C", INTERRUPTED)


class Stop:
    def __init__(self) -> None:
        self.asked: str | None = None  # the signal's name
        self.is_interrupted = False  # by Ctrl-C
        self._asked_s = 0.0
        self._grace_s: float | None = None  # None while no run is training
        self.num_shields = 0
        self._num_prompts = 0  # debugger prompts open in the main thread
        self._is_over = False
        self._terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]
        self._cancel: Callable[[], object] | None = None  # cancels a run outside the main thread

    @property
    def left_s(self) -> float:
        """Seconds left in the grace period."""
        return max(self._asked_s + (self._grace_s or 0.0) - time.monotonic(), 0.0)

    @property
    def is_late(self) -> bool:
        """Whether the process must stop waiting for anything, because of Ctrl-C or because the grace period is over."""
        return self.is_interrupted or (self.asked is not None and self.left_s == 0)

    def check(self) -> None:
        """Raise ``Stopped`` if a signal has arrived."""
        if self.asked is not None:
            raise Stopped(self.asked)

    @contextmanager
    def waiting(self, grace_s: float) -> Iterator[None]:
        """Wrap the training loop. After a signal, the loop has ``grace_s`` seconds to finish its step."""
        self.check()
        self._grace_s = grace_s
        try:
            yield
        finally:
            self._grace_s = None
            if self.asked is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Protect a block that must not stop half-way. If the grace period ends inside the block, the run stops after it."""
        self.num_shields += 1
        try:
            yield
        finally:
            self.num_shields -= 1
        if self._is_over and self.num_shields == 0:
            self.check()

    @contextmanager
    def at_prompt(self) -> Iterator[None]:
        """Wrap an open debugger prompt. When the grace period ends, ``Stopped`` is raised at the prompt, even within ``shielded``,
        because nothing else would close the prompt. The debugger catches it and lets a shielded block finish."""
        is_main = threading.current_thread() is threading.main_thread()
        self._num_prompts += is_main
        try:
            yield
        finally:
            self._num_prompts -= is_main

    @contextmanager
    def noting_interrupts(self) -> Iterator[None]:
        """Record Ctrl-C within ``asyncio.run``. asyncio's own handler cancels the running task, but a task does not notice that while it
        is in a blocking call, so such a call checks ``is_late``. Outside the main thread, ``pass_on`` cancels the task."""
        if threading.current_thread() is not threading.main_thread():
            import asyncio

            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None, "must be called from a task"
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            try:
                yield
            finally:
                self._cancel = None
            return
        inner = signal.getsignal(signal.SIGINT)
        if not callable(inner):
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.is_interrupted = True
            inner(number, frame)

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, inner)

    def pass_on(self, heard: KeyboardInterrupt, *, thread: threading.Thread) -> None:
        """Forward a signal from the main thread to the working thread. The first Ctrl-C cancels a run, as asyncio's handler does; the
        second one raises an exception in the working thread, whatever it is doing."""
        is_first = not self.is_interrupted
        self.is_interrupted = self.is_interrupted or not isinstance(heard, Stopped)
        if is_first and (cancel := self._cancel) is not None:
            cancel()
        elif thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(type(heard)))

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """Handle one of ``SIGNALS``."""
        now = time.monotonic()
        if number == signal.SIGHUP:
            self._leave_terminals()
        if self.asked is not None:
            if now - self._asked_s >= SAME_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.asked, self._asked_s = signal.Signals(number).name, now
        if self._grace_s is None:
            raise Stopped(self.asked)
        signal.signal(signal.SIGALRM, self._end_grace)
        # Again every 5 s, because Python drops an exception that is raised while an object is being destroyed.
        signal.setitimer(signal.ITIMER_REAL, max(self._grace_s, 0.001), 5.0)

    def _leave_terminals(self) -> None:
        """Redirect closed terminals to the null device, because a failed write to them must not keep a run from saving."""
        for fd in self._terminals:
            if not os.isatty(fd):
                with open(os.devnull, "r+b", buffering=0) as null:
                    os.dup2(null.fileno(), fd)

    def _end_grace(self, number: int, frame: FrameType | None) -> None:
        self._is_over = True
        # Stopped may be raised between the creation of a coroutine and its start, which is harmless.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
        if self.num_shields == 0 or self._num_prompts:
            self.check()


_heeded: Stop | None = None


@contextmanager
def heed() -> Iterator[Stop]:
    """Handle the signals while the block runs."""
    global _heeded
    _heeded = stop = Stop()
    # A signal that ends an event loop leaves asyncio's Ctrl-C handler behind.
    before = {signal.SIGINT: on_interrupt} if (on_interrupt := signal.getsignal(signal.SIGINT)) is not None else {}
    before |= {number: signal.signal(number, stop.hear) for number in heeded_signals()}
    try:
        yield stop
    finally:
        _heeded = None
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:  # a command that is exiting ignores further signals
                signal.signal(number, handler or signal.SIG_DFL)  # None is a handler that was not installed from Python


@contextmanager
def heed_if_possible() -> Iterator[None]:
    """Like ``heed``, for library use. Does nothing outside the main thread, or if handlers are already installed."""
    if is_heeding() or threading.current_thread() is not threading.main_thread():
        yield
        return
    with heed():
        yield


def outside_loop(work: Callable[[], T]) -> T:
    """Return ``work()``. It may call ``asyncio.run``, so it runs in another thread if this one has an event loop."""
    import asyncio  # imported late, so that a command can handle signals as early as possible
    from concurrent.futures import Future

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            result.set_exception(error)

    stop, is_main = heeded(), threading.current_thread() is threading.main_thread()
    thread = threading.Thread(target=run, name="rollcall")
    # Let Ctrl-C raise in this thread. asyncio's handler would only cancel the task, which would not notice that while it is in a blocking
    # call.
    before = signal.signal(signal.SIGINT, signal.default_int_handler) if is_main else None
    try:
        thread.start()
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt as heard:
                stop.pass_on(heard, thread=thread)
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    return result.result()


def heeded() -> Stop:
    """Return the installed ``Stop``. If there is none, return one that never gets a signal."""
    return _heeded or Stop()


def is_heeding() -> bool:
    """Whether this process handles the signals."""
    return _heeded is not None


@contextmanager
def kept() -> Iterator[None]:
    """Wrap a call that installs its own handlers, as ``ray.init`` does (Ray 2.60). If such a handler exits on SIGTERM, we treat that as
    if our own handler had received the signal. Our handlers are restored afterwards, and an ignored signal stays ignored."""
    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    try:
        yield
    except SystemExit as error:
        if _heeded is None or error.code != signal.SIGTERM:
            raise
        _heeded.hear(signal.SIGTERM)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            ours = {} if _heeded is None else dict.fromkeys(heeded_signals(), _heeded.hear)
            for number, handler in {**ours, **dict.fromkeys(ignored, signal.SIG_IGN)}.items():
                signal.signal(number, handler)


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Return ``SIGNALS``, without SIGHUP if it is ignored, because `nohup` uses this to let a run outlive its terminal."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in SIGNALS if number != signal.SIGHUP or not is_ignored)
