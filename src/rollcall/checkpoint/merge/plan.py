"""Plans a merge byte by byte and copies its units.

A unit is a range in a stored file that is read once, in order, and verified while it is read. Each element goes to its place in the
output. Progress is recorded per unit, so an interrupted merge continues with the missing units. Each thread uses one buffer of ``CHUNK``
bytes, which is small enough for the CPU cache to hold the data until it is verified and written.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path

from rollcall.base.append_file import write_at
from rollcall.model.stored.files import CheckedRange, StoredError, StoredFile, new_checksum, read_fully
from rollcall.model.stored.safetensors import write_header
from rollcall.model.stored.tensors import DType, Piece, Stored, StoredTensor

UNIT_BYTES = 256 << 20
CHUNK = 512 << 10  # a multiple of every element's size


@dataclass(frozen=True, slots=True, kw_only=True)
class OutFile:
    name: str
    header: bytes
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A stored piece and its target: the tensor that begins at byte ``offset`` of output file number ``file``."""

    piece: Piece
    stored: DType
    written: DType
    shape: tuple[int, ...]  # of the full tensor
    file: int
    offset: int

    @property
    def begin(self) -> int:
        return self.piece.offset

    @property
    def end(self) -> int:
        return self.piece.offset + self.piece.num_elements * self.stored.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    file: StoredFile
    copies: tuple[Copy, ...]
    records: tuple[CheckedRange, ...]  # the records to verify; empty if the file has a single checksum or none

    @property
    def name(self) -> str:
        return f"{self.file.path}:{min((copy.begin for copy in self.copies), default=0)}"

    @property
    def num_bytes(self) -> int:
        return sum(copy.end - copy.begin for copy in self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    files: tuple[OutFile, ...]
    units: tuple[Unit, ...]
    weight_map: Mapping[str, str]
    num_bytes: int  # of the tensors, as written
    fingerprint: str

    def index(self) -> str | None:
        """Return the index for the output files, or None if there is only one file."""
        if len(self.files) == 1:
            return None
        metadata = {"total_size": self.num_bytes}
        return json.dumps({"metadata": metadata, "weight_map": dict(sorted(self.weight_map.items()))}, indent=2) + "\n"


def plan_merge(stored: Stored, names: Sequence[str], *, dtype: DType | None, max_shard_size: int) -> MergePlan:
    """Plan to write the tensors ``names`` in this order. Converts floating-point tensors to ``dtype``, unless it is None."""
    written = {name: written_dtype(stored.tensors[name], dtype) for name in names}
    if unknown := next((name for name in names if written[name].in_safetensors is None), None):
        file = next((str(piece.file) for piece in stored.tensors[unknown].pieces), stored.origin)
        raise StoredError(
            f"{file}: {unknown} is of type {written[unknown]}, which safetensors cannot store; use --dtype bf16, fp16 or fp32, or "
            "save it in another type"
        )
    sizes = {name: prod(stored.tensors[name].shape) * written[name].itemsize for name in names}
    shards = _shards(names, sizes, most=max_shard_size)
    files: list[OutFile] = []
    copies: dict[Path, list[Copy]] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        header = io.BytesIO()
        shapes = ((one, written[one], stored.tensors[one].shape) for one in shard)
        write_header(header, shapes, metadata={"format": "pt"})
        offset = len(header.getvalue())
        for one in shard:
            tensor = stored.tensors[one]
            for piece in tensor.pieces:
                if piece.num_elements:
                    copies.setdefault(piece.file, []).append(
                        Copy(piece=piece, stored=tensor.dtype, written=written[one], shape=tensor.shape, file=number, offset=offset)
                    )  # fmt: skip
            offset += sizes[one]
            weight_map[one] = name
        files.append(OutFile(name=name, header=header.getvalue(), size=offset))
    units = tuple(unit for path in sorted(copies) for unit in _units(stored.files[path], copies[path]))
    return MergePlan(
        files=tuple(files),
        units=units,
        weight_map=weight_map,
        num_bytes=sum(sizes.values()),
        fingerprint=_fingerprint(files, units),
    )


def written_dtype(tensor: StoredTensor, dtype: DType | None) -> DType:
    return tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype


def _shards(names: Sequence[str], sizes: Mapping[str, int], *, most: int) -> list[list[str]]:
    """Split tensors into files of at most ``most`` bytes. A tensor that is larger gets its own file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in names:
        if shards[-1] and filled + sizes[name] > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += sizes[name]
    return shards


def _units(file: StoredFile, copies: Iterable[Copy]) -> list[Unit]:
    """Return one unit if the file has a single checksum, otherwise units of about UNIT_BYTES that share no record."""
    ordered = sorted(copies, key=lambda copy: copy.begin)
    if file.blake2b is not None:
        return [Unit(file=file, copies=tuple(ordered), records=())]
    records = sorted((one for one in file.records if one.crc32 and one.size), key=lambda one: one.offset)
    groups: list[list[Copy]] = []
    held: list[list[CheckedRange]] = []
    filled, reached, at = 0, 0, 0
    for copy in ordered:
        if not groups or (filled >= UNIT_BYTES and copy.begin >= reached):
            groups.append([])
            held.append([])
            filled = 0
        while at < len(records) and records[at].offset < copy.end:
            if records[at].offset + records[at].size > copy.begin:
                held[-1].append(records[at])
                reached = max(reached, records[at].offset + records[at].size)
            at += 1
        groups[-1].append(copy)
        filled += copy.end - copy.begin
        reached = max(reached, copy.end)
    return [Unit(file=file, copies=tuple(group), records=tuple(own)) for group, own in zip(groups, held, strict=True)]


def _fingerprint(files: Sequence[OutFile], units: Sequence[Unit]) -> str:
    """Return a hash. Plans that read the same files and write the same bytes have the same hash."""
    digest = blake2b(digest_size=16)
    for out in files:
        digest.update(f"{out.name} {out.size} ".encode() + out.header)
    for unit in units:
        modified = unit.file.path.stat().st_mtime_ns
        digest.update(f"{unit.name} {unit.file.size} {unit.file.blake2b} {modified} {len(unit.copies)}".encode())
        for copy in unit.copies:
            digest.update(f"{copy.begin} {copy.piece.start} {copy.piece.shape} {copy.file} {copy.offset}".encode())
    return digest.hexdigest()


# Copying


def copy_unit(unit: Unit, outs: Sequence[int], *, advance: Callable[[int], None]) -> None:
    """Copy one unit. ``outs`` are the output file descriptors; ``advance`` receives the number of bytes copied."""
    checks = _Checks(unit)
    fd = os.open(unit.file.path, os.O_RDONLY)
    try:
        if (size := os.fstat(fd).st_size) != unit.file.size:
            raise StoredError(f"{unit.file} has {size:,} bytes instead of {unit.file.size:,}; restore the file")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffer = memoryview(bytearray(CHUNK))
        for at, end, copies in _spans(unit):
            while at < end:
                data = buffer[: end - at]
                read_fully(fd, data, at, file=unit.file)
                checks.take(data, at)
                for copy in copies:
                    _write(copy, data, at, outs)
                    advance(len(data))
                at += len(data)
        checks.end()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the file is read only once, so free the page cache
    finally:
        os.close(fd)


def _spans(unit: Unit) -> Iterator[tuple[int, int, list[Copy]]]:
    """Yield the ranges to read, in order, each with its copies. They cover everything that is copied or has a checksum."""
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


class _Checks:
    """Verifies a unit's checksums. The bytes must arrive in order."""

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
                raise self._changed(f"bytes {record.offset:,} to {ends:,} have")
            self._records.pop()
            self._crc = 0

    def end(self) -> None:
        if self._whole is not None and self._whole.hexdigest() != self._file.blake2b:
            raise self._changed("the file has")
        assert not self._records, "a record was not read to its end"

    def _changed(self, what: str) -> StoredError:
        advice = "copy it again from its source, or use another checkpoint"
        return StoredError(f"{self._file}: {what} changed since it was written (its checksum differs); {advice}")


def _write(copy: Copy, data: memoryview, at: int, outs: Sequence[int]) -> None:
    """Write the bytes of a piece that begin at offset ``at`` in the stored file."""
    behind = at - copy.begin
    if behind % copy.stored.itemsize or len(data) % copy.stored.itemsize:
        where = f"at byte {at:,} in the middle of an element"
        raise StoredError(f"{copy.piece.file}: two tensors overlap {where}, so the file is damaged; restore it")
    first = behind // copy.stored.itemsize
    if copy.written != copy.stored:
        data = _converted(data, copy)
    width = copy.written.itemsize
    fd = outs[copy.file]
    # For each index of the first ``outer`` dimensions, the rest of the piece is contiguous in the full tensor.
    dim = len(copy.shape)
    while dim and copy.piece.shape[dim - 1] == copy.shape[dim - 1]:
        dim -= 1
    outer = max(dim - 1, 0)
    run = prod(copy.piece.shape[outer:])  # number of elements that are contiguous in the full tensor
    done, count = 0, len(data) // width
    while done < count:
        number, inside = divmod(first + done, run)
        num = min(run - inside, count - done)
        place = copy.offset + (_begin_of_run(copy, number, outer=outer) + inside) * width
        write_at(fd, data[done * width : (done + num) * width], place)
        done += num


def _begin_of_run(copy: Copy, number: int, *, outer: int) -> int:
    """Return the index in the full tensor, in elements, where a run of the piece begins."""
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
    # Not all float8 types know isfinite, and none of them is wider than a target.
    narrower = torch.finfo(target).max < torch.finfo(stored.dtype).max
    if narrower and not torch.equal(stored.isfinite(), written.isfinite()):
        raise StoredError(f"{copy.piece.file}: some weights would be infinite in {target}; use --dtype bf16 or keep")
    return written.view(torch.uint8).numpy().data
