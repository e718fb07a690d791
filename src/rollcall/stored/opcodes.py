"""A reader of pickles that knows only what writers of tensors use, and builds only what it is given to build with.

Not Python's own: its reader in C takes the memory that a number in the file asks for, and hashes tuples that hold tuples without
an end; its reader in Python takes eight times as long. Each method here is one opcode: it gets the position behind the opcode and
returns that of the next one. A position behind the end raises IndexError when the next opcode is looked for there.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, Protocol

MOST_NESTED = 1000  # values in a tuple and the tuples in it; a mesh has a few
NEWEST_PROTOCOL = 5
_FLOAT = struct.Struct(">d")


class Builder(Protocol):
    """What becomes of the names, records and objects of a pickle."""

    def find(self, module: str, name: str) -> Any: ...
    def record(self, pid: Any) -> Any: ...
    def call(self, make: Any, args: Any) -> Any: ...
    def set_state(self, made: Any, state: Any) -> None: ...


def read_pickle(data: bytes, builder: Builder) -> Any:
    """Any exception: it is damaged, or holds what it should not."""
    machine = _Machine(data, builder)
    at, table = 0, _TABLE
    while (code := data[at]) != _STOP:
        at = table[code](machine, at + 1)
    return machine.stack.pop()


class _Machine:
    def __init__(self, data: bytes, builder: Builder) -> None:
        self._data, self._builder = data, builder
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._nested: dict[int, tuple[Any, int]] = {}  # tuples with tuples in them, by id: how many values, written out

    def refuse(self, at: int) -> int:
        raise ValueError(f"the opcode {self._data[at - 1 : at]!r}, which no writer of tensors uses")

    def protocol(self, at: int) -> int:
        if self._data[at] > NEWEST_PROTOCOL:
            raise ValueError(f"the protocol {self._data[at]}, and {NEWEST_PROTOCOL} is the newest that is read")
        return at + 1

    def frame(self, at: int) -> int:
        return at + 8

    def none(self, at: int) -> int:
        self.stack.append(None)
        return at

    def true(self, at: int) -> int:
        self.stack.append(True)
        return at

    def false(self, at: int) -> int:
        self.stack.append(False)
        return at

    def int1(self, at: int) -> int:
        self.stack.append(self._data[at])
        return at + 1

    def int2(self, at: int) -> int:
        self.stack.append(int.from_bytes(self._data[at : at + 2], "little"))
        return at + 2

    def int4(self, at: int) -> int:
        self.stack.append(int.from_bytes(self._data[at : at + 4], "little", signed=True))
        return at + 4

    def int_of_any_size(self, at: int) -> int:
        end = at + 1 + self._data[at]
        self.stack.append(int.from_bytes(self._data[at + 1 : end], "little", signed=True))
        return end

    def float8(self, at: int) -> int:
        self.stack.append(_FLOAT.unpack_from(self._data, at)[0])
        return at + 8

    def text1(self, at: int) -> int:
        return self._text(at + 1, self._data[at])

    def text4(self, at: int) -> int:
        return self._text(at + 4, int.from_bytes(self._data[at : at + 4], "little"))

    def text8(self, at: int) -> int:
        return self._text(at + 8, int.from_bytes(self._data[at : at + 8], "little"))

    def _text(self, at: int, size: int) -> int:
        self.stack.append(self._data[at : at + size].decode(errors="surrogatepass"))
        return at + size

    def bytes1(self, at: int) -> int:
        end = at + 1 + self._data[at]
        self.stack.append(self._data[at + 1 : end])
        return end

    def mark(self, at: int) -> int:
        self._marks.append(len(self.stack))
        return at

    def _since_mark(self) -> list[Any]:
        begin = self._marks.pop()
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def pop(self, at: int) -> int:
        self.stack.pop()
        return at

    def pop_mark(self, at: int) -> int:
        self._since_mark()
        return at

    def again(self, at: int) -> int:
        self.stack.append(self.stack[-1])
        return at

    def empty_dict(self, at: int) -> int:
        self.stack.append({})
        return at

    def empty_list(self, at: int) -> int:
        self.stack.append([])
        return at

    def empty_tuple(self, at: int) -> int:
        self.stack.append(())
        return at

    def empty_set(self, at: int) -> int:
        self.stack.append(set())
        return at

    def tuple_since_mark(self, at: int) -> int:
        return self._tuple(self._since_mark(), at)

    def tuple1(self, at: int) -> int:
        return self._tuple([self.stack.pop()], at)

    def tuple2(self, at: int) -> int:
        second = self.stack.pop()
        return self._tuple([self.stack.pop(), second], at)

    def tuple3(self, at: int) -> int:
        third, second = self.stack.pop(), self.stack.pop()
        return self._tuple([self.stack.pop(), second, third], at)

    def _tuple(self, values: list[Any], at: int) -> int:
        made = (*values,)
        self.stack.append(made)
        inner = [one for one in values if type(one) is tuple]
        if inner:
            total = len(made) + sum(self._nested[id(one)][1] if id(one) in self._nested else len(one) for one in inner)
            if total > MOST_NESTED:
                raise ValueError("tuples in tuples without an end")
            self._nested[id(made)] = (made, total)
        return at

    def append(self, at: int) -> int:
        value = self.stack.pop()
        self._top(list).append(value)
        return at

    def appends(self, at: int) -> int:
        values = self._since_mark()
        self._top(list).extend(values)
        return at

    def add_items(self, at: int) -> int:
        values = self._since_mark()
        self._top(set).update(values)
        return at

    def set_item(self, at: int) -> int:
        value, key = self.stack.pop(), self.stack.pop()
        self._top(dict)[key] = value
        return at

    def set_items(self, at: int) -> int:
        values = self._since_mark()
        self._top(dict).update(zip(values[::2], values[1::2], strict=True))
        return at

    def _top(self, kind: type[Any]) -> Any:
        if not isinstance(top := self.stack[-1], kind):
            raise ValueError(f"a {type(top).__name__} in the place of a {kind.__name__}")
        return top

    def put1(self, at: int) -> int:
        self._memo[self._data[at]] = self.stack[-1]
        return at + 1

    def put4(self, at: int) -> int:
        self._memo[int.from_bytes(self._data[at : at + 4], "little")] = self.stack[-1]
        return at + 4

    def put_next(self, at: int) -> int:
        self._memo[len(self._memo)] = self.stack[-1]
        return at

    def get1(self, at: int) -> int:
        self.stack.append(self._memo[self._data[at]])
        return at + 1

    def get4(self, at: int) -> int:
        self.stack.append(self._memo[int.from_bytes(self._data[at : at + 4], "little")])
        return at + 4

    def name(self, at: int) -> int:
        middle = self._data.index(b"\n", at)
        end = self._data.index(b"\n", middle + 1)
        self.stack.append(self._builder.find(self._data[at:middle].decode(), self._data[middle + 1 : end].decode()))
        return end + 1

    def name_of_stack(self, at: int) -> int:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name that is not a text")
        self.stack.append(self._builder.find(module, name))
        return at

    def record(self, at: int) -> int:
        self.stack.append(self._builder.record(self.stack.pop()))
        return at

    def call(self, at: int) -> int:
        """Of a function, and of a class (NEWOBJ)."""
        args = self.stack.pop()
        self.stack[-1] = self._builder.call(self.stack[-1], args)
        return at

    def call_with_names(self, at: int) -> int:
        if self.stack.pop():
            raise ValueError("a call with named arguments")
        return self.call(at)

    def build(self, at: int) -> int:
        state = self.stack.pop()
        self._builder.set_state(self.stack[-1], state)
        return at


_STOP = pickle.STOP[0]
_METHODS: dict[bytes, Callable[[_Machine, int], int]] = {
    pickle.PROTO: _Machine.protocol, pickle.FRAME: _Machine.frame, pickle.NONE: _Machine.none,
    pickle.NEWTRUE: _Machine.true, pickle.NEWFALSE: _Machine.false,
    pickle.BININT1: _Machine.int1, pickle.BININT2: _Machine.int2, pickle.BININT: _Machine.int4, pickle.LONG1: _Machine.int_of_any_size,
    pickle.BINFLOAT: _Machine.float8,
    pickle.SHORT_BINUNICODE: _Machine.text1, pickle.BINUNICODE: _Machine.text4, pickle.BINUNICODE8: _Machine.text8,
    pickle.SHORT_BINBYTES: _Machine.bytes1,
    pickle.MARK: _Machine.mark, pickle.POP: _Machine.pop, pickle.POP_MARK: _Machine.pop_mark, pickle.DUP: _Machine.again,
    pickle.EMPTY_DICT: _Machine.empty_dict, pickle.EMPTY_LIST: _Machine.empty_list,
    pickle.EMPTY_TUPLE: _Machine.empty_tuple, pickle.EMPTY_SET: _Machine.empty_set,
    pickle.TUPLE: _Machine.tuple_since_mark, pickle.TUPLE1: _Machine.tuple1, pickle.TUPLE2: _Machine.tuple2, pickle.TUPLE3: _Machine.tuple3,
    pickle.APPEND: _Machine.append, pickle.APPENDS: _Machine.appends, pickle.ADDITEMS: _Machine.add_items,
    pickle.SETITEM: _Machine.set_item, pickle.SETITEMS: _Machine.set_items,
    pickle.BINPUT: _Machine.put1, pickle.LONG_BINPUT: _Machine.put4, pickle.MEMOIZE: _Machine.put_next,
    pickle.BINGET: _Machine.get1, pickle.LONG_BINGET: _Machine.get4,
    pickle.GLOBAL: _Machine.name, pickle.STACK_GLOBAL: _Machine.name_of_stack, pickle.BINPERSID: _Machine.record,
    pickle.REDUCE: _Machine.call, pickle.NEWOBJ: _Machine.call, pickle.NEWOBJ_EX: _Machine.call_with_names,
    pickle.BUILD: _Machine.build,
}  # fmt: skip
_TABLE = [_METHODS.get(bytes([code]), _Machine.refuse) for code in range(256)]
