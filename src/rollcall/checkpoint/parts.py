"""One process's parts of a checkpoint: copied to host memory while the run waits, written while it continues.

A part is plain safetensors. The key ``parts`` of its metadata says for each block which tensor it is of, where it begins there, and the
tensor's whole shape. PyTorch's own sharded format (torch.distributed.checkpoint) makes the run wait for less time
(``benchmarks/save.py`` compares them). What decides is what is left on the disk: blocks under the names of transformers, whose byte
ranges any reader of safetensors finds, a checksum of each file, and no pickle.
"""

from __future__ import annotations

import io
import json
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.base.atomic import fsync
from rollcall.base.patience import NodeDiskError, plain_disk_errors
from rollcall.base.wait import warn
from rollcall.checkpoint.store import Written
from rollcall.learner.layout import Block
from rollcall.model.stored.files import new_checksum
from rollcall.model.stored.safetensors import write_header

CHUNK_BYTES = 16 << 20  # written and added to the checksum at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTensor:
    """A block of a tensor in a part, and the values for it."""

    name: str  # of the whole tensor
    start: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype  # in the file
    values: Tensor  # of the block, on any device and of any type

    @classmethod
    def of(cls, block: Block, part: Tensor, *, dtype: torch.dtype, prefix: str = "") -> PartTensor:
        """``part`` is what a rank holds of the weight, or a tensor of the same shape."""
        values = block.of(part.detach())
        return cls(name=f"{prefix}{block.name}", start=block.start, whole=block.whole, dtype=dtype, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a checkpoint, before it is written."""

    name: str  # in the checkpoint
    kind: str  # weights, optimizer, state or model
    content: bytes | Sequence[PartTensor]


class PartWriter:
    """One save at a time: ``copy``, then ``start``, then ``written`` until it answers."""

    def __init__(self) -> None:
        self._memory: dict[str, HostMemory] = {}
        self._images: list[tuple[File, Tensor]] = []
        self._facts: dict[str, Any] = {}
        self._done: Future[Written] | None = None

    def copy(self, files: Iterable[File], *, facts: dict[str, Any]) -> None:
        """Returns when the images are in host memory: what they were copied from may change then."""
        self._wait()
        self._images = [(file, self._image(file)) for file in files]
        self._facts = facts
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def start(self, folder: Path, *, place: Path | None = None) -> None:
        """Write to ``folder``, or the parts to ``place`` on this node and the rest to ``folder``."""
        self._wait()
        done: Future[Written] = Future()
        self._done = done

        def work() -> None:
            try:
                done.set_result(self._write(folder, place))
            except BaseException as error:  # noqa: BLE001 - the one who asks for the result gets it
                done.set_exception(error)

        threading.Thread(target=work, name="write the checkpoint", daemon=True).start()

    def written(self) -> Written | None:
        """The result of the write, or None while it runs. Raises what the write raised."""
        assert self._done is not None, "start comes first"
        return self._done.result() if self._done.done() else None

    def _wait(self) -> None:
        """Waits until an earlier write has ended; its result is no longer needed."""
        if self._done is not None:
            self._done.exception()

    def _image(self, file: File) -> Tensor:
        if isinstance(file.content, bytes):
            return torch.frombuffer(bytearray(file.content), dtype=torch.uint8) if file.content else _nothing()
        memory = self._memory.setdefault(file.name, HostMemory())
        return image_of(file.content, memory)

    def _write(self, folder: Path, place: Path | None) -> Written:
        node = {"node": os.environ.get("NODE_RANK") or socket.gethostname(), "host": socket.gethostname()}
        files: dict[str, dict[str, Any]] = {}
        for file, image in self._images:
            is_part = not isinstance(file.content, bytes)
            path = (place if place is not None and is_part else folder) / file.name
            try:
                with plain_disk_errors(path):
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
    """Memory that grows as needed and is kept. With CUDA it is pinned, so that the device copies into it at full speed."""

    def __init__(self) -> None:
        self._all = _nothing()
        self._is_pinned = False

    def take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        if num_bytes > len(self._all):
            self.free()
            self._all = torch.empty(num_bytes, dtype=torch.uint8)
            self._is_pinned = pinned and self._pin()
        return self._all[:num_bytes]

    def _pin(self) -> bool:
        """Registered, not allocated by torch, which rounds the size of pinned memory up to a power of two."""
        runtime: Any = torch.cuda.cudart()
        if status := int(runtime.cudaHostRegister(self._all.data_ptr(), len(self._all), 0)):
            warn(
                f"{len(self._all):,} bytes of host memory for the copy of a checkpoint cannot be pinned (CUDA error {status}), so "
                "the run waits longer at every save"
            )
        return status == 0

    def free(self) -> None:
        if self._is_pinned:
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostUnregister(self._all.data_ptr())))
        self._all, self._is_pinned = _nothing(), False


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def image_of(tensors: Sequence[PartTensor], memory: HostMemory) -> Tensor:
    """The bytes of a safetensors file with these blocks, in host memory."""
    # The widest first: the bytes follow each other without gaps, and each number must lie at a multiple of its width.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    keys = _keys(ordered)
    parts = {
        key: {"name": tensor.name, "start": tensor.start, "shape": tensor.whole}
        for key, tensor in zip(keys, ordered, strict=True)
    }
    head = io.BytesIO()
    shapes = [(key, tensor.dtype, tensor.values.shape) for key, tensor in zip(keys, ordered, strict=True)]
    write_header(head, shapes, metadata={"format": "pt", "parts": json.dumps(parts, separators=(",", ":"))})
    begin = head.tell()
    sizes = [prod(tensor.values.shape) * tensor.dtype.itemsize for tensor in ordered]
    on_cuda = any(tensor.values.is_cuda for tensor in ordered)
    image = memory.take(begin + sum(sizes), pinned=on_cuda)
    image[:begin].copy_(torch.frombuffer(bytearray(head.getvalue()), dtype=torch.uint8))
    for tensor, size in zip(ordered, sizes, strict=True):
        if size:
            target = image[begin : begin + size].view(tensor.dtype).view(tensor.values.shape)
            target.copy_(tensor.values.to(tensor.dtype), non_blocking=True)
        begin += size
    return image


def _keys(tensors: Sequence[PartTensor]) -> list[str]:
    """A tensor's name, or where the part has several blocks of it, the name and a number."""
    seen: dict[str, int] = {}
    keys = []
    for tensor in tensors:
        number = seen[tensor.name] = seen.get(tensor.name, -1) + 1
        keys.append(f"{tensor.name}#{number}" if number else tensor.name)
    return keys


def write_image(image: Tensor, path: Path) -> str:
    """Write the bytes to the disk; returns their checksum."""
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
