"""Pickles of torch read without running anything: every class they name becomes an inert stand-in.

Stricter than ``torch.load(weights_only=True)``, which builds torch's own objects. A stand-in only keeps what the pickle gave it,
so a file that another version of torch wrote is read too. A pickle that names anything else than tensors and their layout is
refused.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollcall.stored.dtypes import DTYPES, DType
from rollcall.stored.files import StoredError
from rollcall.stored.opcodes import read_pickle

MOST_BYTES = 1 << 29
MOST_DIMENSIONS = 64  # of a tensor, as in torch
MOST_ARGUMENTS = 100  # of a call; that of a tensor has about ten
MOST_FIELDS = 1000  # of an object
LONGEST_WORD = 4096  # characters of the name of a device or a part of a path


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One record of the archive: the numbers that one or more tensors are views of."""

    key: str
    dtype: DType | None  # None: untyped


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor: a view of a storage. Counts are in elements."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_row_major(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


class Thing:
    """An object of a class that layouts are made of: what it was made with (``args``) and what it was given (``fields``)."""

    kind = ""
    args: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> Thing:  # a pickle does not call __init__
        self = super().__new__(cls)
        self.args, self.fields = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                if len(part) > MOST_FIELDS:
                    raise ValueError(f"a {self.kind} with {len(part):,} fields")
                self.fields.update(part)
        if isinstance(state, tuple) and not any(isinstance(part, dict) for part in state):
            self.args = state  # a class with a state of its own, such as TensorProperties

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.fields.get(name)


# Wherever torch keeps them: their modules differ between versions.
_THINGS = (
    # of DTensor
    "DTensor", "DTensorSpec", "TensorMeta", "DeviceMesh", "Shard", "_StridedShard", "Replicate", "Partial", "_Partial",
    "_MeshLayout", "_FlatLayout", "ShardOrderEntry",
    # of distributed checkpoints
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_STAND_INS = {name: type(name, (Thing,), {"kind": name}) for name in _THINGS}


def _size(values: Any = ()) -> tuple[int, ...]:
    if len(values) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(values):,} dimensions")
    return tuple(int(value) for value in values)


def _tensor(storage: Storage, offset: int, shape: Any, stride: Any, *rest: Any) -> View:
    # The third version of this function gives the type last; before that the storage has it.
    dtype = next((one for one in rest if isinstance(one, DType)), storage.dtype)
    if not isinstance(storage, Storage) or dtype is None:
        raise ValueError("a tensor without a type")
    return View(storage=storage, dtype=dtype, offset=int(offset), shape=_size(shape), stride=_size(stride))


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _of_type(make: Callable[..., Any], _type: Any, args: Any, state: Any) -> Any:
    made = _call(make, args)
    if isinstance(made, Thing):
        made.__setstate__(state)
    return made


def _call(make: Callable[..., Any], args: Any) -> Any:
    """What there is to call is what ``find`` gave for a name: the functions and classes of this file."""
    if type(args) is not tuple or len(args) > MOST_ARGUMENTS:
        raise ValueError("a call without a short list of arguments")
    return make(*args)


def _wrapper(cls: Any, dtype: Any, shape: Any, *_: Any) -> Any:
    made = cls()
    made.fields |= {"dtype": dtype, "shape": _size(shape)}
    return made


def _member(cls: Any, name: Any) -> Thing:
    """How Python 3.11.0 to 3.11.3 writes a member of an enum: as getattr(class, name). Nothing is looked up here."""
    if not (isinstance(cls, type) and issubclass(cls, Thing)) or not isinstance(name, str):
        raise ValueError("an attribute of what is not a stand-in")
    return cls(name)


def _words(*parts: Any) -> str:
    if not all(isinstance(part, int) or (isinstance(part, str) and len(part) <= LONGEST_WORD) for part in parts):
        raise ValueError("a name that is not a short text")
    return "/".join(str(part) for part in parts)


def _empty_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()  # its items follow


def _set(values: Any = ()) -> set[Any]:
    if not isinstance(values, list | tuple) or len(values) > MOST_FIELDS:
        raise ValueError("a set of something that is not a short list")
    return set(values)


