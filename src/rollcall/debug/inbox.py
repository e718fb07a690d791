"""The messages of a connection (net/frames.py), read without waiting for the rest of one: the other side may be slow, or lie."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any, Protocol

LONGEST = 4 << 20  # bytes of a message; longer ones are not ours
_LENGTH = struct.Struct("<I")


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
        self._bytes = bytearray()

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
        self._bytes += data
        found: list[dict[str, Any]] = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > LONGEST:
                raise ConnectionError(f"a message of {length} bytes, and the longest has {LONGEST}")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            try:
                message = json.loads(bytes(self._bytes[_LENGTH.size : end]))
            except (ValueError, RecursionError):
                raise ConnectionError("a message that is not JSON, or lists within lists without end") from None
            del self._bytes[:end]
            if not isinstance(message, dict):
                raise ConnectionError("a message that is not a map")
            found.append(message)
        return found
