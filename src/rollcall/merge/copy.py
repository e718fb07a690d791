"""Copies one unit: reads its range once in order, checks it, writes each element to its place.

Memory is one buffer of ``CHUNK`` bytes for each thread, whatever the size of the tensors; it is small, so that what was read is
still in the processor's cache when it is checked and written.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from math import prod

from rollcall.merge.plan import Copy, Unit
from rollcall.stored.files import StoredError, StoredFile, new_checksum, read_fully

CHUNK = 512 << 10  # a multiple of every element's size
ELEMENT = 16  # bytes of the largest


def copy_unit(unit: Unit, outs: Sequence[int], *, advance: Callable[[int], None]) -> None:
    """``outs`` are the descriptors of the written files; ``advance`` gets the number of copied bytes."""
    checks = _Checks(unit)
    fd = os.open(unit.file.path, os.O_RDONLY)
    try:
        if (size := os.fstat(fd).st_size) != unit.file.size:
            raise StoredError(f"{unit.file} has {size:,} bytes instead of {unit.file.size:,}; restore the file")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        reader = _Reader(fd, unit.file)
        for at, end, copies in _spans(unit):
            while at < end:
                data = reader.some(at, end)
                checks.take(data, at)
                for copy in copies:
                    _write(copy, data, at, outs)
                    advance(len(data))
                at += len(data)
        checks.end()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # it is read once; leave the cache to others
    finally:
        os.close(fd)


def _spans(unit: Unit) -> Iterator[tuple[int, int, list[Copy]]]:
    """The ranges to read, in order: what is copied, and what a checksum covers. Every copy takes all of a range, or nothing."""
    covered = [(one.offset, one.offset + one.size) for one in unit.records]
    if unit.file.blake2b is not None:
        covered = [(0, unit.file.size)]
    ranges = [*covered, *((one.begin, one.end) for one in unit.copies)]
    edges = sorted({edge for pair in ranges for edge in pair})
    covered, waiting, active = covered[::-1], list(unit.copies)[::-1], []
    for begin, end in zip(edges, edges[1:], strict=False):
        while waiting and waiting[-1].begin <= begin:
            active.append(waiting.pop())
        active = [copy for copy in active if copy.end > begin]
        while covered and covered[-1][1] <= begin:
            covered.pop()
        if active or (covered and covered[-1][0] <= begin):
            yield begin, end, active


class _Reader:
    """Reads a file in chunks, in order; small ranges that lie together come from one chunk."""

    def __init__(self, fd: int, file: StoredFile) -> None:
        self._fd, self._file = fd, file
        self._buffer = memoryview(bytearray(CHUNK))
        self._begin = self._end = 0  # of what the buffer holds

    def some(self, at: int, end: int) -> memoryview:
        """The bytes from ``at`` on, at most to ``end``; whole elements of a tensor that begins or goes on at ``at``."""
        if self._begin <= at < self._end:
            stop = min(end, self._end)
            if stop < end:
                stop -= (stop - at) % ELEMENT
            if stop > at:
                return self._buffer[at - self._begin : stop - self._begin]
        size = min(CHUNK, self._file.size - at)
        read_fully(self._fd, self._buffer[:size], at, file=self._file)
        self._begin, self._end = at, at + size
        return self._buffer[: min(size, end - at)]


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
                raise self._changed(f"its bytes {record.offset:,} to {ends:,} are")
            self._records.pop()
            self._crc = 0

    def end(self) -> None:
        if self._whole is not None and self._whole.hexdigest() != self._file.blake2b:
            raise self._changed("it is")
        assert not self._records, "a record was not read to its end"

    def _changed(self, what: str) -> StoredError:
        return StoredError(
            f"{self._file}: {what} not as written (the checksum differs); copy the file from where it was written again, or use "
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
    outer = _outer(copy)
    run = prod(copy.piece.shape[outer:])  # elements that lie together in the whole tensor
    done, count = 0, len(data) // width
    while done < count:
        number, inside = divmod(first + done, run)
        num = min(run - inside, count - done)
        place = copy.offset + (_begin_of_run(copy, number, outer=outer) + inside) * width
        _pwrite(fd, data[done * width : (done + num) * width], place)
        done += num


def _outer(copy: Copy) -> int:
    """How many of a piece's dimensions lie outside of a run of elements that lie together in the whole tensor."""
    dim = len(copy.shape)
    while dim and copy.piece.shape[dim - 1] == copy.shape[dim - 1]:
        dim -= 1
    return max(dim - 1, 0)


def _begin_of_run(copy: Copy, number: int, *, outer: int) -> int:
    """Where a run of a piece begins in the whole tensor, in elements."""
    at = list(copy.piece.start)
    for dim in reversed(range(outer)):
        number, index = divmod(number, copy.piece.shape[dim])
        at[dim] += index
    place = 0
    for index, size in zip(at, copy.shape, strict=True):
        place = place * size + index
    return place


def _converted(data: memoryview, copy: Copy) -> memoryview:
    import torch

    target = copy.written.torch
    stored = torch.frombuffer(data, dtype=copy.stored.torch)
    written = stored.to(target)
    if torch.finfo(target).max < torch.finfo(stored.dtype).max and not torch.equal(
        stored.isfinite(), written.isfinite()
    ):
        raise StoredError(
            f"{copy.piece.file}: some weights are too large for {target}, where they would be infinite; use --dtype bf16 or keep"
        )
    return written.view(torch.uint8).numpy().data


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        num = os.pwrite(fd, data, offset)
        data, offset = data[num:], offset + num
