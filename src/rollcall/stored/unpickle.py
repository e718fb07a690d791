"""Pickles of tensors, read by Python's own reader, which here neither looks anything up nor calls anything.

A class or function that a pickle names becomes a ``Name``, if it is in the list below; any other ends the reading. What the pickle
makes or calls becomes a ``Thing``, which only keeps what it was given. So a file that another version of torch wrote is read too.

The reader is the one in Python (``pickle._Unpickler``), because what each opcode does can be chosen there. The one in C takes the
memory that a number in the file asks for, and hashes whatever a file uses as a key: a tuple of tuples of tuples without an end.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from rollcall.stored.dtypes import DTYPES
from rollcall.stored.files import StoredError, plain_damage

MOST_BYTES = 1 << 29
_PythonUnpickler: Any = pickle._Unpickler  # typeshed knows only its name
_NAMES = {
    "builtins": {"set", "getattr"},  # Python 3.11.0 to 3.11.3 writes a member of an enum as getattr(class, name)
    "__builtin__": {"set", "getattr"},  # their module in protocol 2, which torch.save takes
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch": {
        "Size", "device", "FloatStorage", "DoubleStorage", "HalfStorage", "BFloat16Storage", "ByteStorage", "CharStorage",
        "ShortStorage", "IntStorage", "LongStorage", "BoolStorage", *DTYPES,
    },
    "torch.serialization": {"_get_layout"},
    "torch.storage": {"UntypedStorage"},
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch._utils": {
        "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state",
        "_rebuild_wrapper_subclass",
    },
}  # fmt: skip
# Their modules, all of torch.distributed, differ between versions.
_DISTRIBUTED = {
    # of DTensor
    "DTensor", "DTensorSpec", "TensorMeta", "DeviceMesh", "Shard", "_StridedShard", "Replicate", "Partial", "_Partial",
    "_MeshLayout", "_FlatLayout", "ShardOrderEntry",
    # of distributed checkpoints
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING",
}  # fmt: skip
_OPCODES = {
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8, pickle.SHORT_BINBYTES,
    pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_SET, pickle.EMPTY_TUPLE, pickle.APPEND, pickle.APPENDS,
    pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
    pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names."""

    name: str


@dataclass(slots=True, eq=False, repr=False)
class Thing:
    """An object, or the result of a call: the name of its class or function, and what that was given."""

    name: str
    args: tuple[Any, ...]
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        return attributes(self.state)


def attributes(state: Any) -> dict[str, Any]:
    """The attributes in the state of an object; that of one with ``__slots__`` is two dictionaries."""
    if isinstance(state, dict):
        return state
    parts = state if isinstance(state, tuple) else ()
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


def unpickle(data: bytes, *, what: str) -> Any:
    """The content of a pickle: dicts, lists, tuples, sets, numbers, texts, ``Name`` and ``Thing``. ``what`` names the file in messages."""
    with plain_damage(f"{what} cannot be read"):
        return _Reader(io.BytesIO(data), what=what).load()


def _refuse(_: Any) -> None:
    raise ValueError("an opcode that no writer of tensors uses")


def _hashable(key: Any) -> Any:
    if not isinstance(key, str | int | Name | Thing):
        raise ValueError(f"a {type(key).__name__} as a key")
    return key


class _Reader(_PythonUnpickler):
    def __init__(self, file: io.BytesIO, *, what: str) -> None:
        super().__init__(file)
        self._what = what

    def find_class(self, module: str, name: str) -> Name:
        if name in _NAMES.get(module, ()) or (module.startswith("torch.distributed.") and name in _DISTRIBUTED):
            return Name(name)
        raise StoredError(
            f"{self._what} wants {module}.{name}, and only tensors are read from a pickle: nothing was run. Save it again with "
            "tensors alone, such as a state dict"
        )

    def persistent_load(self, pid: Any) -> Thing:
        return Thing("storage", pid)

    def load_reduce(self) -> None:
        """Calls of functions and classes alike."""
        args, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Name) or not isinstance(args, tuple):
            raise ValueError(f"a call of a {type(made).__name__}")
        self.stack[-1] = {} if made.name == "OrderedDict" else Thing(made.name, args)

    def load_build(self) -> None:
        """The attributes of an object. Those of a state dict (``_metadata``) are not needed."""
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, Thing):
            made.state = state
        elif not isinstance(made, dict):
            raise ValueError(f"attributes of a {type(made).__name__}")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_hashable(key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_hashable(key)] = value

    def load_additems(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update(map(_hashable, items))

    dispatch = {
        **dict.fromkeys(range(256), _refuse),
        **{code: load for code, load in _PythonUnpickler.dispatch.items() if bytes([code]) in _OPCODES},
        pickle.REDUCE[0]: load_reduce, pickle.NEWOBJ[0]: load_reduce, pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.ADDITEMS[0]: load_additems,
    }  # fmt: skip
