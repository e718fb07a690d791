"""The endpoint's server: uvicorn in a thread with an event loop of its own.

Not in the loop that drives the engine: an engine in this process decodes inside one call of that loop, for as long as a chunk of
tokens takes. Meanwhile this thread reads requests, renders and tokenises, so that the next chunk begins with all of them. A request
crosses to the engine's loop once, and its completion comes back once.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any, TypeVar

from rollcall.engine.protocol import Sampling
from rollcall.environments.protocol import SampleTurn
from rollcall.net.http_door import http_server, listen
from rollcall.types import Completion, Ints

T = TypeVar("T")
LOOPBACK = "127.0.0.1"


def refuse_without_packages() -> None:
    if find_spec("uvicorn") is None:
        raise ValueError("the endpoint needs uvicorn, which is not installed; run: pip install 'rollcall-rl[view]'")


class EndpointServer:
    """Listens from the moment it is made. Coroutines that touch what the app owns run in its loop (``run``)."""

    def __init__(self, app: Any, *, host: str = LOOPBACK, listener: socket.socket | None = None) -> None:
        refuse_without_packages()
        self._socket = listener or listen(host, 0)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._server = http_server(app, lifespan="off")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="endpoint", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """In this server's loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Ends requests on their way. What runs in the loop besides is the caller's to end first."""
        self._server.should_exit = True
        self._thread.join(10.0)

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._server.serve(sockets=[self._socket]))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self._socket.close()
            self.loop.close()


def in_loop(sample: SampleTurn, loop: asyncio.AbstractEventLoop) -> SampleTurn:
    """``sample``, which belongs to ``loop``, for coroutines of another one."""

    async def crossing(prompt_ids: Ints, /, *, seed: int, sampling: Sampling, session: str) -> Completion:
        async def there() -> Completion:
            return await sample(prompt_ids, seed=seed, sampling=sampling, session=session)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), loop))

    return crossing
