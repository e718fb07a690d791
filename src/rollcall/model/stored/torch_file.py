"""Reads pickled tensors and ``torch.save`` files: a zip archive with a pickle and one uncompressed record per storage.

So every tensor is a byte range in the file. The archive has a CRC-32 for each record, unless its writer omitted it (0).

A pickle may refer only to the classes and functions listed below. None of them is imported or called: ``Stub``s take their place, so
files from any torch version can be read. ``torch.load(mmap=True, weights_only=True)`` builds every DTensor and takes ten times as long.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from rollcall.model.stored.files import CheckedRange, StoredError, plain_damage, refuse_pipe
from rollcall.model.stored.tensors import DTYPES, DType, Piece

_TYPES = DTYPES | {
    "FloatStorage": DTYPES["float32"], "DoubleStorage": DTYPES["float64"], "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"], "ByteStorage": DTYPES["uint8"], "CharStorage": DTYPES["int8"],
    "ShortStorage": DTYPES["int16"], "IntStorage": DTYPES["int32"], "LongStorage": DTYPES["int64"], "BoolStorage": DTYPES["bool"],
}  # fmt: skip
_ALLOWED = {
    "builtins": {"set", "getattr"},  # Python 3.11.0 to 3.11.3 pickles an enum member as getattr(class, name)
    "__builtin__": {"set", "getattr"},  # their module in pickle protocol 2, which torch.save uses
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch": {"Size", "device", *_TYPES},
    "torch.serialization": {"_get_layout"},
    "torch.storage": {"UntypedStorage"},
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch._utils": {
        "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state",
        "_rebuild_wrapper_subclass",
    },
}  # fmt: skip
# The modules that contain these names differ between versions, but all of them are in torch.distributed.
_ALLOWED_DISTRIBUTED = {
    # for DTensor
    "DTensor", "DTensorSpec", "TensorMeta", "DeviceMesh", "Shard", "_StridedShard", "Replicate", "Partial", "_Partial",
    "_MeshLayout", "_FlatLayout", "ShardOrderEntry",
    # for distributed checkpoints
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING",
}  # fmt: skip


class Stub:
    """Replaces an object or the result of a call, and keeps its arguments and state. Its class has the name from the pickle."""

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Stub:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        return fields_of(self.state)


@cache
def _stub_class(name: str) -> type[Stub]:
    return type(name, (Stub,), {})


def fields_of(state: Any) -> dict[str, Any]:
    """Return the attributes in an object's pickled state. With ``__slots__``, the state is two dictionaries."""
    if isinstance(state, dict):
        return state
    parts = state if isinstance(state, tuple) else ()
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


def is_named(value: Any, name: str) -> bool:
    """Return whether a value is the class or function with this name, or an instance of it."""
    own = value if isinstance(value, type) else type(value)
    return issubclass(own, Stub) and own.__name__ == name


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, *, what: str) -> None:
        super().__init__(io.BytesIO(data))
        self._what = what

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        is_distributed = module.startswith("torch.distributed.") and name in _ALLOWED_DISTRIBUTED
        if is_distributed or name in _ALLOWED.get(module, ()):
            return _stub_class(name)
        raise StoredError(
            f"{self._what} refers to {module}.{name}, but only tensors are read from a pickle. No code was run. Save the file again with "
            "only tensors, such as a state dict"
        )

    def persistent_load(self, pid: Any) -> Any:
        return pid


