"""Reads a pickle without importing or calling anything it names.

A pickle is a program for a small stack machine. Python's own machine runs code of the objects it builds, not
only at REDUCE but at BUILD, APPENDS and SETITEMS too, hashes whatever it is told to use as a key, and sizes
its memo by the file's word. This one builds the values of `inert` instead, checks the kind of every
operand, and takes no size on trust. Opcodes: the `pickletools` module of the standard library.
"""

from __future__ import annotations

import codecs
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..inert import ORDERED_DICT, Global, OrderedDict_, Record

MAX_KEY_PARTS = 1000
"""Values inside a tuple used as a key: hashing visits each, and a tuple can repeat itself 2^60 times."""

MAX_DIGITS = 4300
"""Decimal digits of an integer written as text, Python's own bound."""

PLAIN_KEYS = (str, int, float, bytes, complex, type(None), Global)

Unpack = Callable[[bytes | mmap.mmap, int], tuple[int]]
_int4: Unpack = struct.Struct("<i").unpack_from
_uint2: Unpack = struct.Struct("<H").unpack_from
_uint4: Unpack = struct.Struct("<I").unpack_from
_uint8: Unpack = struct.Struct("<Q").unpack_from
_double = struct.Struct(">d").unpack_from

Handler = Callable[[int], int]
PersistentLoad = Callable[[object], object]
Reducers = Mapping[Global, Callable[[tuple[Any, ...]], object]]


class PickleFault(ValueError):
    """The pickle breaks its own rules, or does what none of ours may. Readers add the file's name."""


class _Stop(Exception):
    def __init__(self, end: int) -> None:
        self.end = end


@dataclass(frozen=True, slots=True)
class Pickle:
    """One pickle: its value, the position after it, and its protocol (0 where it states none)."""

    value: object
    end: int
    protocol: int


def read_pickle(
    data: bytes | mmap.mmap,
    start: int = 0,
    *,
    persistent_load: PersistentLoad | None = None,
    reducers: Reducers | None = None,
) -> Pickle:
    """Reads the pickle that begins at `start`.

    Args:
        data: the bytes; more may follow the pickle.
        persistent_load: makes a value of a persistent id (torch's storages).
        reducers: makes a value of the arguments of a known callable; all others become Records. A reducer
            that returns None leaves the Record in place.

    Raises:
        PickleFault: truncated, malformed, or hostile.
    """
    machine = _Machine(data, persistent_load, reducers or {})
    try:
        return machine.run(start)
    except (IndexError, struct.error):
        raise PickleFault("its pickle is cut short or malformed") from None


def _fault(what: str) -> NoReturn:
    raise PickleFault(what)


