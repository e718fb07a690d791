"""Ends a host of environments in this process, as the end of its own process would."""

from __future__ import annotations

import asyncio
import time

from rollcall.environments.host import EnvironmentHost


def end_host(host: EnvironmentHost) -> None:
    """A second call does nothing."""
    loop = host._loop
    if not loop.is_running():
        return

    async def end() -> None:
        loop.remove_reader(host._door.fileno())
        host._door.close()
        for task in host._serving:
            task.cancel()
        await asyncio.gather(*host._serving, return_exceptions=True)
        await host._here.aclose()

    asyncio.run_coroutine_threadsafe(end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    while loop.is_running():
        time.sleep(0.001)
