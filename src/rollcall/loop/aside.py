"""A blocking call beside the event loop, in a thread of its own.

The threads are daemons and nobody joins them: a call that waits for a process which is about to be ended must not keep
this one from ending. Such a call raises as soon as its process is gone, and whoever awaited it has left by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``function`` returns or raises, while the loop goes on."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to whoever awaits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    thread = threading.Thread(target=work, name=f"aside: {getattr(function, '__name__', 'call')}", daemon=True)
    _threads.add(thread)
    thread.start()
    return await done


def wait_for_threads(*, timeout_s: float) -> list[str]:
    """Until no call is under way that somebody has left; returns the names of those that still are at the deadline."""
    deadline = time.monotonic() + timeout_s
    for thread in list(_threads):
        thread.join(timeout=max(deadline - time.monotonic(), 0))
    return [thread.name for thread in _threads if thread.is_alive()]
