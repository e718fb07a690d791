"""Files of ``torch.save``: a zip archive with a pickle and one uncompressed record for each storage.

So every tensor is a range of the file's bytes. The archive has a CRC-32 for each record, unless its writer left them out (0).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rollcall.stored.files import CheckedRange, StoredError, open_regular
from rollcall.stored.tensors import Piece
from rollcall.stored.unpickle import MOST_BYTES, Alike, View, own_rank, unpickle

ALIGNMENT = 64  # of torch's records
DESCRIPTORS = (0, 16, 24)  # bytes behind a record: none, or its checksum and sizes
_LOCAL = struct.Struct("<4s5H3L2H")  # a record's header, before its name


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """``content`` is what the pickle holds; ``records`` are the storages by key."""

    path: Path
    what: str  # for messages
    content: Any
    records: dict[str, CheckedRange]
    rank: int | None = None  # of the process that wrote it; None: it does not say so

    def piece(self, view: View, *, start: tuple[int, ...], name: str) -> Piece:
        """Where the bytes of a tensor are; ``start``: where it lies in the whole one."""
        record = self.records.get(view.storage.key)
        size = prod(view.shape) * view.dtype.itemsize
        begin = view.offset * view.dtype.itemsize
        if record is None or begin < 0 or begin + size > record.size:
            raise StoredError(f"{self.what}: the bytes of {name} are not in the file; restore it")
        if not view.is_row_major:
            raise StoredError(
                f"{self.what}: {name} is stored with strides {list(view.stride)}, not row by row; save it as contiguous tensors"
            )
        return Piece(file=self.path, offset=record.offset + begin, start=start, shape=view.shape)

    def checksum(self, view: View) -> int | None:
        """The CRC-32 of a tensor's bytes as the file has it; None: it has none for these bytes alone."""
        record = self.records[view.storage.key]
        size = prod(view.shape) * view.dtype.itemsize
        return record.crc32 if record.crc32 and (view.offset, size) == (0, record.size) else None

    def numbers(self, view: View) -> list[int]:
        """The values of a small tensor of whole numbers."""
        if not view.dtype.name.startswith(("int", "uint")):
            raise ValueError(f"ranks of type {view.dtype}")
        piece = self.piece(view, start=(0,) * len(view.shape), name="a mesh")
        with self.path.open("rb") as file:
            file.seek(piece.offset)
            data = file.read(prod(view.shape) * view.dtype.itemsize)
        width, signed = view.dtype.itemsize, not view.dtype.name.startswith("u")
        return [int.from_bytes(data[at : at + width], "little", signed=signed) for at in range(0, len(data), width)]


