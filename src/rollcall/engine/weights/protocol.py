"""The contract of every weight transport, which has one sender in the learner's process and a receiver in each process that has its own
copy of the policy.

An update has a version and checksums. A receiver refuses an update as stale if its version is not the expected one, or is not newer
than the receiver's own. It refuses an update as torn if tensors differ in name, shape or type, or if checksums differ after it was
applied. The sender then sends the full update again. A second refusal is an error that names the receiver. The contract test in
tests/weights_contract.py checks each transport.

Who waits for whom: ``send`` waits until all receivers are in ``receive``, and then for their answers. ``receive`` waits for the
sender. Each wait has a deadline, and its error names the missing peers. An error closes the sender; create a new one and invite again.

After the sender and its receivers have agreed on an update, a carrier moves its bytes. Both ends of a carrier get buckets of the same
sizes: the sender's buckets are read, and the receivers' are written. Each side returns a checksum per bucket. A receiver computes it from
its own memory. Each end is open as soon as it has been created.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from rollcall.base.errors import WeightUpdateError
from rollcall.base.wait import Wait

Carrying = Literal["shared_memory", "broadcast", "file"]  # how the bytes travel
Bucket = Sequence[Tensor]  # flat uint8 tensors
Hellos = Mapping[str, Mapping[str, Any]]  # what each receiver says about itself


class RefusedUpdateError(WeightUpdateError):
    """The update is stale (not newer than the receiver's version, or not the expected version) or torn (it does not match the receiver's
    tensors, or it arrived damaged)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Tells a receiver where to find its sender."""

    sender: str  # the sender's name in messages
    carrying: Carrying
    host: str
    port: int  # the port of the sender's TCP listener; 0: the sender listens on ``local``
    local: str  # name of the sender's socket on this host; empty: the sender listens on TCP
    secret: str = field(repr=False)  # proves that a receiver was invited
    timeout_s: float  # for one update, from the first to the last message


def refuse_stale(came: int, *, due: int, newest: int | None) -> None:
    """Refuse a version that is not the expected one (``due``), or not newer than the newest version that the receiver has received."""
    if came != due:
        raise RefusedUpdateError(f"got version {came}, but expected version {due}")
    if newest is not None and due <= newest:
        raise RefusedUpdateError(f"version {due} is not newer than version {newest}, which the receiver already has")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSize:
    """The bucket sizes that a transport uses."""

    num_bytes: int
    alone_from: int  # a span of at least this many bytes is a bucket by itself, so it needs no packing


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
