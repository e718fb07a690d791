"""Files of ``torch.save``: a zip archive with a pickle and one uncompressed record for each storage.

So every tensor is a range of the file's bytes. The archive has a CRC-32 for each record, unless its writer left them out (0).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rollcall.stored.dtypes import DTYPES, DType
from rollcall.stored.files import CheckedRange, StoredError, open_regular, plain_damage
from rollcall.stored.tensors import Piece
from rollcall.stored.unpickle import MOST_BYTES, Name, Thing, unpickle

_TYPES = DTYPES | {
    "FloatStorage": DTYPES["float32"], "DoubleStorage": DTYPES["float64"], "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"], "ByteStorage": DTYPES["uint8"], "CharStorage": DTYPES["int8"],
    "ShortStorage": DTYPES["int16"], "IntStorage": DTYPES["int32"], "LongStorage": DTYPES["int64"], "BoolStorage": DTYPES["bool"],
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor: a view of the record ``key``. Counts are in elements."""

    key: str
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_row_major(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


def view_of(value: Any) -> View | None:
    """The tensor that a value of a pickle is, or None. A call of torch's functions with wrong arguments raises any error."""
    while isinstance(value, Thing) and value.name.startswith("_rebuild_parameter"):
        value = value.args[0]
    if not isinstance(value, Thing) or not value.name.startswith("_rebuild_tensor"):
        return None
    storage, offset, shape, stride, *rest = value.args
    kind, storage_type, key, *_ = storage.args
    # The third version of the function gives the type last; before that the storage has it.
    dtype = next(filter(None, map(dtype_of, [*rest, storage_type])), None)
    if kind != "storage" or not isinstance(key, str) or dtype is None:
        raise ValueError("a tensor without a type or without a storage")
    return View(key=key, dtype=dtype, offset=int(offset), shape=whole_numbers(shape), stride=whole_numbers(stride))


def dtype_of(value: Any) -> DType | None:
    return _TYPES.get(value.name) if isinstance(value, Name) else None


def whole_numbers(value: Any) -> tuple[int, ...]:
    """A shape or an offset: a tuple, a list, or a call of ``torch.Size`` with one."""
    values: Any = value.args[0] if isinstance(value, Thing) and value.name == "Size" else value
    if len(values) > 64:
        raise ValueError(f"a tensor of {len(values):,} dimensions")
    return tuple(map(int, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """``records`` are the storages by their keys."""

    path: Path
    what: str  # for messages
    records: dict[str, CheckedRange]

    def piece(self, view: View, *, start: tuple[int, ...], name: str) -> Piece:
        """Where the bytes of a tensor are; ``start``: where it lies in the whole one."""
        record = self.records.get(view.key)
        begin = view.offset * view.dtype.itemsize
        if record is None or begin < 0 or begin + view.num_bytes > record.size or min(view.shape, default=0) < 0:
            raise StoredError(f"{self.what}: the bytes of {name} are not in the file; restore it")
        if not view.is_row_major:
            raise StoredError(
                f"{self.what}: {name} is stored with strides {list(view.stride)}, not row by row; save it as contiguous tensors"
            )
        return Piece(file=self.path, offset=record.offset + begin, start=start, shape=view.shape)

    def checksum(self, view: View) -> int | None:
        """The CRC-32 of a tensor's bytes as the file has it; None: it has none for these bytes alone."""
        record = self.records[view.key]
        return record.crc32 if record.crc32 and (view.offset, view.num_bytes) == (0, record.size) else None

    def numbers(self, view: View) -> list[int]:
        """The values of a small tensor of whole numbers."""
        if not view.dtype.name.startswith(("int", "uint")):
            raise ValueError(f"ranks of type {view.dtype}")
        piece = self.piece(view, start=(0,) * len(view.shape), name="a mesh")
        with self.path.open("rb") as file:
            data = os.pread(file.fileno(), view.num_bytes, piece.offset)
        width, signed = view.dtype.itemsize, view.dtype.name.startswith("int")
        return [int.from_bytes(data[at : at + width], "little", signed=signed) for at in range(0, len(data), width)]


def open_torch_file(path: Path, *, offset: int = 0, length: int | None = None) -> tuple[TorchFile, Any]:
    """A file of ``torch.save``, or one that lies in a range of a larger file, and the content of its pickle."""
    what = str(path) if length is None else f"{path} (bytes {offset:,} to {offset + length:,})"
    with (
        open_regular(path) as file,
        plain_damage(
            f"{what} is not a whole file of torch.save in its zip format",
            advice="it was cut off, or is of another kind; restore the file",
        ),
    ):
        size = os.fstat(file.fileno()).st_size
        if offset < 0 or offset + (length or 0) > size:
            raise StoredError(f"{path} has {size:,} bytes, too few: it was cut off; restore the file")
        archive = _Range(file.fileno(), begin=offset, size=size if length is None else length)
        records = {info.filename: _record(archive, info) for info in zipfile.ZipFile(archive).infolist()}
        root = next((name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")), None)
        if root is None:
            raise StoredError(f"{what} is not a file of torch.save: it has no data.pkl; restore the file")
        if f"{root}byteorder" in records and _content(archive, records[f"{root}byteorder"], what=what) != b"little":
            raise StoredError(f"{what} was written on a big-endian machine; save it again on another")
        data = _content(archive, records[f"{root}data.pkl"], what=what)
    prefix = f"{root}data/"
    own = {name.removeprefix(prefix): record for name, record in records.items() if name.startswith(prefix)}
    return TorchFile(path=path, what=what, records=own), unpickle(data, what=what)


class _Range(io.RawIOBase):
    """A range of a file as a file, for zipfile."""

    def __init__(self, fd: int, *, begin: int, size: int) -> None:
        self.fd, self.begin, self.size, self._at = fd, begin, size, 0

    def seekable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        self._at = position + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if self._at < 0:
            raise ValueError("a position before the file")
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self.fd, max(min(len(buffer), self.size - self._at), 0), self.begin + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _record(archive: _Range, info: zipfile.ZipInfo) -> CheckedRange:
    """Where a record's bytes are: behind its own header, whose length is only in it."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError(f"its record {info.filename} is compressed, which torch.save never does")
    archive.seek(info.header_offset)
    signature, name_size, extra_size = struct.unpack("<4s22xHH", archive.read(30) or b"")
    begin = info.header_offset + 30 + name_size + extra_size
    if signature != b"PK\x03\x04" or begin + info.file_size > archive.size:
        raise ValueError(f"its record {info.filename} does not lie in the file")
    return CheckedRange(offset=archive.begin + begin, size=info.file_size, crc32=info.CRC)


def _content(archive: _Range, record: CheckedRange, *, what: str) -> bytes:
    if record.size > MOST_BYTES:
        raise StoredError(f"{what}: a pickle of {record.size:,} bytes is not one of tensors; restore the file")
    data = os.pread(archive.fd, record.size, record.offset)
    if record.crc32 and zlib.crc32(data) != record.crc32:
        raise StoredError(
            f"{what}: its list of tensors is not as it was written (its checksum differs); restore the file"
        )
    return data