class _Machine:
    """The stack machine. Each opcode is a method from the position after it to the position of the next."""

    def __init__(
        self, data: bytes | mmap.mmap, persistent_load: PersistentLoad | None, reducers: Reducers
    ) -> None:
        self.data = data
        self.size = len(data)
        self.persistent_load = persistent_load
        self.reducers = reducers
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each MARK
        self.memo: dict[int, Any] = {}
        self.protocol = 0

    def run(self, position: int) -> Pickle:
        data = self.data
        handlers = [self.op_unknown] * 256
        for code, name in OPCODES.items():
            handlers[code] = getattr(self, name)
        try:
            while True:
                position = handlers[data[position]](position + 1)
        except _Stop as stop:
            return Pickle(self.stack.pop(), stop.end, self.protocol)

    # What the handlers share.

    def take(self, position: int, count: int) -> bytes:
        end = position + count
        if end > self.size:
            raise IndexError
        return self.data[position:end]

    def line(self, position: int) -> tuple[bytes, int]:
        end = self.data.find(b"\n", position)
        if end < 0:
            raise IndexError
        return self.data[position:end], end + 1

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def key(self, value: Any) -> Any:
        """A value fit to be a key: of a kind whose hash runs no code and ends in bounded time."""
        todo, seen = [value], 0
        while todo:
            part = todo.pop()
            seen += 1
            if isinstance(part, tuple | frozenset):
                if seen + len(todo) + len(part) > MAX_KEY_PARTS:
                    _fault("its pickle uses a giant tuple as a key")
                todo.extend(part)
            elif isinstance(part, dict | list | set | bytearray):
                _fault(f"its pickle uses a {type(part).__name__} as a key")
        return value

    # Flow.

    def op_unknown(self, position: int) -> int:
        _fault(f"its pickle has an unknown opcode {self.data[position - 1]:#04x} at byte {position - 1}")

    def op_unsupported(self, position: int) -> int:
        _fault("its pickle refers to something outside the file (extension registry or out-of-band buffer)")

    def op_proto(self, position: int) -> int:
        if self.data[position] > 5:
            _fault(f"its pickle has protocol {self.data[position]}, newer than 5")
        self.protocol = self.data[position]
        return position + 1

    def op_frame(self, position: int) -> int:
        _uint8(self.data, position)
        return position + 8

    def op_stop(self, position: int) -> int:
        if self.below:
            _fault("its pickle stops inside a group")
        raise _Stop(position)

    # Constants.

    def op_none(self, position: int) -> int:
        self.stack.append(None)
        return position

    def op_true(self, position: int) -> int:
        self.stack.append(True)
        return position

    def op_false(self, position: int) -> int:
        self.stack.append(False)
        return position

    def op_binint(self, position: int) -> int:
        self.stack.append(_int4(self.data, position)[0])
        return position + 4

    def op_binint1(self, position: int) -> int:
        self.stack.append(self.data[position])
        return position + 1

    def op_binint2(self, position: int) -> int:
        self.stack.append(_uint2(self.data, position)[0])
        return position + 2

    def op_long1(self, position: int) -> int:
        count = self.data[position]
        self.stack.append(int.from_bytes(self.take(position + 1, count), "little", signed=True))
        return position + 1 + count

    def op_long4(self, position: int) -> int:
        count = _uint4(self.data, position)[0]
        self.stack.append(int.from_bytes(self.take(position + 4, count), "little", signed=True))
        return position + 4 + count

    def op_int(self, position: int) -> int:
        text, position = self.line(position)
        booleans = {b"00": False, b"01": True}
        self.stack.append(booleans[text] if text in booleans else self.number(text.rstrip(b"L")))
        return position

    def number(self, text: bytes) -> int:
        digits = text.removeprefix(b"-")
        if not digits.isdigit() or len(digits) > MAX_DIGITS:
            _fault("its pickle has a malformed integer")
        return int(text)

    def op_float(self, position: int) -> int:
        text, position = self.line(position)
        try:
            self.stack.append(float(text))
        except ValueError:
            _fault("its pickle has a malformed number")
        return position

    def op_binfloat(self, position: int) -> int:
        self.stack.append(_double(self.data, position)[0])
        return position + 8

    # Text and bytes.

    def op_binunicode(self, position: int) -> int:
        count = _uint4(self.data, position)[0]
        return self.push_text(position + 4, count)

    def op_short_binunicode(self, position: int) -> int:
        return self.push_text(position + 1, self.data[position])

    def op_binunicode8(self, position: int) -> int:
        return self.push_text(position + 8, _uint8(self.data, position)[0])

    def push_text(self, position: int, count: int) -> int:
        try:  # Python's pickler writes lone surrogates, as file names may hold them
            self.stack.append(self.take(position, count).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            _fault("its pickle has text that is not UTF-8")
        return position + count

    def op_unicode(self, position: int) -> int:
        text, position = self.line(position)
        try:
            self.stack.append(text.decode("raw-unicode-escape"))
        except UnicodeDecodeError:
            _fault("its pickle has malformed text")
        return position

    def op_string(self, position: int) -> int:
        text, position = self.line(position)
        if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
            _fault("its pickle has a malformed string")
        try:
            self.push_string(codecs.escape_decode(text[1:-1])[0])
        except ValueError:
            _fault("its pickle has a malformed string")
        return position

    def op_binstring(self, position: int) -> int:
        count = _uint4(self.data, position)[0]
        self.push_string(self.take(position + 4, count))
        return position + 4 + count

    def op_short_binstring(self, position: int) -> int:
        count = self.data[position]
        self.push_string(self.take(position + 1, count))
        return position + 1 + count

    def push_string(self, raw: bytes) -> None:
        """A string of Python 2: text where it is UTF-8, as torch reads it, else its bytes."""
        try:
            self.stack.append(raw.decode("utf-8"))
        except UnicodeDecodeError:
            self.stack.append(raw)

    def op_binbytes(self, position: int) -> int:
        count = _uint4(self.data, position)[0]
        self.stack.append(self.take(position + 4, count))
        return position + 4 + count

    def op_short_binbytes(self, position: int) -> int:
        count = self.data[position]
        self.stack.append(self.take(position + 1, count))
        return position + 1 + count

    def op_binbytes8(self, position: int) -> int:
        count = _uint8(self.data, position)[0]
        self.stack.append(self.take(position + 8, count))
        return position + 8 + count

    def op_bytearray8(self, position: int) -> int:
        count = _uint8(self.data, position)[0]
        self.stack.append(bytearray(self.take(position + 8, count)))
        return position + 8 + count

    # Stack and memo.

    def op_mark(self, position: int) -> int:
        self.below.append(self.stack)
        self.stack = []
        return position

    def op_pop(self, position: int) -> int:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()
        return position

    def op_pop_mark(self, position: int) -> int:
        self.pop_mark()
        return position

    def op_dup(self, position: int) -> int:
        self.stack.append(self.stack[-1])
        return position

    def get(self, index: int) -> None:
        try:
            self.stack.append(self.memo[index])
        except KeyError:
            _fault(f"its pickle refers to value {index}, which it has not stored")

    def op_binget(self, position: int) -> int:
        self.get(self.data[position])
        return position + 1

    def op_long_binget(self, position: int) -> int:
        self.get(_uint4(self.data, position)[0])
        return position + 4

    def op_get(self, position: int) -> int:
        text, position = self.line(position)
        self.get(self.number(text))
        return position

    def op_binput(self, position: int) -> int:
        self.memo[self.data[position]] = self.stack[-1]
        return position + 1

    def op_long_binput(self, position: int) -> int:
        self.memo[_uint4(self.data, position)[0]] = self.stack[-1]
        return position + 4

    def op_put(self, position: int) -> int:
        text, position = self.line(position)
        self.memo[self.number(text)] = self.stack[-1]
        return position

    def op_memoize(self, position: int) -> int:
        self.memo[len(self.memo)] = self.stack[-1]
        return position

    # Containers.

    def op_empty_tuple(self, position: int) -> int:
        self.stack.append(())
        return position

    def op_tuple1(self, position: int) -> int:
        stack = self.stack
        stack[-1] = (stack[-1],)
        return position

    def op_tuple2(self, position: int) -> int:
        stack = self.stack
        stack[-2:] = [(stack[-2], stack[-1])]
        return position

    def op_tuple3(self, position: int) -> int:
        stack = self.stack
        stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        return position

    def op_tuple(self, position: int) -> int:
        items = self.pop_mark()
        self.stack.append(tuple(items))
        return position

    def op_empty_list(self, position: int) -> int:
        self.stack.append([])
        return position

    def op_list(self, position: int) -> int:
        items = self.pop_mark()
        self.stack.append(items)
        return position

    def op_empty_dict(self, position: int) -> int:
        self.stack.append({})
        return position

    def op_dict(self, position: int) -> int:
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)
        return position

    def op_empty_set(self, position: int) -> int:
        self.stack.append(set())
        return position

    def op_frozenset(self, position: int) -> int:
        items = self.pop_mark()
        self.stack.append(frozenset(map(self.key, items)))
        return position

    def op_append(self, position: int) -> int:
        item = self.stack.pop()
        self.extend([item])
        return position

    def op_appends(self, position: int) -> int:
        items = self.pop_mark()
        self.extend(items)
        return position

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is Record:
            target.elements.extend(items)
        else:
            _fault(f"its pickle appends to a {type(target).__name__}")

    def op_additems(self, position: int) -> int:
        items = self.pop_mark()
        target = self.stack[-1]
        if type(target) is not set:
            _fault(f"its pickle adds to a {type(target).__name__}")
        target.update(map(self.key, items))
        return position

    def op_setitem(self, position: int) -> int:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])
        return position

    def op_setitems(self, position: int) -> int:
        items = self.pop_mark()
        self.set_items(items)
        return position

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values):
            _fault("its pickle has a key without a value")
        if isinstance(target, dict):
            for key, value in zip(keys, values, strict=True):
                target[key if isinstance(key, PLAIN_KEYS) else self.key(key)] = value
        elif type(target) is Record:
            target.items.extend(zip(keys, values, strict=True))
        else:
            _fault(f"its pickle sets items of a {type(target).__name__}")

    # Names and objects.

    def op_global(self, position: int) -> int:
        module, position = self.line(position)
        name, position = self.line(position)
        self.push_global(module, name)
        return position

    def push_global(self, module: bytes, name: bytes) -> None:
        try:
            self.stack.append(Global(module.decode("utf-8"), name.decode("utf-8")))
        except UnicodeDecodeError:
            _fault("its pickle has a name that is not UTF-8")

    def op_stack_global(self, position: int) -> int:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            _fault("its pickle has a name that is not text")
        self.stack.append(Global(module, name))
        return position

    def op_reduce(self, position: int) -> int:
        args, callable = self.stack.pop(), self.stack.pop()
        self.make("reduce", callable, args)
        return position

    def op_newobj(self, position: int) -> int:
        args, cls = self.stack.pop(), self.stack.pop()
        self.make("newobj", cls, args)
        return position

    def op_newobj_ex(self, position: int) -> int:
        kwargs, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        if type(kwargs) is not dict:
            _fault("its pickle makes an object from malformed arguments")
        self.make("newobj", cls, args, kwargs)
        return position

    def op_inst(self, position: int) -> int:
        items = self.pop_mark()
        position = self.op_global(position)
        self.make("reduce" if items else "newobj", self.stack.pop(), tuple(items))
        return position

    def op_obj(self, position: int) -> int:
        items = self.pop_mark()
        cls, args = items[0], tuple(items[1:])
        self.make("reduce" if args else "newobj", cls, args)
        return position

    def make(self, how: str, callable: Any, args: Any, kwargs: Any = None) -> None:
        if type(args) is not tuple or not isinstance(callable, Global | Record):
            _fault("its pickle makes an object from malformed arguments")
        value: object = None
        if how == "reduce" and isinstance(callable, Global):
            if callable == ORDERED_DICT:
                value = self.ordered_dict(args)
            elif callable in self.reducers:
                value = self.reducers[callable](args)
        self.stack.append(Record(how, callable, args, kwargs) if value is None else value)

    def ordered_dict(self, args: tuple[Any, ...]) -> OrderedDict_ | None:
        """An OrderedDict: empty, or, in pickles of Python 2, made of a list of pairs."""
        if not args:
            return OrderedDict_()
        pairs = args[0] if len(args) == 1 else None
        if type(pairs) is not list or not all(type(p) in (list, tuple) and len(p) == 2 for p in pairs):
            return None
        return OrderedDict_((self.key(key), value) for key, value in pairs)

    def op_build(self, position: int) -> int:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is OrderedDict_ and target.attributes is None:
            target.attributes = state
        elif type(target) is Record and not target.has_state:
            target.state, target.has_state = state, True
        else:
            _fault(f"its pickle sets the state of a {type(target).__name__}")
        return position

    def op_persid(self, position: int) -> int:
        text, position = self.line(position)
        self.push_persistent(text.decode("ascii", "replace"))
        return position

    def op_binpersid(self, position: int) -> int:
        self.push_persistent(self.stack.pop())
        return position

    def push_persistent(self, identity: object) -> None:
        if self.persistent_load is None:
            _fault("its pickle refers to something outside itself")
        self.stack.append(self.persistent_load(identity))


