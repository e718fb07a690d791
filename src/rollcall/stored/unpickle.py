"""Pickles of torch read without running anything: every class they name becomes an inert stand-in.

Stricter than ``torch.load(weights_only=True)``, which builds torch's own objects. A stand-in only keeps what the pickle gave it,
so a file that another version of torch wrote is read too. A pickle that names anything else than tensors and their layout is
refused.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rollcall.stored.files import StoredError

MOST_BYTES = 1 << 29
MOST_NESTED = 1000  # values in a tuple and the tuples in it; a mesh has a few


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One record of the archive: the numbers that one or more tensors are views of."""

    key: str
    dtype: torch.dtype | None  # None: untyped


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor: a view of a storage. Counts are in elements."""

    storage: Storage
    dtype: torch.dtype
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
    return tuple(int(value) for value in values)


def _tensor(storage: Storage, offset: int, shape: Any, stride: Any, *rest: Any) -> View:
    # The third version of this function gives the type last; before that the storage has it.
    dtype = next((one for one in rest if isinstance(one, torch.dtype)), storage.dtype)
    if not isinstance(storage, Storage) or dtype is None:
        raise ValueError("a tensor without a type")
    return View(storage=storage, dtype=dtype, offset=int(offset), shape=_size(shape), stride=_size(stride))


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _of_type(make: Callable[..., Any], _type: Any, args: Any, state: Any) -> Any:
    made = make(*args)
    if isinstance(made, Thing):
        made.__setstate__(state)
    return made


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
    if not all(isinstance(part, str | int) for part in parts):
        raise ValueError("a name that is no text")
    return "/".join(str(part) for part in parts)


_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
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
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "ByteStorage": torch.uint8, "CharStorage": torch.int8, "ShortStorage": torch.int16,
    "IntStorage": torch.int32, "LongStorage": torch.int64, "BoolStorage": torch.bool,
}  # fmt: skip


# Opcodes that no writer of tensors uses; some of them reserve memory or reach registries by a number in the file.
_NOT_USED = (
    pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ, pickle.PERSID, pickle.FROZENSET, pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
)  # fmt: skip


_InPython: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Unpickler(_InPython):
    """In Python, as torch's own reader for ``weights_only``: in C, a number in the file decides how much memory the memo takes,
    and tuples that hold tuples are hashed without an end, or until the stack is full."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: load for code, load in _InPython.dispatch.items() if bytes([code]) not in _NOT_USED
    }

    def __init__(self, data: bytes, *, what: str) -> None:
        super().__init__(io.BytesIO(data))
        self._what = what
        self._nested: dict[int, tuple[Any, int]] = {}  # tuples with tuples in them, by id: how many values, written out

    def _bounded(self, load: Callable[[Any], None]) -> None:
        load(self)
        made = self.stack[-1]
        inner = [one for one in made if type(one) is tuple]
        if inner:
            total = len(made) + sum(self._nested[id(one)][1] if id(one) in self._nested else len(one) for one in inner)
            if total > MOST_NESTED:
                raise ValueError("tuples in tuples without an end")
            self._nested[id(made)] = (made, total)

    def load_build(self) -> None:
        """Only stand-ins take a state; that of a state dict (``_metadata``) is not needed."""
        state = self.stack.pop()
        inst = self.stack[-1]
        if isinstance(inst, Thing):
            inst.__setstate__(state)
        elif not isinstance(inst, OrderedDict):
            raise ValueError(f"a state for a {type(inst).__name__}")

    dispatch[pickle.BUILD[0]] = load_build
    for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[_code[0]] = lambda self, load=dispatch[_code[0]]: self._bounded(load)

    def find_class(self, module: str, name: str) -> Any:
        if found := _FUNCTIONS.get((module, name)):
            return found
        if module == "torch" and name in _STORAGES:
            return Storage(key="", dtype=_STORAGES[name])
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith("torch.distributed.") and name in _STAND_INS:
            return _STAND_INS[name]
        raise StoredError(
            f"{self._what} wants {module}.{name}, and only tensors are read from a pickle: nothing was run. Save it again with "
            "tensors alone, such as a state dict"
        )

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, *_ = pid
        if kind != "storage" or not isinstance(storage, Storage):
            raise ValueError("a record that is no storage")
        if not isinstance(key, str | int):
            raise ValueError("a storage without a name")
        return Storage(key=str(key), dtype=storage.dtype)


def unpickle(data: bytes, *, what: str) -> Any:
    """What a pickle holds: dicts, numbers, ``View`` and ``Thing``. ``what`` names the file in messages."""
    try:
        return _Unpickler(data, what=what).load()
    except StoredError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything
        raise StoredError(f"{what} cannot be read ({type(error).__name__}: {error}); restore the file") from None
