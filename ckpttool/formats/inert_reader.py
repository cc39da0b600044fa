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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from ..inert import ORDERED_DICT, BadKey, Global, OrderedDict_, Record, checked_key

MAX_EQUAL_HASHES = 1000
"""Keys of one dict or set with the same hash; each is compared with all the others."""

MAX_NAME = 1000
"""Characters in the name of a class or function, which every object made by it repeats."""

MAX_DIGITS = 4300
"""Decimal digits of an integer written as text, Python's own bound."""

PLAIN_KEYS = (str, bytes, type(None), Global)

Unpack = Callable[[bytes | mmap.mmap, int], tuple[int]]
_uint1: Unpack = struct.Struct("<B").unpack_from
_uint4: Unpack = struct.Struct("<I").unpack_from
_uint8: Unpack = struct.Struct("<Q").unpack_from
SIZES = {1: _uint1, 4: _uint4, 8: _uint8}

MARK, TUPLE, TUPLE1, EMPTY_TUPLE, BININT1, BINGET, BINPUT, LONG_BINPUT = b"(t\x85)Khqr"

Operation = Callable[["_Machine", int], int]
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
    except BadKey as fault:
        raise PickleFault(f"its pickle uses {fault} as a key") from None


def _fault(what: str) -> NoReturn:
    raise PickleFault(what)


