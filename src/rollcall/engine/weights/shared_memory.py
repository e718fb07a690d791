"""Sends weights to processes on the same host.

In host memory, this uses a ring of a few buckets in an anonymous memory file. The sender fills the ring while each receiver empties it,
so it stays in the cache and takes little memory. The file has no name, so nothing is left behind when a process dies. If all receivers
can open the sender's GPU memory, they get handles to its tensors (CUDA IPC) and copy from them. For each bucket in the ring, both sides
send one byte over the line: the sender when the bucket is ready, and the receiver when it has copied it.
"""

from __future__ import annotations

import base64
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollcall.base.wait import Wait
from rollcall.engine.weights.line import Line
from rollcall.engine.weights.protocol import Bucket, BucketSize, Hellos, Inlet, Outlet
from rollcall.model.checksum import checksum, copy_summed

SLOT_BYTES = 4 << 20
NUM_SLOTS = 8
BUCKETS = BucketSize(num_bytes=SLOT_BYTES, alone_from=SLOT_BYTES)


def visible_gpus() -> list[str]:
    """Return the GPUs whose memory this process can open."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def open_outlet(
    lines: Mapping[str, Line], hellos: Hellos, device: torch.device, deadline: Wait, *, through_host: bool = False
) -> Outlet:
    """Set ``through_host`` if the tensors do not stay in place, because handles to them would soon be invalid."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" and not through_host else None
    by_handle = gpu is not None and all(gpu in hello["gpus"] for hello in hellos.values())
    for line in lines.values():
        line.tell({"gpu": gpu if by_handle else None}, deadline)
    return _IpcOutlet(lines) if by_handle else _RingOutlet(lines, deadline)


def open_inlet(line: Line, deadline: Wait) -> Inlet:
    gpu = line.hear(deadline)["gpu"]
    return _RingInlet(line, deadline) if gpu is None else _IpcInlet(line, visible_gpus().index(gpu))


class _RingOutlet(Outlet):
    bucket_size = BUCKETS

    def __init__(self, lines: Mapping[str, Line], deadline: Wait) -> None:
        self._lines = lines
        descriptor = os.memfd_create("rollcall-weights")
        try:
            # Allocate all pages now, because a page that cannot be allocated later would kill the process.
            os.posix_fallocate(descriptor, 0, NUM_SLOTS * SLOT_BYTES)
            self._slots = _map(descriptor)
            for line in lines.values():
                line.send_descriptor(descriptor, deadline)
        finally:
            os.close(descriptor)

    def put(self, buckets: Iterable[Bucket], deadline: Wait) -> list[int]:
        sums: list[int] = []
        taken = dict.fromkeys(self._lines, 0)
        for index, bucket in enumerate(buckets):
            self._wait(taken, at_least=index - NUM_SLOTS + 1, deadline=deadline)
            sums.append(copy_summed(_parts(self._slots[index % NUM_SLOTS], bucket), bucket, total_of=bucket))
            for line in self._lines.values():
                line.write(b"+", deadline)
        self._wait(taken, at_least=len(sums), deadline=deadline)
        return sums

    def _wait(self, taken: dict[str, int], *, at_least: int, deadline: Wait) -> None:
        """Wait until every receiver has taken this many buckets."""
        for name, line in self._lines.items():
            while taken[name] < at_least:
                taken[name] += len(line.read_some(NUM_SLOTS, deadline))


class _RingInlet(Inlet):
    bucket_size = BUCKETS

    def __init__(self, line: Line, deadline: Wait) -> None:
        self._line = line
        descriptor = line.take_descriptor(deadline)
        try:
            self._slots = _map(descriptor)
        finally:
            os.close(descriptor)

    def each(self, buckets: Iterable[Bucket], deadline: Wait) -> Iterator[int]:
        there = 0
        for index, bucket in enumerate(buckets):
            if there <= index:
                # The sender sends nothing else before all buckets are taken, so every byte announces one bucket.
                there += len(self._line.read_some(NUM_SLOTS, deadline))
            total = copy_summed(bucket, _parts(self._slots[index % NUM_SLOTS], bucket), total_of=bucket)
            self._line.write(b"-", deadline)
            yield total


def _map(descriptor: int) -> list[Tensor]:
    """Return the slots as tensors, which keep the mapping alive."""
    return list(torch.frombuffer(mmap.mmap(descriptor, NUM_SLOTS * SLOT_BYTES), dtype=torch.uint8).split(SLOT_BYTES))


def _parts(slot: Tensor, bucket: Bucket) -> Sequence[Tensor]:
    """Return the parts of a slot for a bucket's spans."""
    sizes = [len(span) for span in bucket]
    return slot[: sum(sizes)].split(sizes)


class _IpcOutlet(Outlet):
    bucket_size = BUCKETS

    def __init__(self, lines: Mapping[str, Line]) -> None:
        self._lines = lines
        self._known: list[int] = []  # addresses for which the receivers have handles

    def put(self, buckets: Iterable[Bucket], deadline: Wait) -> list[int]:
        from torch.multiprocessing.reductions import reduce_tensor

        buckets = list(buckets)
        sums = [checksum(bucket) for bucket in buckets]  # copies to the host, and so waits for all earlier work
        spans = [span for bucket in buckets for span in bucket]
        addresses = [span.data_ptr() for span in spans]
        handles = None
        if addresses != self._known:
            # There is one handle per allocation, and each tensor is an offset into it; torch counts the allocation's users.
            handles = base64.b64encode(pickle.dumps([reduce_tensor(span)[1] for span in spans])).decode()
        for line in self._lines.values():
            line.tell({"handles": handles}, deadline)
        for line in self._lines.values():
            line.read_some(1, deadline)
        self._known = addresses
        return sums


class _IpcInlet(Inlet):
    bucket_size = BUCKETS

    def __init__(self, line: Line, device: int) -> None:
        self._line = line
        self._device = device
        self._spans: list[Tensor] = []

    def each(self, buckets: Iterable[Bucket], deadline: Wait) -> Iterator[int]:
        handles = self._line.hear(deadline)["handles"]
        if handles is not None:
            self._spans = [self._open(arguments) for arguments in pickle.loads(base64.b64decode(handles))]
        buckets, sources = list(buckets), iter(self._spans)
        for bucket in buckets:
            for span in bucket:
                span.copy_(next(sources), non_blocking=True)
        sums = [checksum(bucket) for bucket in buckets]  # this waits for the copies
        self._line.write(b"-", deadline)
        return iter(sums)

    def _open(self, arguments: tuple[Any, ...]) -> Tensor:
        """Open one of the sender's tensors. The same GPU may have a different index in the sender's process."""
        import inspect

        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        bound = inspect.signature(rebuild_cuda_tensor).bind(*arguments)
        bound.arguments["storage_device"] = self._device
        return rebuild_cuda_tensor(*bound.args, **bound.kwargs)