def open_torch_file(path: Path, *, offset: int = 0, length: int | None = None, alike: Alike | None = None) -> TorchFile:
    """A file of ``torch.save``, or one that lies in a range of a larger file. ``alike``: for files that were saved together."""
    what = str(path) if length is None else f"{path} (bytes {offset:,} to {offset + length:,})"
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = size if length is None else length
            if offset < 0 or offset + length > size:
                raise StoredError(f"{path} has {size:,} bytes, too few: it was cut off; restore the file")
            window = _Window(file.fileno(), offset=offset, length=length)
            with zipfile.ZipFile(window) as archive:
                records = _records(window, archive.infolist(), end=archive.start_dir, what=what)
            root = next((name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")), None)
            if root is None:
                raise StoredError(f"{what} is not a file of torch.save: it has no data.pkl; restore the file")
            order = _bytes(file.fileno(), records.get(f"{root}byteorder"), what=what)
            if order not in (b"", b"little"):
                raise StoredError(f"{what} was written on a big-endian machine; save it again on another")
            data = _bytes(file.fileno(), records[f"{root}data.pkl"], what=what)
    except FileNotFoundError:
        raise StoredError(f"{path} does not exist; restore the file") from None
    except (zipfile.BadZipFile, struct.error, ValueError, OverflowError, NotImplementedError, EOFError) as error:
        if isinstance(error, StoredError):
            raise
        raise StoredError(
            f"{what} is not a whole file of torch.save in its zip format ({error}): it was cut off, or is of another kind; "
            "restore the file"
        ) from None
    keys = {
        name.removeprefix(f"{root}data/"): record for name, record in records.items() if name.startswith(f"{root}data/")
    }
    read = unpickle if alike is None else alike.read
    return TorchFile(path=path, what=what, content=read(data, what=what), records=keys, rank=own_rank(data))


def _records(window: _Window, infos: Sequence[zipfile.ZipInfo], *, end: int, what: str) -> dict[str, CheckedRange]:
    """Where each record's bytes are. ``end``: where the records end in the file."""
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise StoredError(
                f"{what}: its record {info.filename} is compressed, which torch.save never does; restore the file"
            )
    begins = _aligned_begins(infos, end=end) or [_begin(window, info, what=what) for info in infos]
    for info, begin in zip(infos, begins, strict=True):
        if begin + info.file_size > window.length:
            raise StoredError(
                f"{what}: its record {info.filename} ends behind the file: it was cut off; restore the file"
            )
    return {
        info.filename: CheckedRange(offset=window.offset + begin, size=info.file_size, crc32=info.CRC)
        for info, begin in zip(infos, begins, strict=True)
    }


def _aligned_begins(infos: Sequence[zipfile.ZipInfo], *, end: int) -> list[int] | None:
    """Where the records begin, from the list at the file's end alone; None: that does not say it for certain.

    The header of each record has a length of its own, and a file has hundreds of them all over: to read each takes longer than to
    read the list. torch puts records at multiples of ``ALIGNMENT``, each directly before the header of the next, or before a
    descriptor. If all of them fit one of these, that is where they are; the checksums say so again when they are read.
    """
    ordered = sorted(infos, key=lambda info: info.header_offset)
    if not all(info.CRC or not info.file_size for info in ordered):
        return None
    nexts = [*(info.header_offset for info in ordered[1:]), end]
    for descriptor in DESCRIPTORS:
        begins = {
            info.filename: after - descriptor - info.file_size for info, after in zip(ordered, nexts, strict=True)
        }
        gaps = (begins[info.filename] - info.header_offset - _LOCAL.size for info in ordered)
        if not any(begin % ALIGNMENT for begin in begins.values()) and all(0 <= gap < 1 << 17 for gap in gaps):
            return [begins[info.filename] for info in infos]
    return None


def _begin(window: _Window, info: zipfile.ZipInfo, *, what: str) -> int:
    signature, *_, name_length, extra_length = _LOCAL.unpack(window.at(info.header_offset, _LOCAL.size))
    if signature != b"PK\x03\x04":
        raise StoredError(f"{what}: byte {info.header_offset:,} does not begin a record; restore the file")
    return info.header_offset + _LOCAL.size + name_length + extra_length


def _bytes(fd: int, record: CheckedRange | None, *, what: str) -> bytes:
    if record is None:
        return b""
    if record.size > MOST_BYTES:
        raise StoredError(f"{what}: a pickle of {record.size:,} bytes is not one of tensors; restore the file")
    data = os.pread(fd, record.size, record.offset)
    if len(data) != record.size or (record.crc32 and zlib.crc32(data) != record.crc32):
        raise StoredError(
            f"{what}: its list of tensors is not as it was written (its checksum differs); restore the file"
        )
    return data


class _Window(io.RawIOBase):
    """A range of a file as a file, for zipfile."""

    def __init__(self, fd: int, *, offset: int, length: int) -> None:
        self._fd, self.offset, self.length, self._at = fd, offset, length, 0

    def at(self, position: int, size: int) -> bytes:
        if not 0 <= position <= self.length:
            raise ValueError("a position outside of the file")
        return os.pread(self._fd, min(size, self.length - position), self.offset + position)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if base + position < 0:
            raise ValueError("a position before the file")
        self._at = base + position
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self.at(self._at, len(buffer)) if self._at < self.length else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
