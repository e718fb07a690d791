"""HTTP servers that no client can block: uvicorn, with a time limit on everything that a connection waits for.

uvicorn waits forever for a request's headers, and for a client that does not read the response. Before the headers arrive, the server
cannot know whether a client has a key, so a stranger could occupy all connections.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from rollcall.base.process_table import allow_files

if TYPE_CHECKING:
    import uvicorn

MAX_CONNECTIONS = 8192
HEAD_S = 30.0  # from connecting, or from the first byte of a request, to the end of its headers
READ_S = 60.0  # for a client to read the next part of its response
LOOK_S = 1.0  # interval of the checks whether a client that has stopped sending is still connected


def listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Lets a new server bind the port right after the old one has stopped.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # thousands of programs may start at once
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"port {port} of {host} cannot be used ({error.strerror}); choose another port"
        ) from None
    return listener


def http_server(app: Any) -> uvicorn.Server:
    """Return a server. Run it on a socket from ``listen``."""
    import uvicorn

    most = min(MAX_CONNECTIONS, allow_files(MAX_CONNECTIONS))
    # uvicorn logs a warning for each bad request, so strangers could fill a log. A program may think for a long time between requests.
    return uvicorn.Server(
        uvicorn.Config(
            app, lifespan="off", ws="none", log_level="error", access_log=False, server_header=False, date_header=False,
            proxy_headers=False, timeout_keep_alive=120, timeout_graceful_shutdown=1, limit_concurrency=most,
            # asyncio accepts up to this many connections at once, before the oldest ones can be dropped to make room.
            backlog=min(2048, most // 16 + 16), http=_protocol(most_silent=most // 2),
        )
    )  # fmt: skip


def _protocol(*, most_silent: int) -> type[asyncio.Protocol]:
    """Return a protocol that disconnects clients that send too little or do not read in time. If too many clients are silent, it
    disconnects those that have been silent the longest."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    silent: dict[Any, asyncio.TimerHandle] = {}  # oldest first

    class Impatient(H11Protocol):
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # `pause_writing` is called as soon as any data is buffered
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
            self.resume_writing()

        def eof_received(self) -> bool:
            """Return whether the connection stays open: a client may stop sending and still read its response."""
            if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
                return False
            self.cycle.keep_alive = False
            self._ask_whether_there()
            return True

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(READ_S, self._drop_unless_read, self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()

        def _drop_unless_read(self, before: int) -> None:
            if (left := self.transport.get_write_buffer_size()) >= before:
                self.transport.abort()
            else:
                self._unread = self.loop.call_later(READ_S, self._drop_unless_read, left)

        def _ask_whether_there(self) -> None:
            """Send an interim response to a client that has stopped sending. If the client has hung up, its host rejects the packet;
            otherwise the client ignores the response, as HTTP/1.1 requires."""
            if (
                not self.transport.is_closing()
                and not self.cycle.response_started
                and self.scope["http_version"] == "1.1"
            ):
                self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
                self.loop.call_later(LOOK_S, self._ask_whether_there)

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
