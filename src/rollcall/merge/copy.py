"""Copy one unit: read its range once in order, check it, write each element to its place.

Memory is a few buffers of ``CHUNK`` bytes for each thread, whatever the size of the tensors.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from rollcall.merge.plan import Copy, Unit
from rollcall.stored.files import StoredError, StoredFile, new_checksum

CHUNK = 8 << 20  # a multiple of every element's size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A range of the file; every one of ``copies`` takes all of it."""

    begin: int
    end: int
    copies: tuple[Copy, ...]


def copy_unit(unit: Unit, outs: Sequence[int], *, advance: Callable[[int], None]) -> None:
    """``outs`` are the descriptors of the written files; ``advance`` is told the number of copied bytes."""
    checks = _Checks(unit)
    buffer = memoryview(bytearray(CHUNK))
    fd = os.open(unit.file.path, os.O_RDONLY)
    try:
        if (size := os.fstat(fd).st_size) != unit.file.size:
            raise StoredError(f"{unit.file} has {size:,} bytes instead of {unit.file.size:,}; restore the file")
        for span in _spans(unit):
            at = span.begin
            while at < span.end:
                data = buffer[: min(CHUNK, span.end - at)]
                _read(fd, data, at, file=unit.file)
                checks.take(data, at)
                for copy in span.copies:
                    _write(copy, data, at, outs)
                    advance(len(data))
                at += len(data)
        checks.end()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # it is read once; leave the cache to others
    finally:
        os.close(fd)


def _spans(unit: Unit) -> Iterator[_Span]:
    """The ranges to read, in order: what is copied, and what a checksum covers."""
    if unit.file.blake2b is not None:
        covered = [(0, unit.file.size)]
    else:
        covered = [(record.offset, record.offset + record.size) for record in unit.records]
    edges = sorted(
        {*(edge for pair in covered for edge in pair), *(e for one in unit.copies for e in (one.begin, one.end))}
    )
    checked, waiting, active = iter([*covered, (unit.file.size + 1, unit.file.size + 1)]), list(unit.copies)[::-1], []
    check = next(checked)
    for begin, end in zip(edges, edges[1:], strict=False):
        while waiting and waiting[-1].begin <= begin:
            active.append(waiting.pop())
        active = [copy for copy in active if copy.end > begin]
        while check[1] <= begin:
            check = next(checked)
        if active or check[0] <= begin:
            yield _Span(begin=begin, end=end, copies=tuple(active))


def _read(fd: int, data: memoryview, offset: int, *, file: StoredFile) -> None:
    while data:
        if not (num := os.preadv(fd, [data], offset)):
            raise StoredError(f"{file} ends at byte {offset:,}: it was cut off while it was read; restore the file")
        data, offset = data[num:], offset + num


class _Checks:
    """The checksums of a unit, over bytes that arrive in order."""

    def __init__(self, unit: Unit) -> None:
        self._file = unit.file
        self._whole = new_checksum() if unit.file.blake2b is not None else None
        self._records = list(unit.records)[::-1]
        self._crc = 0

    def take(self, data: memoryview, offset: int) -> None:
        if self._whole is not None:
            self._whole.update(data)
            return
        while data and self._records and self._records[-1].offset < offset + len(data):
            record = self._records[-1]
            ends = record.offset + record.size
            begin = max(record.offset - offset, 0)
            self._crc = zlib.crc32(data[begin : ends - offset], self._crc)
            if ends > offset + len(data):
                return
            if self._crc != record.crc32:
                raise self._changed(f"its bytes {record.offset:,} to {ends:,}")
            self._records.pop()
            self._crc = 0

    def end(self) -> None:
        if self._whole is not None and self._whole.hexdigest() != self._file.blake2b:
            raise self._changed("it")
        assert not self._records, "a record was not read to its end"

    def _changed(self, what: str) -> StoredError:
        are = "is" if what == "it" else "are"
        return StoredError(
            f"{self._file}: {what} {are} not as written (the checksum differs); copy the file from where it was written again, or use "
            "another checkpoint"
        )


def _write(copy: Copy, data: memoryview, at: int, outs: Sequence[int]) -> None:
    """Write the bytes of a piece that begin at ``at`` of the stored file."""
    behind = at - copy.begin
    if behind % copy.stored.itemsize or len(data) % copy.stored.itemsize:
        raise StoredError(
            f"{copy.piece.file}: two tensors share bytes {at:,} in a way that no writer leaves; restore the file"
        )
    first = behind // copy.stored.itemsize
    if copy.written != copy.stored:
        data = _converted(data, copy)
    width = copy.written.itemsize
    fd = outs[copy.file]
    run, starts = _runs(copy)
    if len(starts) == 1:
        _pwrite(fd, data, copy.offset + (int(starts[0]) + first) * width)
        return
    done, count = 0, len(data) // width
    while done < count:
        number, inside = divmod(first + done, run)
        num = min(run - inside, count - done)
        _pwrite(fd, data[done * width : (done + num) * width], copy.offset + (int(starts[number]) + inside) * width)
        done += num


def _runs(copy: Copy) -> tuple[int, np.ndarray[Any, Any]]:
    """How many elements of a piece lie together in the whole tensor, and where each such run begins there, in elements."""
    piece, whole = copy.piece, copy.shape
    dim = len(whole)
    while dim and piece.shape[dim - 1] == whole[dim - 1]:
        dim -= 1
    outer = max(dim - 1, 0)  # what lies outside of a run
    strides = [prod(whole[d + 1 :]) for d in range(len(whole))]
    starts = np.array([sum(a * s for a, s in zip(piece.start, strides, strict=True))], dtype=np.int64)
    for d in range(outer):
        steps = np.arange(piece.shape[d], dtype=np.int64) * strides[d]
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return prod(piece.shape[outer:]), starts


def _converted(data: memoryview, copy: Copy) -> memoryview:
    stored = torch.frombuffer(data, dtype=copy.stored)
    written = stored.to(copy.written)
    if torch.finfo(copy.written).max < torch.finfo(copy.stored).max and not torch.equal(
        stored.isfinite(), written.isfinite()
    ):
        raise StoredError(
            f"{copy.piece.file}: some weights are too large for {copy.written}, where they would be infinite; use --dtype bf16 or keep"
        )
    return written.view(torch.uint8).numpy().data


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        num = os.pwrite(fd, data, offset)
        data, offset = data[num:], offset + num
