"""One process's checkpoint parts: copied to host memory while the run waits, and written to disk while the run continues.

A part is a plain safetensors file. Its metadata key ``parts`` gives each block's tensor name, its start in that tensor, and the
tensor's full shape. With PyTorch's sharded format (torch.distributed.checkpoint) the run would wait less
(``benchmarks/save.py`` compares them). We use safetensors because of the resulting files: any safetensors reader finds the blocks
under their transformers names, each file has a checksum, and none contains a pickle.
"""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.base.atomic import fsync
from rollcall.base.patience import NodeDiskError
from rollcall.base.wait import warn
from rollcall.checkpoint.store import Written
from rollcall.learner.layout import Block
from rollcall.model.stored.files import new_checksum
from rollcall.model.stored.safetensors import write_header

CHUNK_BYTES = 16 << 20  # the number of bytes that are written and hashed at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTensor:
    """A block of a tensor in a part, with its values."""

    name: str  # of the full tensor
    start: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype  # in the file
    values: Tensor  # the block's values, on any device and in any dtype

    @classmethod
    def of(cls, block: Block, part: Tensor, *, dtype: torch.dtype, prefix: str = "") -> PartTensor:
        """Take ``block`` from ``part``, which is a rank's share of the weight or a tensor of the same shape."""
        values = block.of(part.detach())
        return cls(name=f"{prefix}{block.name}", start=block.start, whole=block.whole, dtype=dtype, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A checkpoint file before it is written."""

    name: str  # in the checkpoint
    kind: str  # weights, optimizer, state or model
    content: bytes | Sequence[PartTensor]


class PartWriter:
    """Writes one save at a time. Call ``copy``, then ``start``, then ``written`` until it returns a result."""

    def __init__(self) -> None:
        self._memory: dict[str, HostMemory] = {}
        self._images: list[tuple[File, Tensor]] = []
        self._facts: dict[str, Any] = {}
        self._done: Future[Written] | None = None

    def copy(self, files: Iterable[File], *, facts: dict[str, Any]) -> None:
        """Copy the files to host memory. Once this returns, the sources may change."""
        self._wait()
        self._images = [(file, self._image(file)) for file in files]
        self._facts = facts
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def start(self, folder: Path, *, place: Path | None = None) -> None:
        """Start writing to ``folder``. If ``place`` is set, the parts go to that folder on this node."""
        self._wait()
        done: Future[Written] = Future()
        self._done = done

        def work() -> None:
            try:
                done.set_result(self._write(folder, place))
            except BaseException as error:  # noqa: BLE001 - raised by ``written``
                done.set_exception(error)

        threading.Thread(target=work, name="write the checkpoint", daemon=True).start()

    def written(self) -> Written | None:
        """Return the result of the write, or None while it is running. If the write failed, raises its error."""
        assert self._done is not None, "start comes first"
        return self._done.result() if self._done.done() else None

    def _wait(self) -> None:
        """Wait for an earlier write to end, and ignore its result."""
        if self._done is not None:
            self._done.exception()

    def _image(self, file: File) -> Tensor:
        if isinstance(file.content, bytes):
            return torch.frombuffer(bytearray(file.content), dtype=torch.uint8) if file.content else _nothing()
        return image_of(file.content, self._memory.setdefault(file.name, HostMemory()))

    def _write(self, folder: Path, place: Path | None) -> Written:
        node = {"node": os.environ.get("NODE_RANK") or socket.gethostname(), "host": socket.gethostname()}
        files: dict[str, dict[str, Any]] = {}
        for file, image in self._images:
            is_part = not isinstance(file.content, bytes)
            path = (place if place is not None and is_part else folder) / file.name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                digest = write_image(image, path)
            except OSError as error:
                if place is None or not is_part:
                    raise
                raise NodeDiskError(error.errno, error.strerror, f"{node['host']}:{path}") from error
            there = {"place": str(path)} if place is not None and is_part else {}
            files[file.name] = {"size": len(image), "blake2b": digest, "kind": file.kind, **node, **there}
        return Written(files=files, facts=self._facts)


class HostMemory:
    """A reusable buffer that grows as needed. With CUDA it is pinned, so that the GPU copies into it at full speed."""

    def __init__(self) -> None:
        self._all = _nothing()
        self._unpin: weakref.finalize[..., HostMemory] | None = None

    def take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        if num_bytes > len(self._all):
            self.free()
            self._all = torch.empty(num_bytes, dtype=torch.uint8)
            if pinned:
                self._pin()
        return self._all[:num_bytes]

    def _pin(self) -> None:
        """Register the memory as pinned. torch's own allocator would round its size up to a power of two."""
        address = self._all.data_ptr()
        runtime: Any = torch.cuda.cudart()
        if status := int(runtime.cudaHostRegister(address, len(self._all), 0)):
            with suppress(RuntimeError):  # otherwise CUDA would report this error with the next kernel
                torch.zeros(1, device="cuda")
            what = f"{len(self._all):,} bytes of host memory for checkpoints"
            warn(f"{what} cannot be pinned (CUDA error {status}), so each save makes the run wait longer")
            return
        # Unpin even if nobody calls free. Otherwise CUDA would treat later tensors at this address as pinned, and refuse to copy them.
        self._unpin = weakref.finalize(self, lambda: torch.cuda.check_error(int(runtime.cudaHostUnregister(address))))
        self._unpin.atexit = False

    def free(self) -> None:
        if self._unpin is not None:
            self._unpin()
        self._all, self._unpin = _nothing(), None


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def image_of(tensors: Sequence[PartTensor], memory: HostMemory) -> Tensor:
    """Build a safetensors file with these blocks in host memory."""
    # Widest dtype first, because tensors follow each other without gaps and each number must be aligned to its width.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    keyed: dict[str, PartTensor] = {}  # by name, with a number added if the part contains several blocks of a tensor
    seen = Counter[str]()
    for one in ordered:
        keyed[f"{one.name}#{seen[one.name]}" if seen[one.name] else one.name] = one
        seen[one.name] += 1
    parts = {key: {"name": one.name, "start": one.start, "shape": one.whole} for key, one in keyed.items()}
    head = io.BytesIO()
    shapes = [(key, one.dtype, one.values.shape) for key, one in keyed.items()]
    write_header(head, shapes, metadata={"format": "pt", "parts": json.dumps(parts, separators=(",", ":"))})
    begin = head.tell()
    sizes = [prod(tensor.values.shape) * tensor.dtype.itemsize for tensor in ordered]
    image = memory.take(begin + sum(sizes), pinned=any(tensor.values.is_cuda for tensor in ordered))
    image[:begin].copy_(torch.frombuffer(bytearray(head.getvalue()), dtype=torch.uint8))
    for tensor, size in zip(ordered, sizes, strict=True):
        if size:
            target = image[begin : begin + size].view(tensor.dtype).view(tensor.values.shape)
            target.copy_(tensor.values.to(tensor.dtype), non_blocking=True)
        begin += size
    return image


def write_image(image: Tensor, path: Path) -> str:
    """Write the bytes to disk and return their checksum."""
    digest = new_checksum()
    data: memoryview = image.numpy().data
    with path.open("wb") as file:
        for begin in range(0, len(data), CHUNK_BYTES):
            chunk = data[begin : begin + CHUNK_BYTES]
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    fsync(path.parent)
    return digest.hexdigest()
