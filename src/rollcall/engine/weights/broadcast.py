"""Sends weights to processes on other hosts with a broadcast in a separate process group.

The group's members rendezvous through the sender's key-value store (``nodes/meeting.py``). The group is separate from the learner's
group, so that it can be created again with other members when a member is lost. Only invited receivers get its secret, over their
lines. It uses NCCL if every member is on a GPU, and otherwise gloo. Two buckets are in flight at a time. The sender computes a bucket's
checksum before sending it, a receiver when it arrives. A large span goes directly from tensor to tensor; small spans are packed together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollcall.base.errors import MissingPeerError
from rollcall.base.wait import Wait
from rollcall.engine.weights.line import Line
from rollcall.engine.weights.protocol import Bucket, BucketSize, Hellos, Inlet, Outlet
from rollcall.model.checksum import checksum, copy_summed
from rollcall.nodes.door import listen_at, new_secret
from rollcall.nodes.meeting import MeetingServer, MeetingStore, Place, greet

BUCKETS = BucketSize(num_bytes=4 << 20, alone_from=1 << 20)
IN_FLIGHT = 2
LOOK_S = 1.0
POLL_S = 0.001


class _Group:
    """One member's end of a process group in which rank 0 sends."""

    def __init__(self, *, backend: str, place: Place, rank: int, size: int, address: str, deadline: Wait) -> None:
        self.backend = backend
        self._store = store = MeetingStore(place, timeout_s=deadline.left_s)
        timeout = timedelta(seconds=deadline.timeout_s)
        if backend == "nccl":
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's stubs
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = timeout
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
            greet(self._group, store, name="weights", rank=rank, members=range(size), secret=place.secret)
        self._scratch: list[Tensor] = []
        self._turn = 0
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def close(self) -> None:
        self._group = None
        self._store.close()

    def start(self, parts: Bucket) -> Any:
        """Start a broadcast. ``parts`` are adjacent in memory."""
        first = parts[0]
        flat = first if len(parts) == 1 else first.as_strided((sum(map(len, parts)),), (1,))
        return self._group.broadcast([flat], self._options)

    def finish(self, work: Any, lines: Mapping[str, Line], deadline: Wait) -> None:
        """Wait for a broadcast. Watch the lines as well, because the group does not always notice a peer that has given up."""
        while True:
            try:
                if self.backend == "gloo":
                    work.wait(timedelta(seconds=min(LOOK_S, deadline.left_s)))
                    return
                if work.is_completed():  # NCCL's own wait blocks only the stream, not this thread
                    work.wait()
                    return
                time.sleep(POLL_S)
            except RuntimeError:
                if work.is_completed():
                    raise
            if deadline.is_over or any(line.is_closed() for line in lines.values()):
                raise RuntimeError("the broadcast did not finish")
            deadline.tell(f"weights: waiting for the broadcast with {', '.join(lines)}")

    def travels_as_is(self, bucket: Bucket) -> bool:
        return len(bucket) == 1 and (self.backend == "nccl" or bucket[0].device.type == "cpu")

    def scratch(self, bucket: Bucket) -> list[Tensor]:
        """Return a buffer for a bucket that cannot be sent directly: one flat tensor, split like the bucket. The buffer is reused after
        ``IN_FLIGHT + 2`` buckets."""
        device = bucket[0].device if self.backend == "nccl" else torch.device("cpu")
        if not self._scratch:
            self._scratch = list(torch.empty((IN_FLIGHT + 2, BUCKETS.num_bytes), dtype=torch.uint8, device=device))
        self._turn = (self._turn + 1) % len(self._scratch)
        flat = self._scratch[self._turn][: sum(map(len, bucket))]
        return list(flat.split([len(span) for span in bucket]))


