"""Runs blocking calls in threads while the event loop continues, and runs coroutines as a group that ends together.

The threads are daemons, so the process can exit without waiting for them. Such a thread may be waiting for another process that is about
to be killed; its call then raises, but nobody is waiting for the result.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
_calls: weakref.WeakKeyDictionary[Future[Any], str] = weakref.WeakKeyDictionary()  # names of the functions
_idle: list[_Thread] = []  # threads that are waiting for a call
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


async def all_of(work: Mapping[K, Awaitable[T]], keep: Callable[[K, T], None]) -> None:
    """Wait for all of these, and pass each result to ``keep`` when it arrives. The first failure cancels the others. A future is used as
    it is, because wrapping it in a task would cost the event loop more time than everything else that it does for a completion."""
    futures = {key: asyncio.ensure_future(each) for key, each in work.items()}
    num_left, ended = len(futures), asyncio.get_running_loop().create_future()

    def end(key: K, future: asyncio.Future[T]) -> None:
        nonlocal num_left
        try:
            result = future.result()  # read in any case, because asyncio reports an error that nobody has read
            if not ended.done():
                keep(key, result)
                num_left -= 1
                if not num_left:
                    ended.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            if not ended.done():
                ended.set_exception(error)

    for key, future in futures.items():
        future.add_done_callback(partial(end, key))
    try:
        if futures:
            await ended
    finally:
        for future in futures.values():
            future.cancel()


async def every(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    """Call ``work`` repeatedly, with a pause before each call. An error ends the loop."""
    while True:
        await asyncio.sleep(seconds)
        await work()


def wait_for_threads(*, timeout_s: float) -> list[str]:
    """Wait until all calls have ended, including those whose callers are no longer waiting. Returns the names of calls still running at
    the deadline."""
    wait(list(_calls), timeout=timeout_s)
    return [name for call, name in list(_calls.items()) if not call.done()]
