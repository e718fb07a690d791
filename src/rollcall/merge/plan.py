"""The plan of a merge: what the written files look like, byte by byte, and which ranges of which stored files go where.

A unit is a range of a stored file that is read once, in order, and checked while it is read. It is also the step of progress: a
merge that was interrupted continues with the units that are missing.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path

from rollcall.stored.dtypes import DType
from rollcall.stored.files import CheckedRange, StoredError, StoredFile
from rollcall.stored.safetensors import write_header
from rollcall.stored.tensors import Piece, Stored, StoredTensor

UNIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OutFile:
    name: str
    header: bytes
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A piece and where it goes: the tensor that begins at byte ``offset`` of the written file ``file``."""

    piece: Piece
    stored: DType
    written: DType
    shape: tuple[int, ...]  # of the whole tensor
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
    records: tuple[CheckedRange, ...]  # to check; empty where the whole file has a checksum, or nothing has

    @property
    def name(self) -> str:
        begin = min((copy.begin for copy in self.copies), default=0)
        return f"{self.file.path}:{begin}"

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
        """The index of the written files; None where there is only one."""
        if len(self.files) == 1:
            return None
        metadata = {"total_size": self.num_bytes}
        return json.dumps({"metadata": metadata, "weight_map": dict(sorted(self.weight_map.items()))}, indent=2) + "\n"


def plan_merge(stored: Stored, names: Sequence[str], *, dtype: DType | None, max_shard_size: int) -> MergePlan:
    """``names``: the tensors to write, in this order. ``dtype`` is for those that are floating-point; None keeps each one's."""
    written = {name: written_dtype(stored.tensors[name], dtype) for name in names}
    if unknown := next((name for name in names if written[name].in_safetensors is None), None):
        file = next((str(piece.file) for piece in stored.tensors[unknown].pieces), stored.origin)
        raise StoredError(
            f"{file}: {unknown} is of type {written[unknown]}, which safetensors does not have; give --dtype bf16, fp16 or fp32, or "
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
    """Files of at most ``most`` bytes of tensors; a larger tensor has a file of its own."""
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
    """One unit where the whole file has a checksum, else units of about UNIT_BYTES that share no record."""
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
    """The same for two plans that read the same files and write the same bytes."""
    digest = blake2b(digest_size=16)
    for out in files:
        digest.update(f"{out.name} {out.size} ".encode() + out.header)
    for unit in units:
        modified = unit.file.path.stat().st_mtime_ns
        digest.update(f"{unit.name} {unit.file.size} {unit.file.blake2b} {modified} {len(unit.copies)}".encode())
        for copy in unit.copies:
            digest.update(f"{copy.begin} {copy.piece.start} {copy.piece.shape} {copy.file} {copy.offset}".encode())
    return digest.hexdigest()
