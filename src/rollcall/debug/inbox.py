"""The messages of a connection (process/framing.py), read without waiting for the rest of one: the other side may be slow, or lie."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from rollcall.process.framing import Frames

LONGEST = 4 << 20  # bytes of a message; longer ones are not ours


class _HasFd(Protocol):
    def fileno(self) -> int: ...


def readable(sources: Sequence[_HasFd], *, timeout_s: float | None) -> set[int]:
    """The descriptors of those that have something to read. Any number of files may be open in this process."""
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on
    for source in sources:
        if (fd := source.fileno()) < 0:
            raise ConnectionError("the connection was closed here")
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000)}


class FrameReader:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._frames = Frames(LONGEST)

    def fileno(self) -> int:
        return self.connection.fileno()

    def take(self) -> list[dict[str, Any]]:
        """The messages that have arrived whole; call it when there is something to read. ConnectionError: no more will come."""
        try:
            data = self.connection.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return []
        if not data:
            raise ConnectionError("the connection was closed")
        try:
            found = [json.loads(body) for body in self._frames.feed(data)]
        except (ValueError, RecursionError):
            raise ConnectionError("a message that is not JSON, or lists within lists without end") from None
        if not all(isinstance(message, dict) for message in found):
            raise ConnectionError("a message that is not a map")
        return found
