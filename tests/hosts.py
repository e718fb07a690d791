"""Ends a host of environments in this process, as the end of its own process would."""

from __future__ import annotations

import asyncio
from weakref import WeakSet

from rollcall.environments.host import EnvironmentHost

_ended: WeakSet[EnvironmentHost] = WeakSet()


def end_host(host: EnvironmentHost) -> None:
    """A second call does nothing."""
    if host in _ended:
        return
    _ended.add(host)

    async def end() -> None:
        host._loop.remove_reader(host._door.fileno())
        host._door.close()
        for task in host._serving:
            task.cancel()
        await asyncio.gather(*host._serving, return_exceptions=True)
        await host._here.aclose()

    asyncio.run_coroutine_threadsafe(end(), host._loop).result()
    host._loop.call_soon_threadsafe(host._loop.stop)
