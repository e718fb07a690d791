"""A reward for benchmarks: cheap, different for every completion, and the same on every machine."""

from __future__ import annotations

import zlib
from typing import Any


def noise(prompt: str, completion: str, answer: str = "", metadata: dict[str, Any] | None = None) -> float:
    return zlib.crc32(completion.encode()) % 1000 / 1000
