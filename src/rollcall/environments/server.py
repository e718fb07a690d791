"""The endpoint's server: uvicorn in a thread with an event loop of its own.

Not in the loop that drives the engine: an engine in this process decodes inside one call of that loop, for as long as a chunk of
tokens takes. Meanwhile this thread reads requests, renders and tokenises, so that the next chunk begins with all of them. A request
crosses to the engine's loop once, and its completion comes back once.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any, TypeVar

from rollcall.engine.protocol import Sampling
from rollcall.environments.callers import SampleTurn
from rollcall.types import Completion, Ints

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 8192
KEEP_ALIVE_S = 120.0  # between two requests: a program may think for long
HEAD_S = 30.0  # from connecting, or from the first byte of a request, to the end of its head
START_S = 30.0
END_S = 10.0


def refuse_without_packages() -> None:
    if find_spec("uvicorn") is None:
        raise ValueError("the endpoint needs uvicorn, which is not installed; run: pip install 'rollcall-rl[view]'")


class EndpointServer:
    """Listens from the moment it is made. Coroutines that touch what the app owns run in its loop (``run``)."""

    def __init__(self, app: Any, *, host: str = LOOPBACK, port: int = 0) -> None:
        refuse_without_packages()
        import uvicorn

        self._socket = _listen(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        most = _allow_files(MAX_CONNECTIONS)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app, lifespan="off", ws="none", log_level="warning", access_log=False, server_header=False, date_header=False,
                proxy_headers=False, timeout_keep_alive=int(KEEP_ALIVE_S), timeout_graceful_shutdown=1,
                limit_concurrency=MAX_CONNECTIONS, http=_protocol(most_silent=most // 2),
            )
        )  # fmt: skip
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
        self._thread.join(END_S)

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._server.serve(sockets=[self._socket]))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self._socket.close()
            self.loop.close()


def _protocol(*, most_silent: int) -> type[asyncio.Protocol]:
    """uvicorn's, which waits without end for the head of a request. Until that has come nobody knows whether a caller has a key, so
    a stranger could hold all connections: one that says too little is closed in time, and the oldest make way where there are many."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    silent: dict[Any, asyncio.TimerHandle] = {}  # the oldest first

    class Impatient(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._wait_no_more()
            elif self not in silent:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait_no_more()
            super().connection_lost(exc)

        def _wait(self) -> None:
            silent[self] = self.loop.call_later(HEAD_S, self.transport.abort)
            if len(silent) > most_silent:
                oldest = next(iter(silent))
                oldest._wait_no_more()
                oldest.transport.abort()

        def _wait_no_more(self) -> None:
            if (timer := silent.pop(self, None)) is not None:
                timer.cancel()

    return Impatient


def in_loop(sample: Callable[..., Awaitable[Completion]], loop: asyncio.AbstractEventLoop) -> SampleTurn:
    """``sample``, which belongs to ``loop``, for coroutines of another one."""

    async def crossing(prompt_ids: Ints, /, *, seed: int, sampling: Sampling, session: str) -> Completion:
        async def there() -> Completion:
            return await sample(prompt_ids, seed=seed, sampling=sampling, session=session)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), loop))

    return crossing


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    # So that the same port can be had again right after a server on it has ended.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # thousands of programs may begin at once
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"port {port} of {host} cannot be used ({error.strerror}); give another port or host"
        ) from None
    return listener


def _allow_files(count: int) -> int:
    """How many of these connections there can be: each is an open file, and some systems allow a process only 1024 until it asks for
    more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count + 1024 if hard == resource.RLIM_INFINITY else min(count + 1024, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return count if soft == resource.RLIM_INFINITY else min(count, soft)
