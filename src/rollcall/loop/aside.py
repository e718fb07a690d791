"""A blocking call beside the event loop, in a thread of its own.

The threads are daemons, and the end of this process does not wait for them: a call may wait for another process that is
about to be ended. Such a call raises when that process is gone, and its caller has left by then.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call it in a thread; the future gets what it returns or raises."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # it has begun: a caller that leaves does not cancel it

    def work() -> None:
        try:
            done.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            done.set_exception(error)

    thread = threading.Thread(target=work, name=f"aside: {getattr(function, '__name__', 'call')}", daemon=True)
    _threads.add(thread)
    thread.start()
    return done


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``function`` returns or raises, while the loop goes on."""
    return await asyncio.wrap_future(start(function, *args, **kwargs))


def wait_for_threads(*, timeout_s: float) -> list[str]:
    """Wait until all calls have ended, also those whose caller has left. Returns the names of those that still run at the
    deadline."""
    deadline = time.monotonic() + timeout_s
    for thread in list(_threads):
        thread.join(timeout=max(deadline - time.monotonic(), 0))
    return [thread.name for thread in _threads if thread.is_alive()]