class BroadcastOutlet(Outlet):
    bucket_size = BUCKETS

    def __init__(self, lines: Mapping[str, Line], hellos: Hellos, device: torch.device, deadline: Wait) -> None:
        on_gpus = device.type == "cuda" and all(hello["device"] == "cuda" for hello in hellos.values())
        backend, size = "nccl" if on_gpus else "gloo", len(lines) + 1
        self._lines = lines
        address = _own_address(next(iter(lines.values())))
        listener = listen_at(address)  # listen before the receivers learn the port
        place = Place(address=address, port=listener.getsockname()[1], secret=new_secret())
        self._server = MeetingServer(listener, secret=place.secret)
        told = {"backend": backend, "port": place.port, "secret": place.secret, "size": size}
        try:
            for rank, line in enumerate(lines.values(), start=1):
                line.tell({**told, "rank": rank}, deadline)
            with _naming(lines, deadline):
                self._group = _Group(
                    backend=backend, place=place, rank=0, size=size, address=address, deadline=deadline
                )
        except BaseException:
            self._server.close()
            raise

    def put(self, buckets: Iterable[Bucket], deadline: Wait) -> list[int]:
        group = self._group
        sums: list[int] = []
        flying: deque[tuple[Any, Bucket]] = deque()  # keeps each bucket alive until its bytes have been sent
        with _naming(self._lines, deadline):
            for bucket in buckets:
                parts = bucket
                if group.travels_as_is(bucket):
                    sums.append(checksum(bucket))  # compute this first, so that the bytes are in the cache
                else:
                    parts = group.scratch(bucket)
                    sums.append(copy_summed(parts, bucket, total_of=bucket))
                flying.append((group.start(parts), parts))
                if len(flying) > IN_FLIGHT:
                    group.finish(flying.popleft()[0], self._lines, deadline)
            for work, _ in flying:
                group.finish(work, self._lines, deadline)
        return sums

    def close(self) -> None:
        self._group.close()
        self._server.close()


class BroadcastInlet(Inlet):
    bucket_size = BUCKETS

    def __init__(self, line: Line, deadline: Wait) -> None:
        told = line.hear(deadline)
        self._line = line
        place = Place(address=_address(line.socket.getpeername()), port=told["port"], secret=told["secret"])
        with _naming({line.peer: line}, deadline):
            self._group = _Group(
                backend=told["backend"],
                place=place,
                rank=told["rank"],
                size=told["size"],
                address=_own_address(line),
                deadline=deadline,
            )

    def each(self, buckets: Iterable[Bucket], deadline: Wait) -> Iterator[int]:
        group, line = self._group, self._line
        flying: deque[tuple[Any, Bucket, Bucket]] = deque()

        def land() -> int:
            work, parts, bucket = flying.popleft()
            group.finish(work, {line.peer: line}, deadline)
            return checksum(bucket) if parts is bucket else copy_summed(bucket, parts, total_of=bucket)

        with _naming({line.peer: line}, deadline):
            for bucket in buckets:
                parts = bucket if group.travels_as_is(bucket) else group.scratch(bucket)
                flying.append((group.start(parts), parts, bucket))
                if len(flying) > IN_FLIGHT:
                    yield land()
            while flying:
                yield land()

    def close(self) -> None:
        self._group.close()


@contextmanager
def _naming(lines: Mapping[str, Line], deadline: Wait) -> Iterator[None]:
    """Name the lost peer in the error. The collective's own error does not name it, but the peer's line is closed."""
    try:
        yield
    except MissingPeerError:
        raise
    except RuntimeError as error:
        gone = ", ".join(name for name, line in lines.items() if line.is_closed())
        failed = f"the weight broadcast with {', '.join(lines)} failed; its time limit is {deadline.timeout_s:g} s"
        why = f"{gone} disconnected during a weight update" if gone else failed
        raise MissingPeerError(f"{why} ({str(error).splitlines()[0]})") from error


def _address(name: tuple[Any, ...]) -> str:
    return str(name[0]).removeprefix("::ffff:")


def _own_address(line: Line) -> str:
    """Return the address at which the peer reaches this process."""
    return _address(line.socket.getsockname())