def unpickle(data: bytes, *, what: str) -> Any:
    """Load a pickle as dicts, lists, tuples, numbers, strings and ``Stub``s. ``what`` names the file in messages."""
    with plain_damage(f"{what} cannot be read"):
        return _Unpickler(data, what=what).load()


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTensor:
    """A tensor stored in row-major order in a file."""

    dtype: DType
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes
    crc32: int | None  # of exactly these bytes, if known

    def piece(self, *, start: tuple[int, ...]) -> Piece:
        """Return the tensor as a piece that begins at ``start`` in the full tensor."""
        return Piece(file=self.file, offset=self.offset, start=start, shape=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """An opened ``torch.save`` file. ``records`` maps keys to storages."""

    path: Path
    what: str  # for messages
    records: dict[str, CheckedRange]

    def tensor(self, value: Any, *, name: str) -> TorchTensor | None:
        """Convert a pickled value to a tensor, or return None if it is something else. Malformed arguments may raise any exception."""
        while isinstance(value, Stub) and type(value).__name__.startswith("_rebuild_parameter"):
            value = value.args[0]
        if not isinstance(value, Stub) or not type(value).__name__.startswith("_rebuild_tensor"):
            return None
        (_, storage_type, key, *_), offset, shape, stride, *rest = value.args
        # The third version of the function passes the dtype last; older versions take it from the storage.
        dtype = next(filter(None, map(dtype_of, [*rest, storage_type])))
        shape, stride = whole_numbers(shape), whole_numbers(stride)
        num_bytes, begin, record = prod(shape) * dtype.itemsize, int(offset) * dtype.itemsize, self.records.get(key)
        if record is None or begin < 0 or begin + num_bytes > record.size or min(shape, default=0) < 0:
            raise StoredError(f"{self.what}: the bytes of {name} are not in the file; restore it")
        row_major = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        if num_bytes and any(n > 1 and a != b for n, a, b in zip(shape, stride, row_major, strict=True)):
            raise StoredError(
                f"{self.what}: {name} is stored with strides {list(stride)}, not row by row; save it as a contiguous tensor"
            )
        crc32 = record.crc32 if record.crc32 and (begin, num_bytes) == (0, record.size) else None
        return TorchTensor(dtype=dtype, shape=shape, file=self.path, offset=record.offset + begin, crc32=crc32)


def dtype_of(value: Any) -> DType | None:
    return _TYPES.get(value.__name__) if isinstance(value, type) else None


def whole_numbers(value: Any) -> tuple[int, ...]:
    """Convert a shape or an offset to integers. It may be a tuple, a list or a ``torch.Size`` call."""
    return tuple(map(int, value.args[0] if is_named(value, "Size") else value))


def open_torch_file(path: Path, *, offset: int = 0, length: int | None = None) -> tuple[TorchFile, Any]:
    """Open a ``torch.save`` file, possibly inside a larger file. Return it with its unpickled content."""
    what = str(path) if length is None else f"{path} (bytes {offset:,} to {offset + length:,})"
    refuse_pipe(path)
    broken = f"{what} is not a complete torch.save file in the zip format"
    advice = "it is truncated or has a different format; restore the file"
    with plain_damage(broken, advice=advice), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if offset < 0 or offset + (length or 0) > size:
            raise StoredError(f"{path} has {size:,} bytes, too few: it is truncated; restore the file")
        with mmap.mmap(file.fileno(), size if length is None else offset + length, access=mmap.ACCESS_READ) as data:
            infos = zipfile.ZipFile(_Rest(data, offset)).infolist()  # type: ignore[arg-type]
            records = {info.filename: _record(data, info, offset=offset) for info in infos}
            root = next((name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")), None)
            if root is None:
                raise StoredError(f"{what} is not a torch.save file: it has no data.pkl; restore the file")
            if f"{root}byteorder" in records and _content(data, records[f"{root}byteorder"], what=what) != b"little":
                raise StoredError(
                    f"{what} was written on a big-endian machine; save it again on a little-endian machine"
                )
            content = _content(data, records[f"{root}data.pkl"], what=what)
    prefix = f"{root}data/"
    own = {name.removeprefix(prefix): record for name, record in records.items() if name.startswith(prefix)}
    return TorchFile(path=path, what=what, records=own), unpickle(content, what=what)


class _Rest:
    """The bytes after the offset, as a file. This is needed because newer versions of zipfile refuse an archive with other bytes before
    it."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data, self._offset, self._at = data, offset, 0

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        at = to + (0, self._at, len(self._data) - self._offset)[whence]
        if at < 0:
            raise OSError("before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        begin = self._offset + self._at
        found = self._data[begin : begin + size if size >= 0 else None]
        self._at += len(found)
        return found


def _record(data: mmap.mmap, info: zipfile.ZipInfo, *, offset: int) -> CheckedRange:
    """Locate a record's data. The data follows the record's local header, and only that header says how long it is."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError(f"its record {info.filename} is compressed, which torch.save never does")
    header = offset + info.header_offset
    signature, name_size, extra_size = struct.unpack_from("<4s22xHH", data, header)
    begin = header + 30 + name_size + extra_size
    if signature != b"PK\x03\x04" or begin + info.file_size > len(data):
        raise ValueError(f"its record {info.filename} extends past the end of the file")
    return CheckedRange(offset=begin, size=info.file_size, crc32=info.CRC)


def _content(data: mmap.mmap, record: CheckedRange, *, what: str) -> bytes:
    if record.size > 1 << 29:
        raise StoredError(
            f"{what}: a pickle of {record.size:,} bytes is too large for a list of tensors; restore the file"
        )
    content = data[record.offset : record.offset + record.size]
    if record.crc32 and zlib.crc32(content) != record.crc32:
        raise StoredError(
            f"{what}: its list of tensors has changed since it was written (its checksum differs); restore the file"
        )
    return content
