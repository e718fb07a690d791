"""Tensors as bytes in an agreed order.

The sender's layout lists its tensors by name, type and shape, each with the order of its dimensions in memory. So a column-major matrix
is sent as it is in memory. A tensor that has gaps, or whose memory order differs on the two sides, is copied first. Bytes are moved one
bucket at a time. Both sides derive the buckets from the layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rollcall.engine.weights.protocol import BucketSize, RefusedUpdateError


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the slowest to the fastest in memory

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Entry:
        order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride(dim), dim))
        if not tensor.permute(order).is_contiguous():
            order = range(tensor.ndim)
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(order))

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start`` to ``end`` of a tensor."""

    entry: int
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        return cls(tuple(Entry.of(name, tensor) for name, tensor in tensors.items()))

    @cached_property
    def text(self) -> str:
        return json.dumps([[entry.name, entry.dtype, entry.shape, entry.order] for entry in self.entries])

    @classmethod
    def parse(cls, text: str) -> Layout:
        return cls(
            tuple(Entry(name, dtype, tuple(shape), tuple(order)) for name, dtype, shape, order in json.loads(text))
        )

    @cached_property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that do not match this layout."""
        sent = {entry.name: entry for entry in self.entries}
        for name, tensor in tensors.items():
            here = Entry.of(name, tensor)
            if name not in sent:
                raise RefusedUpdateError(f"tensor {name!r} is missing from the update")
            if (sent[name].shape, sent[name].dtype) != (here.shape, here.dtype):
                raise RefusedUpdateError(f"tensor {name!r} is {sent[name]} in the update and {here} in the receiver")
        if extra := [name for name in sent if name not in tensors]:
            raise RefusedUpdateError(f"the update has a tensor {extra[0]!r} that this receiver does not have")

    def buckets(self, size: BucketSize) -> list[list[Span]]:
        """Split the entries into buckets, in order. Small spans never share a bucket with small spans that come after a large one."""
        found: list[list[Span]] = []
        shared: list[Span] = []  # small spans that share a bucket
        room = size.num_bytes
        for index, entry in enumerate(self.entries):
            for start in range(0, entry.num_bytes, size.num_bytes):
                span = Span(index, start, min(start + size.num_bytes, entry.num_bytes))
                length = span.end - span.start
                if length >= size.alone_from:
                    if shared:
                        found.append(shared)
                        shared, room = [], size.num_bytes
                    found.append([span])
                    continue
                if length > room:
                    found.append(shared)
                    shared, room = [], size.num_bytes
                shared.append(span)
                room -= length
        return [*found, shared] if shared else found


class Views:
    """One side's tensors as flat bytes, in the order of a layout."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        self.layout = layout
        self.flat: list[Tensor] = []
        self._apart: list[tuple[Tensor, Tensor]] = []  # tensors with a different memory order, and their copies
        for entry in layout.entries:
            tensor = tensors[entry.name].detach().permute(entry.order)
            if not tensor.is_contiguous():
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self._apart.append((tensor, copy))
                tensor = copy
            self.flat.append(tensor.reshape(-1).view(torch.uint8))
        self.device = self.flat[0].device
        self.has_copies = bool(self._apart)

    def read(self) -> None:
        """Update the copies from their tensors."""
        for tensor, copy in self._apart:
            copy.copy_(tensor)

    def write(self) -> None:
        """Update the tensors from their copies."""
        for tensor, copy in self._apart:
            tensor.copy_(copy)

    def buckets(self, size: BucketSize) -> list[list[Tensor]]:
        buckets = self.layout.buckets(size)
        return [[self.flat[span.entry][span.start : span.end] for span in bucket] for bucket in buckets]


def view(tensors: Mapping[str, Tensor]) -> Views:
    """Return views of the tensors as they are now."""
    views = Views(tensors, Layout.of(tensors))
    views.read()
    return views


def cut(flat: Tensor, size: BucketSize) -> list[list[Tensor]]:
    """Split a flat tensor into buckets."""
    return [[flat[start : start + size.num_bytes]] for start in range(0, len(flat), size.num_bytes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBlock:
    """One process's block of a model tensor."""

    name: str  # the tensor's name in transformers
    start: tuple[int, ...]  # where the block begins in the tensor
    whole: tuple[int, ...]  # shape of the full tensor
    dtype: torch.dtype  # dtype in which the block is sent
    values: Tensor  # on any device, of any type

    @property
    def entry(self) -> Entry:
        shape = tuple(self.values.shape)
        key = f"{self.name}@{','.join(map(str, self.start))}"
        return Entry(key, str(self.dtype).removeprefix("torch."), shape, tuple(range(len(shape))))


class Parts:
    """The blocks that one process sends, with the same interface as ``Views``. Nothing is copied until a bucket needs it."""

    def __init__(self, blocks: Sequence[SentBlock], *, device: torch.device) -> None:
        self.device = device
        self._blocks = blocks
        self.layout = Layout(tuple(block.entry for block in blocks))

    @property
    def about(self) -> list[list[Any]]:
        """For each entry in the layout: its tensor's name, where it begins in the tensor, and the tensor's shape."""
        return [[block.name, block.start, block.whole] for block in self._blocks]

    def buckets(self, size: BucketSize) -> Iterator[list[Tensor]]:
        return slices(self.layout.buckets(size), self._bytes)

    def _bytes(self, index: int) -> Tensor:
        block = self._blocks[index]
        return block.values.detach().to(self.device, block.dtype).contiguous().reshape(-1).view(torch.uint8)


def slices(buckets: Sequence[Sequence[Span]], bytes_of: Callable[[int], Tensor]) -> Iterator[list[Tensor]]:
    """Yield the buckets in order. ``bytes_of`` is called once per entry, and its bytes are released after the entry's last bucket."""
    ready: dict[int, Tensor] = {}
    for spans in buckets:
        ready = {index: flat for index, flat in ready.items() if index >= spans[0].entry}
        for span in spans:
            if span.entry not in ready:
                ready[span.entry] = bytes_of(span.entry)
        yield [ready[span.entry][span.start : span.end] for span in spans]
