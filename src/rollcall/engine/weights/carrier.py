"""A carrier moves the bytes of an update once sender and receivers have agreed on it.

Both ends of a carrier get the same buckets: the sender's are read, the receivers' are written. Each side returns a checksum per
bucket, the receivers' of what lies in their own memory. Making an end opens it.
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
        """Release what Python does not release by itself. Closing twice does nothing."""


class Inlet(Protocol):
    """A receiver's end."""

    bucket_size: BucketSize

    def each(self, buckets: Iterable[Bucket], deadline: Wait) -> Iterator[int]:
        """The checksum of each bucket once it has come. A few buckets are asked for ahead of that."""
        ...

    def close(self) -> None:
        """As of ``Outlet``."""


Hellos = Mapping[str, Mapping[str, Any]]  # what each receiver says of itself


def visible_gpus() -> list[str]:
    """The accelerators that this process may open memory of."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
