"""Which values Ray is given once for several workers, instead of with each call."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ray import cloudpickle

INLINE_BYTES = 100 * 1024


def is_large(value: Any) -> bool:
    """Whether one shared copy is cheaper than a copy in each worker's call."""
    size = _known_size(value, INLINE_BYTES)
    if size is None:
        try:
            size = len(cloudpickle.dumps(value))
        except (pickle.PicklingError, TypeError):
            return False  # the call itself says best what cannot be sent
    return size > INLINE_BYTES


def _known_size(value: Any, limit: int) -> int | None:
    """Bytes, or any number above the limit; None where only pickling could tell."""
    if value is None or isinstance(value, bool | int | float):
        return 16
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int) and getattr(getattr(value, "dtype", None), "hasobject", False) is False:
        return nbytes
    if isinstance(value, Mapping):
        items: Any = (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name) for field in fields(value))
    else:
        return None
    total = 0
    for item in items:
        size = _known_size(item, limit - total)
        if size is None:
            return None
        total += size
        if total > limit:
            break
    return total
