"""JSON messages over a connection, each with its length in front."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

LONGEST = 256 << 20  # bytes of a message
_LENGTH = struct.Struct("<I")


def frame(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def read_frame(read: Callable[[int], bytes]) -> Any:
    """The next message. ``read`` returns exactly this many bytes."""
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    if length > LONGEST:
        raise ConnectionError(f"a message of {length} bytes, and the longest has {LONGEST}")
    return json.loads(read(length))


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
