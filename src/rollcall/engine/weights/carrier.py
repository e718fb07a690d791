"""Carriers move the bytes of an update after the sender and its receivers have agreed on it.

Both ends of a carrier get buckets of the same sizes: the sender's buckets are read, and the receivers' are written. Each side returns a
checksum per bucket. A receiver computes it from its own memory. Each end is open as soon as it has been created.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rollcall.base.wait import Wait
from rollcall.engine.weights.layout import BucketSize

Bucket = Sequence[Tensor]  # flat uint8 tensors


class Outlet(Protocol):
    """The sender's end."""

    bucket_size: BucketSize

    def put(self, buckets: Iterable[Bucket], deadline: Wait) -> list[int]: ...

    def close(self) -> None:
        """Release what Python does not release by itself. A second call does nothing."""


class Inlet(Protocol):
    """A receiver's end."""

    bucket_size: BucketSize

    def each(self, buckets: Iterable[Bucket], deadline: Wait) -> Iterator[int]:
        """Yield the checksum of each bucket after the bucket has arrived. A few buckets are taken from ``buckets`` in advance."""
        ...

    def close(self) -> None:
        """Same as ``Outlet.close``."""


Hellos = Mapping[str, Mapping[str, Any]]  # what each receiver says about itself


def visible_gpus() -> list[str]:
    """Return the GPUs whose memory this process can open."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
