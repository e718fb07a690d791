"""What moves the bytes of an update, once sender and receivers have agreed on it. Making an end opens it.

Both sides give the same buckets: the sender's are read, the receivers' are written. Each side returns a checksum per
bucket, the receivers' of what lies in their own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rollcall.wait import Wait
from rollcall.weights.layout import BucketSize
from rollcall.weights.line import Line, call
from rollcall.weights.protocol import Invitation

Bucket = Sequence[Tensor]  # flat uint8 tensors


class _End(Protocol):
    bucket_size: BucketSize

    def close(self) -> None:
        """Release what Python does not release by itself. Closing twice does nothing."""


class Outlet(_End, Protocol):
    """The sender's end."""

    def put(self, buckets: Iterable[Bucket], deadline: Wait) -> list[int]: ...


class Inlet(_End, Protocol):
    """A receiver's end."""

    def each(self, buckets: Iterable[Bucket], deadline: Wait) -> Iterator[int]:
        """``take`` step by step: the checksum of each bucket once it has come. A few are asked for ahead of that."""
        ...

    def take(self, buckets: Sequence[Bucket], deadline: Wait) -> list[int]:
        """Raises TornUpdateError if it notices damage by itself and both ends can go on."""
        ...


Hellos = Mapping[str, Mapping[str, Any]]  # what each receiver says of itself
OpenOutlet = Callable[[Mapping[str, Line], Hellos, torch.device, Wait], Outlet]  # the device of what is sent
OpenInlet = Callable[[Line, Wait], Inlet]


def join(
    invitation: Invitation, open_inlet: OpenInlet, *, name: str, device: torch.device, deadline: Wait
) -> tuple[Line, Inlet]:
    """A receiver's line to its sender, and its end of what the sender opens."""
    line = call(invitation, name=name, deadline=deadline, about={"device": device.type, "gpus": visible_gpus()})
    try:
        return line, open_inlet(line, deadline)
    except BaseException:
        line.close()
        raise


def visible_gpus() -> list[str]:
    """The accelerators that this process may open memory of."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
