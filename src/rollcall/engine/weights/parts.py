"""Sends new weights directly from the processes that hold parts of them. Every actor sends its own blocks; no process gathers the model.

A sender (``exchange.StreamSender``) gets ``Parts`` (``layout.py``): blocks of the model's tensors, each converted to the engines' dtype
when it is sent. A receiver has a line to every sender (``PartsReceiver``) and assembles the blocks, one tensor at a time, in the
order in which all senders send. So both sides need memory for only a few buckets and about one tensor, however large the model is. The
receiver need not know how the actor is sharded, because each block comes with its position.

Who waits for whom: as in ``exchange.py``, for each sender. A receiver gives all its senders the same answer. If two receivers share only
some of their senders, a refusal by one of them makes the update fail. All receivers go through the senders in the same order, so they
cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from rollcall.base.wait import Wait
from rollcall.engine.weights.exchange import Header, LineReceiver
from rollcall.engine.weights.layout import Layout, slices
from rollcall.engine.weights.protocol import Inlet, Invitation, RefusedUpdateError

Take = Callable[[Iterator[tuple[str, Tensor]]], None]


class PartsReceiver(LineReceiver):
    """Receives full tensors from several senders. ``wanted`` contains their shapes, in the order in which they are sent."""

    def __init__(
        self, invitations: Sequence[Invitation], *, name: str, wanted: Mapping[str, Sequence[int]], device: torch.device
    ) -> None:
        super().__init__(invitations, name=name, device=device)
        self._wanted = {key: tuple(shape) for key, shape in wanted.items()}
        self._take: Take | None = None

    def receive(self, take: Take, *, version: int) -> None:
        """Wait for the update to this version. ``take`` gets an iterator over its tensors, and is called again if the update was torn."""
        self._take = take
        self._update(version)

    def _fit(self, headers: Sequence[Header]) -> None:
        found = dict.fromkeys(self._wanted, 0)
        for header in headers:
            for (name, _, whole), entry in zip(header["parts"], Layout.parse(header["layout"]).entries, strict=True):
                if name not in found:
                    raise RefusedUpdateError(f"the update has a tensor {name!r} that this receiver does not have")
                if tuple(whole) != self._wanted[name]:
                    raise RefusedUpdateError(
                        f"tensor {name!r} has shape {list(whole)} in the update and {list(self._wanted[name])} in the receiver"
                    )
                found[name] += prod(entry.shape)
        for name, count in found.items():
            if count != prod(self._wanted[name]):
                raise RefusedUpdateError(
                    f"the update has {count} of the {prod(self._wanted[name])} elements of {name!r}"
                )

    def _apply(self, headers: Sequence[Header], deadline: Wait) -> list[list[int]]:
        assert self._take is not None
        made: dict[str, Tensor] = {}  # tensors with a part that has arrived or is on its way

        def room(name: str, dtype: torch.dtype) -> Tensor:
            if name not in made:
                made[name] = torch.empty(self._wanted[name], dtype=dtype, device=self._device)
            return made[name]

        inlets = [inlet for _, inlet in self._ends]
        streams = [_Stream(inlet, header, room, deadline) for inlet, header in zip(inlets, headers, strict=True)]
        tensors = self._put_together(streams, made)
        self._take(tensors)
        for _ in tensors:  # also receive the tensors that ``take`` did not read
            continue
        return [stream.sums for stream in streams]

    def _put_together(self, streams: Sequence[_Stream], made: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name in self._wanted:
            for stream in streams:
                stream.until(name)
            yield name, made.pop(name)
        for stream in streams:
            stream.finish()


class _Stream:
    """The blocks from one sender in one attempt."""

    def __init__(
        self, inlet: Inlet, header: Header, room: Callable[[str, torch.dtype], Tensor], deadline: Wait
    ) -> None:
        self.sums: list[int] = []
        self._room = room
        self._layout = Layout.parse(header["layout"])
        self._about = header["parts"]
        self._buckets = self._layout.buckets(inlet.bucket_size)
        # Tensor -> the number of buckets after which this sender's part of it is complete.
        self._due: dict[str, int] = {}
        for number, spans in enumerate(self._buckets, start=1):
            for span in spans:
                self._due[self._about[span.entry][0]] = number
        # Entry -> a buffer for bytes that are not contiguous in their tensor, and the block of the tensor to copy them to.
        self._apart: dict[int, tuple[Tensor, Tensor]] = {}
        self._landed = inlet.each(slices(self._buckets, self._bytes), deadline)

    def until(self, name: str) -> None:
        """Receive until this sender's part of the tensor is complete."""
        while len(self.sums) < self._due.get(name, 0):
            self.sums.append(next(self._landed))
            for span in self._buckets[len(self.sums) - 1]:
                if span.entry in self._apart and span.end == self._layout.entries[span.entry].num_bytes:
                    apart, place = self._apart.pop(span.entry)
                    place.copy_(apart)

    def finish(self) -> None:
        """Exhaust the carrier's iterator, so that the carrier can finish."""
        self.sums.extend(self._landed)

    def _bytes(self, index: int) -> Tensor:
        """Return where an entry's bytes go: into the tensor itself, or into a buffer if they are not contiguous in the tensor."""
        entry = self._layout.entries[index]
        name, start, _ = self._about[index]
        whole = self._room(name, entry.torch_dtype)
        place = whole[tuple(slice(begin, begin + size) for begin, size in zip(start, entry.shape, strict=True))]
        if not place.is_contiguous():
            apart = torch.empty(entry.shape, dtype=entry.torch_dtype, device=whole.device)
            self._apart[index] = (apart, place)
            place = apart
        return place.reshape(-1).view(torch.uint8)