_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _empty_dict,
    ("builtins", "set"): _set,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): _size,
    ("torch", "device"): _words,
    ("torch.serialization", "_get_layout"): _words,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapper,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    ("torch.storage", "UntypedStorage"): Storage(key="", dtype=None),
    ("pathlib", "PosixPath"): _words,
    ("pathlib._local", "PosixPath"): _words,
}
_STORAGES = {
    "FloatStorage": DTYPES["float32"], "DoubleStorage": DTYPES["float64"], "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"], "ByteStorage": DTYPES["uint8"], "CharStorage": DTYPES["int8"], "ShortStorage": DTYPES["int16"],
    "IntStorage": DTYPES["int32"], "LongStorage": DTYPES["int64"], "BoolStorage": DTYPES["bool"],
}  # fmt: skip


class _StandIns:
    """What the names, records and objects of a pickle become. ``what`` names the file in messages."""

    def __init__(self, *, what: str) -> None:
        self._what = what

    def find(self, module: str, name: str) -> Any:
        if found := _FUNCTIONS.get((module, name)):
            return found
        if module == "torch" and name in _STORAGES:
            return Storage(key="", dtype=_STORAGES[name])
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if module.startswith("torch.distributed.") and name in _STAND_INS:
            return _STAND_INS[name]
        raise StoredError(
            f"{self._what} wants {module}.{name}, and only tensors are read from a pickle: nothing was run. Save it again with "
            "tensors alone, such as a state dict"
        )

    def record(self, pid: Any) -> Storage:
        kind, storage, key, *_ = pid
        if kind != "storage" or not isinstance(storage, Storage):
            raise ValueError("a record that is not a storage")
        if not isinstance(key, str | int):
            raise ValueError("a storage without a name")
        return Storage(key=str(key), dtype=storage.dtype)

    def call(self, make: Any, args: Any) -> Any:
        return _call(make, args)

    def set_state(self, made: Any, state: Any) -> None:
        """Only stand-ins take a state; that of a state dict (``_metadata``) is not needed."""
        if isinstance(made, Thing):
            made.__setstate__(state)
        elif not isinstance(made, OrderedDict):
            raise ValueError(f"a state for a {type(made).__name__}")


# What a mesh says of the process that wrote it, as torch.save writes it: the name of the field, its place in the memo, the
# numbers. Each is one byte (K) or two (M).
_OWN = re.compile(
    rb"(X\x05\0{3}_rank(?:q.|r.{4})|X\x12\0{3}_coordinate_on_dim(?:q.|r.{4})(?:\](?:q.|r.{4}))?\(?)((?:K.|M..)+)",
    re.DOTALL,
)
_NUMBER = re.compile(rb"([KM])(?:(?<=K).|(?<=M)..)", re.DOTALL)


class Alike:
    """Reads the pickles of processes that saved together. They differ only in what each says of itself, which is not needed: whose
    file it is, is known from its name. So one of them is read, and stands for all."""

    def __init__(self) -> None:
        self._read: dict[bytes, Any] = {}

    def read(self, data: bytes, *, what: str) -> Any:
        common = _OWN.sub(lambda found: found[1] + _NUMBER.sub(_zero, found[2]), data)
        if common not in self._read:
            self._read[common] = unpickle(data, what=what)
        return self._read[common]


def _zero(number: re.Match[bytes]) -> bytes:
    return number[1] + bytes(len(number[0]) - 1)


def own_rank(data: bytes) -> int | None:
    """The rank of the process that wrote a pickle, as its mesh says it; None: it does not."""
    said = (found[2] for found in _OWN.finditer(data) if found[1].startswith(b"X\x05"))
    number = next((_NUMBER.match(numbers) for numbers in said), None)
    return None if number is None else int.from_bytes(number[0][1:], "little")


def unpickle(data: bytes, *, what: str) -> Any:
    """What a pickle holds: dicts, numbers, ``View`` and ``Thing``. ``what`` names the file in messages."""
    try:
        return read_pickle(data, _StandIns(what=what))
    except StoredError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything
        raise StoredError(f"{what} cannot be read ({type(error).__name__}: {error}); restore the file") from None
