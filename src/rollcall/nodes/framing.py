"""How processes write to each other: a message is its length and its bytes, in both directions.

A call and its answers begin with a head: the number of the call and the kind of message. The rest of a call is a pickle or JSON. A
process that may run what a model wrote answers in JSON, which is validated and never unpickled.

Standard library only: confined processes import it and have to start fast.
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
HEAD = struct.Struct("<IB")  # number of the call, kind of message
CALL, PART, DONE, RAISED = range(4)  # PART: a value that a call yields before it is done
LONGEST = 1 << 40  # bytes of a message between our own processes
LONGEST_JSON = 256 << 20  # of one that comes over the network


@dataclass(frozen=True, slots=True)
class Body:
    """How the values of messages are written and read."""

    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


def _as_json(value: Any) -> bytes:
    # Half of a surrogate pair, which Python's text may hold, is no text for anybody else.
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=plain).encode("utf-8", "replace")


def plain(value: Any) -> Any:
    """A value that JSON does not have: an array as a list, a date as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


PICKLE = Body(lambda value: pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), lambda body: pickle.loads(body))
JSON = Body(_as_json, json.loads)


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def json_frame(message: Any) -> bytes:
    return frame(json.dumps(message).encode())


class Frames:
    """Messages out of bytes as they arrive. The other side may be slow, or lie."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole now. ConnectionError: one is longer than allowed."""
        self._bytes += data
        found: list[bytes] = []
        begin = 0
        while len(self._bytes) - begin >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, begin)
            if length > self._longest:
                raise ConnectionError(f"a message of {length} bytes, and the longest has {self._longest}")
            end = begin + LENGTH.size + length
            if len(self._bytes) < end:
                break
            found.append(bytes(self._bytes[begin + LENGTH.size : end]))
            begin = end
        del self._bytes[:begin]
        return found


def read_frame(read: Callable[[int], bytes], *, longest: int = LONGEST) -> bytes:
    """The next message. ``read`` returns exactly this many bytes."""
    (length,) = LENGTH.unpack(read(LENGTH.size))
    if length > longest:
        raise ConnectionError(f"a message of {length} bytes, and the longest has {longest}")
    return read(length)


def read_json_frame(read: Callable[[int], bytes]) -> Any:
    return json.loads(read_frame(read, longest=LONGEST_JSON))


def read_exactly(read_some: Callable[[int], bytes], count: int) -> bytes:
    """``read_some`` returns at most this many bytes, and none when the connection was closed."""
    parts: list[bytes] = []
    while count:
        data = read_some(min(count, 1 << 20))
        if not data:
            raise ConnectionError("the connection was closed")
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def is_own_users(peer: Any) -> bool:
    """Whether the other end of a Unix socket is a process of this user, or root's."""
    import socket  # children have to start fast

    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user in (0, os.getuid())
