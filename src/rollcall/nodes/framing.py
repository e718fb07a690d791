"""Frames messages between processes: in both directions, each message is sent as its length followed by its bytes.

A call and its answers begin with a header: the call number and the kind of message. The rest of a call is a pickle or JSON. A
process that may run model-written code answers in JSON, which is validated and never unpickled.

This file uses only the standard library, because confined processes import it and must start fast.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LENGTH = struct.Struct("<Q")
HEAD = struct.Struct("<IB")  # call number, kind of message
CALL, PART, DONE, RAISED = range(4)  # PART: a value that a call yields before it is done
LONGEST = 1 << 40  # bytes in a message between our own processes


@dataclass(frozen=True, slots=True)
class Body:
    """How message values are encoded and decoded."""

    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


def _as_json(value: Any) -> bytes:
    # Python strings may contain a lone surrogate, which is not valid UTF-8.
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=plain).encode("utf-8", "replace")


def plain(value: Any) -> Any:
    """Convert a value that JSON does not support, such as an array to a list or a date to a string."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


PICKLE = Body(lambda value: pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), lambda body: pickle.loads(body))
JSON = Body(_as_json, json.loads)


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def json_frame(message: Any) -> bytes:
    return frame(json.dumps(message).encode())


class Frames:
    """Splits incoming bytes into messages. The other side may be slow, or send invalid data."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes and return the messages that are now complete. Raise ValueError if a message is longer than allowed."""
        self._bytes += data
        found: list[bytes] = []
        begin = 0
        while len(self._bytes) - begin >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, begin)
            if length > self._longest:
                raise ValueError(f"a message has {length} bytes, but the limit is {self._longest}")
            end = begin + LENGTH.size + length
            if len(self._bytes) < end:
                break
            found.append(bytes(self._bytes[begin + LENGTH.size : end]))
            begin = end
        del self._bytes[:begin]
        return found


def read_frame(read: Callable[[int], bytes], *, longest: int = LONGEST) -> bytes:
    """Read the next message. ``read`` returns exactly as many bytes as requested."""
    (length,) = LENGTH.unpack(read(LENGTH.size))
    if length > longest:
        raise ConnectionError(f"a message has {length} bytes, but the limit is {longest}")
    return read(length)


def read_json_frame(read: Callable[[int], bytes]) -> Any:
    return json.loads(read_frame(read, longest=256 << 20))  # it may come from the network


def read_exactly(read_some: Callable[[int], bytes], count: int) -> bytes:
    """Read ``count`` bytes. ``read_some`` returns at most as many bytes as requested, and none once the connection is closed."""
    parts: list[bytes] = []
    while count:
        data = read_some(min(count, 1 << 20))
        if not data:
            raise ConnectionError("the connection was closed")
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def is_own_users(peer: Any) -> bool:
    """Return whether the other end of a Unix socket is a process of this user or of root."""
    import socket  # imported late, because child processes have to start fast

    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user in (0, os.getuid())