class _Machine:
    """The stack machine. An opcode takes the position after it and returns the position of the next."""

    def __init__(
        self, data: bytes | mmap.mmap, persistent_load: PersistentLoad | None, reducers: Reducers
    ) -> None:
        self.data = data
        self.size = len(data)
        self.persistent_load = persistent_load
        # A name that has a reducer is one object wherever it stands, so that it is known at a glance.
        self.known = {(name.module, name.name): name for name in (*reducers, ORDERED_DICT)}
        self.reducers = {id(name): reducer for name, reducer in reducers.items()}
        self.reducers[id(ORDERED_DICT)] = self.ordered_dict
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each MARK
        self.memo: dict[int, Any] = {}
        self.protocol = 0
        self.hashes: Counter[tuple[int, int]] = Counter()
        self.copied = 0  # pairs taken from lists, which stay in the memo for another turn

    def run(self, position: int) -> Pickle:
        handlers = [partial(unknown, self)] * 256
        for code, operation in OPCODES.items():
            handlers[code[0]] = partial(operation, self)
        try:
            self._loop(position, handlers)
        except _Stop as stop:
            return Pickle(self.stack.pop(), stop.end, self.protocol)

    def _loop(self, position: int, handlers: list[partial[int]]) -> NoReturn:
        """Runs opcode after opcode; the eight that make up most of a state dict are carried out in place."""
        data, memo, below, stack = self.data, self.memo, self.below, self.stack
        while True:
            code = data[position]
            if code == LONG_BINPUT:
                memo[_uint4(data, position + 1)[0]] = stack[-1]
                position += 5
            elif code == BINGET and data[position + 1] in memo:
                stack.append(memo[data[position + 1]])
                position += 2
            elif code == BININT1:
                stack.append(data[position + 1])
                position += 2
            elif code == BINPUT:
                memo[data[position + 1]] = stack[-1]
                position += 2
            elif code == MARK:
                below.append(stack)
                stack = self.stack = []
                position += 1
            elif code == TUPLE:
                items = tuple(stack)
                stack = self.stack = below.pop()
                stack.append(items)
                position += 1
            elif code == TUPLE1:
                stack[-1] = (stack[-1],)
                position += 1
            elif code == EMPTY_TUPLE:
                stack.append(())
                position += 1
            else:
                position = handlers[code](position + 1)
                stack = self.stack

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

    # What opcodes do to the values on the stack.

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is Record:
            target.elements.extend(items)
        else:
            _fault(f"its pickle appends to a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values):
            _fault("its pickle has a key without a value")
        if isinstance(target, dict):
            for key, value in zip(keys, values, strict=True):
                target[key if isinstance(key, PLAIN_KEYS) else self.key(key, target)] = value
        elif type(target) is Record:
            target.items.extend(zip(keys, values, strict=True))
        else:
            _fault(f"its pickle sets items of a {type(target).__name__}")

    def make(self, how: str, callable: Any, args: Any, kwargs: Any = None) -> None:
        """What calling a name would have made: a value that is known by that name, or a Record."""
        if type(args) is not tuple or type(callable) not in (Global, Record):
            _fault("its pickle makes an object from malformed arguments")
        reducer = self.reducers.get(id(callable)) if how == "reduce" else None
        value = reducer(args) if reducer else None
        self.stack.append(Record(how, callable, args, kwargs) if value is None else value)

    def ordered_dict(self, args: tuple[Any, ...]) -> OrderedDict_ | None:
        """An OrderedDict: empty, or, in pickles of Python 2, made of a list of pairs."""
        if not args:
            return OrderedDict_()
        pairs = args[0] if len(args) == 1 else None
        if type(pairs) is not list:
            return None
        self.copied += len(pairs)
        if self.copied > self.size:
            _fault("its pickle copies a list over and over")
        if not all(type(p) in (list, tuple) and len(p) == 2 for p in pairs):
            return None
        return OrderedDict_((self.key(key, pairs), value) for key, value in pairs)

    def key(self, value: Any, owner: object) -> Any:
        """A value fit to be a key of `owner`: checked, and not one of very many made to collide."""
        checked_key(value)
        if isinstance(value, tuple | frozenset) or (isinstance(value, int) and value.bit_length() > 60):
            slot = id(owner), hash(value)
            self.hashes[slot] += 1
            if self.hashes[slot] > MAX_EQUAL_HASHES:
                _fault("its pickle has keys that were made to collide")
        return value

    def keys(self, values: list[Any], owner: object) -> Iterator[Any]:
        return (self.key(value, owner) for value in values)

    def build(self, state: Any) -> None:
        target = self.stack[-1]
        if type(target) is OrderedDict_ and target.attributes is None:
            target.attributes = state
        elif type(target) is Record and not target.has_state:
            target.state, target.has_state = state, True
        else:
            _fault(f"its pickle sets the state of a {type(target).__name__}")

    def refer(self, index: int) -> None:
        try:
            self.stack.append(self.memo[index])
        except KeyError:
            _fault(f"its pickle refers to value {index}, which it has not stored")

    def persistent(self, identity: object) -> None:
        if self.persistent_load is None:
            _fault("its pickle refers to something outside itself")
        self.stack.append(self.persistent_load(identity))


# The opcodes. Those alike but for a width or a constant are made by the four functions that come first.


def constant(make: Callable[[], object]) -> Operation:
    """Pushes a value; a container is a new one each time."""

    def operation(m: _Machine, position: int) -> int:
        m.stack.append(make())
        return position

    return operation


def number(width: int, read: Callable[[bytes | mmap.mmap, int], tuple[Any]]) -> Operation:
    """Pushes a number of fixed width."""

    def operation(m: _Machine, position: int) -> int:
        m.stack.append(read(m.data, position)[0])
        return position + width

    return operation


def sized(width: int, value: Callable[[bytes], object]) -> Operation:
    """Pushes what `value` makes of bytes that stand behind their count."""
    read = SIZES[width]

    def operation(m: _Machine, position: int) -> int:
        count = read(m.data, position)[0]
        m.stack.append(value(m.take(position + width, count)))
        return position + width + count

    return operation


def line(value: Callable[[bytes], object]) -> Operation:
    """Pushes what `value` makes of a line of text (protocol 0)."""

    def operation(m: _Machine, position: int) -> int:
        text, position = m.line(position)
        m.stack.append(value(text))
        return position

    return operation


def on_top(width: int, act: Callable[[_Machine, int], None]) -> Operation:
    """Acts with a memo index, which stands as a number or, with width 0, as a line of text."""

    def operation(m: _Machine, position: int) -> int:
        if width:
            act(m, SIZES[width](m.data, position)[0])
            return position + width
        text, position = m.line(position)
        act(m, integer(text))
        return position

    return operation


def grouped(act: Callable[[_Machine, list[Any]], None]) -> Operation:
    """Acts with everything above the last MARK."""

    def operation(m: _Machine, position: int) -> int:
        items = m.pop_mark()
        act(m, items)
        return position

    return operation


def popping(count: int, act: Callable[..., None]) -> Operation:
    """Acts with the topmost values, the lowest of them first."""

    def operation(m: _Machine, position: int) -> int:
        if len(m.stack) < count:
            raise IndexError
        values = m.stack[-count:]
        del m.stack[-count:]
        act(m, *values)
        return position

    return operation


def text(raw: bytes) -> str:
    try:  # Python's pickler writes lone surrogates, as file names may hold them
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        _fault("its pickle has text that is not UTF-8")


def escaped_text(raw: bytes) -> str:
    try:
        return raw.decode("raw-unicode-escape")
    except UnicodeDecodeError:
        _fault("its pickle has malformed text")


def string(raw: bytes) -> str | bytes:
    """A string of Python 2: text where it is UTF-8, as torch reads it, else its bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def quoted_string(raw: bytes) -> str | bytes:
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        _fault("its pickle has a malformed string")
    try:
        return string(codecs.escape_decode(raw[1:-1])[0])
    except ValueError:
        _fault("its pickle has a malformed string")


def signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def integer(raw: bytes) -> int:
    digits = raw.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > MAX_DIGITS:
        _fault("its pickle has a malformed integer")
    return int(raw)


def integer_or_bool(raw: bytes) -> int:
    return {b"00": False, b"01": True}[raw] if raw in (b"00", b"01") else integer(raw.removesuffix(b"L"))


def real(raw: bytes) -> float:
    try:
        return float(raw)
    except ValueError:
        _fault("its pickle has a malformed number")


def unknown(m: _Machine, position: int) -> int:
    _fault(f"its pickle has an unknown opcode {m.data[position - 1]:#04x} at byte {position - 1}")


def unsupported(m: _Machine, position: int) -> int:
    _fault("its pickle refers to something outside the file (extension registry or out-of-band buffer)")


def proto(m: _Machine, position: int) -> int:
    m.protocol = m.data[position]
    if m.protocol > 5:
        _fault(f"its pickle has protocol {m.protocol}, newer than 5")
    return position + 1


def frame(m: _Machine, position: int) -> int:
    _uint8(m.data, position)
    return position + 8


def stop(m: _Machine, position: int) -> int:
    if m.below:
        _fault("its pickle stops inside a group")
    raise _Stop(position)


def mark(m: _Machine, position: int) -> int:
    m.below.append(m.stack)
    m.stack = []
    return position


def pop(m: _Machine, position: int) -> int:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()
    return position


def put(m: _Machine, index: int) -> None:
    m.memo[index] = m.stack[-1]


def memoize(m: _Machine, position: int) -> int:
    m.memo[len(m.memo)] = m.stack[-1]
    return position


def duplicate(m: _Machine, position: int) -> int:
    m.stack.append(m.stack[-1])
    return position


def add_items(m: _Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not set:
        _fault(f"its pickle adds to a {type(target).__name__}")
    target.update(m.keys(items, target))


def make_dict(m: _Machine, items: list[Any]) -> None:
    m.stack.append({})
    m.set_items(items)


def global_(m: _Machine, position: int) -> int:
    module, position = m.line(position)
    name, position = m.line(position)
    stack_global(m, text(module), text(name))
    return position


def stack_global(m: _Machine, module: Any, name: Any) -> None:
    if type(name) is not str or type(module) is not str:
        _fault("its pickle has a name that is not text")
    if len(module) + len(name) > MAX_NAME:
        _fault(f"its pickle has a name of {len(module) + len(name)} characters")
    m.stack.append(m.known.get((module, name)) or Global(module, name))


def new_object_ex(m: _Machine, cls: Any, args: Any, kwargs: Any) -> None:
    if type(kwargs) is not dict:
        _fault("its pickle makes an object from malformed arguments")
    m.make("newobj", cls, args, kwargs)


def instance(m: _Machine, position: int) -> int:
    """INST and OBJ make instances of old classes: a call where there are arguments."""
    items = m.pop_mark()
    position = global_(m, position)
    m.make("reduce" if items else "newobj", m.stack.pop(), tuple(items))
    return position


def object_(m: _Machine, items: list[Any]) -> None:
    m.make("reduce" if len(items) > 1 else "newobj", items[0], tuple(items[1:]))


def persistent_line(m: _Machine, position: int) -> int:
    identity, position = m.line(position)
    m.persistent(identity.decode("ascii", "replace"))
    return position


OPCODES: dict[bytes, Operation] = {
    b"\x80": proto,
    b"\x95": frame,
    b".": stop,
    # Constants and numbers.
    b"N": constant(lambda: None),
    b"\x88": constant(lambda: True),
    b"\x89": constant(lambda: False),
    b")": constant(tuple),
    b"]": constant(list),
    b"}": constant(dict),
    b"\x8f": constant(set),
    b"J": number(4, struct.Struct("<i").unpack_from),
    b"K": number(1, _uint1),
    b"M": number(2, struct.Struct("<H").unpack_from),
    b"G": number(8, struct.Struct(">d").unpack_from),
    b"\x8a": sized(1, signed),
    b"\x8b": sized(4, signed),
    b"I": line(integer_or_bool),
    b"L": line(integer_or_bool),
    b"F": line(real),
    # Text and bytes.
    b"\x8c": sized(1, text),
    b"X": sized(4, text),
    b"\x8d": sized(8, text),
    b"V": line(escaped_text),
    b"U": sized(1, string),
    b"T": sized(4, string),
    b"S": line(quoted_string),
    b"C": sized(1, bytes),
    b"B": sized(4, bytes),
    b"\x8e": sized(8, bytes),
    b"\x96": sized(8, bytearray),
    # Stack and memo.
    b"(": mark,
    b"0": pop,
    b"1": grouped(lambda m, items: None),
    b"2": duplicate,
    b"g": on_top(0, _Machine.refer),
    b"h": on_top(1, _Machine.refer),
    b"j": on_top(4, _Machine.refer),
    b"p": on_top(0, put),
    b"q": on_top(1, put),
    b"r": on_top(4, put),
    b"\x94": memoize,
    # Containers.
    b"\x85": popping(1, lambda m, a: m.stack.append((a,))),
    b"\x86": popping(2, lambda m, a, b: m.stack.append((a, b))),
    b"\x87": popping(3, lambda m, a, b, c: m.stack.append((a, b, c))),
    b"t": grouped(lambda m, items: m.stack.append(tuple(items))),
    b"l": grouped(lambda m, items: m.stack.append(items)),
    b"d": grouped(make_dict),
    b"\x91": grouped(lambda m, items: m.stack.append(frozenset(m.keys(items, items)))),
    b"a": popping(1, lambda m, item: m.extend([item])),
    b"e": grouped(_Machine.extend),
    b"s": popping(2, lambda m, key, value: m.set_items([key, value])),
    b"u": grouped(_Machine.set_items),
    b"\x90": grouped(add_items),
    # Names and objects.
    b"c": global_,
    b"\x93": popping(2, stack_global),
    b"R": popping(2, lambda m, callable, args: m.make("reduce", callable, args)),
    b"\x81": popping(2, lambda m, cls, args: m.make("newobj", cls, args)),
    b"\x92": popping(3, new_object_ex),
    b"i": instance,
    b"o": grouped(object_),
    b"b": popping(1, _Machine.build),
    b"P": persistent_line,
    b"Q": popping(1, _Machine.persistent),
    b"\x82": unsupported,
    b"\x83": unsupported,
    b"\x84": unsupported,
    b"\x97": unsupported,
    b"\x98": unsupported,
}
