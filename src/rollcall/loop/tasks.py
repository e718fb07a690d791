"""Runs blocking calls in threads while the event loop continues, and runs coroutines as a group that ends together.

The threads are daemons, so the process can exit without waiting for them. Such a thread may be waiting for another process that is about
to be killed; its call then raises, but nobody waits for the result.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_calls: weakref.WeakKeyDictionary[Future[Any], str] = weakref.WeakKeyDictionary()  # names of the functions
_idle: list[_Thread] = []  # threads that wait for a call
os.register_at_fork(after_in_child=_idle.clear)  # a forked child has none of these threads


def start(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call the function in a thread; the future gets its result or its error."""
    named: Any = function
    while isinstance(named, partial):
        named = named.func
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # mark it as started, so that a caller that stops waiting does not cancel it
    _calls[done] = getattr(named, "__name__", "call").strip("_")

    def work() -> None:
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            done.set_exception(error)
        else:
            done.set_result(result)

    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
        thread.start()
    thread.work.put(work)
    return done


class _Thread(threading.Thread):
    """Makes one call after another. Starting a thread would block the event loop until the thread runs, which can take milliseconds."""

    def __init__(self) -> None:
        super().__init__(name="calls", daemon=True)
        self.work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run(self) -> None:
        while True:
            self.work.get()()
            _idle.append(self)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what ``function`` returns, or raise what it raises, without blocking the loop."""
    return await asyncio.wrap_future(start(function, *args, **kwargs))


async def together(work: Coroutine[Any, Any, T], *, background: Sequence[Coroutine[Any, Any, None]]) -> T:
    """Return the result of ``work``, and run ``background`` until then. The first failure cancels everything."""
    wanted = asyncio.create_task(work)
    tasks = {wanted, *map(asyncio.create_task, background)}
    try:
        while not wanted.done():
            running = {task for task in tasks if not task.done()}
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return wanted.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all coroutines. The first failure cancels the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def every(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    """Call ``work`` repeatedly, with a pause before each call. An error ends the loop."""
    while True:
        await asyncio.sleep(seconds)
        await work()


def wait_for_threads(*, timeout_s: float) -> list[str]:
    """Wait until all calls have ended, including those whose callers no longer wait. Returns the names of calls still running at the
    deadline."""
    wait(list(_calls), timeout=timeout_s)
    return [name for call, name in list(_calls.items()) if not call.done()]