OPCODES = {
    ord("("): "op_mark",
    ord("."): "op_stop",
    ord("0"): "op_pop",
    ord("1"): "op_pop_mark",
    ord("2"): "op_dup",
    ord("F"): "op_float",
    ord("I"): "op_int",
    ord("J"): "op_binint",
    ord("K"): "op_binint1",
    ord("L"): "op_int",
    ord("M"): "op_binint2",
    ord("N"): "op_none",
    ord("P"): "op_persid",
    ord("Q"): "op_binpersid",
    ord("R"): "op_reduce",
    ord("S"): "op_string",
    ord("T"): "op_binstring",
    ord("U"): "op_short_binstring",
    ord("V"): "op_unicode",
    ord("X"): "op_binunicode",
    ord("a"): "op_append",
    ord("b"): "op_build",
    ord("c"): "op_global",
    ord("d"): "op_dict",
    ord("}"): "op_empty_dict",
    ord("e"): "op_appends",
    ord("g"): "op_get",
    ord("h"): "op_binget",
    ord("i"): "op_inst",
    ord("j"): "op_long_binget",
    ord("l"): "op_list",
    ord("]"): "op_empty_list",
    ord("o"): "op_obj",
    ord("p"): "op_put",
    ord("q"): "op_binput",
    ord("r"): "op_long_binput",
    ord("s"): "op_setitem",
    ord("t"): "op_tuple",
    ord(")"): "op_empty_tuple",
    ord("u"): "op_setitems",
    ord("G"): "op_binfloat",
    0x80: "op_proto",
    0x81: "op_newobj",
    0x82: "op_unsupported",
    0x83: "op_unsupported",
    0x84: "op_unsupported",
    0x85: "op_tuple1",
    0x86: "op_tuple2",
    0x87: "op_tuple3",
    0x88: "op_true",
    0x89: "op_false",
    0x8A: "op_long1",
    0x8B: "op_long4",
    ord("B"): "op_binbytes",
    ord("C"): "op_short_binbytes",
    0x8C: "op_short_binunicode",
    0x8D: "op_binunicode8",
    0x8E: "op_binbytes8",
    0x8F: "op_empty_set",
    0x90: "op_additems",
    0x91: "op_frozenset",
    0x92: "op_newobj_ex",
    0x93: "op_stack_global",
    0x94: "op_memoize",
    0x95: "op_frame",
    0x96: "op_bytearray8",
    0x97: "op_unsupported",
    0x98: "op_unsupported",
}
