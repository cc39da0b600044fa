"""What follows an opcode in a pickle: how text and numbers are encoded, and the opcodes that push them."""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from .machine import SET, Machine, PickleEnd, fault, is_importable, malformed
from .values import Global, Set_

MAX_DIGITS = 4300  # of an integer written as text: Python's own limit

# Runs an opcode: gets the machine and the position after the opcode, returns the position of the next one.
Operation = Callable[[Machine, int], int]


def decoded(what: str, decode: Callable[[bytes], Any], raw: bytes) -> Any:
    """Return what `decode` makes of some bytes, which the pickle calls `what`."""
    try:
        return decode(raw)
    except ValueError:
        malformed(f"its pickle has {what}")


# UTF-8 with lone surrogates, which Python's pickler writes as file names may hold them
text = partial(decoded, "text that is not UTF-8", lambda raw: raw.decode("utf-8", "surrogatepass"))
escaped_text = partial(decoded, "malformed text", lambda raw: raw.decode("raw-unicode-escape"))


def string(raw: bytes) -> str | bytes:
    """A string of Python 2: text where it is UTF-8, as torch decodes it, else bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def quoted_string(raw: bytes) -> Any:
    """A string of Python 2 in quotation marks."""
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        malformed("its pickle has a malformed string")
    return string(decoded("a malformed string", codecs.escape_decode, raw[1:-1])[0])


def signed(raw: bytes) -> int:
    """An integer in two's complement, little-endian."""
    return int.from_bytes(raw, "little", signed=True)


# Python's module in C reads a number to the first NUL and goes on; the one in Python stops at such a line.


def integer(raw: bytes) -> int:
    """An integer as Python's source has it."""
    digits, nul, _ = raw.partition(b"\0")
    if not _NUMBER.fullmatch(digits) and (digits or not nul):  # the module in C takes no digits for 0
        malformed("its pickle has a malformed integer")
    if nul or len(raw) > MAX_DIGITS or _OCTAL.fullmatch(raw):
        fault("its pickle has an integer that readers take for different ones")
    number: int = decoded("a malformed integer", lambda text: int(text, 0), raw)
    return number


def index(raw: bytes) -> int:
    """An index of the memo in decimal digits."""
    digits, nul, _ = raw.partition(b"\0")
    if not _INDEX.fullmatch(digits):
        malformed("its pickle has a malformed index")
    if nul or len(raw) > MAX_DIGITS:
        fault("its pickle has an index that readers take for different ones")
    return int(raw)


def real(raw: bytes) -> float:
    """A number with a fraction or an exponent, as Python's source has it."""
    digits, nul, _ = raw.partition(b"\0")
    number: float = decoded("a malformed number", float, digits)
    if nul:
        fault("its pickle has a number that readers take for different ones")
    return number


def integer_or_bool(raw: bytes) -> int:
    """An integer in decimal digits, with Python 2's `L` or not; `00` and `01` are False and True."""
    return {b"00": False, b"01": True}[raw] if raw in (b"00", b"01") else integer(raw.removesuffix(b"L"))


_NUMBER, _INDEX = re.compile(rb"\s*[-+]?[0-9]\w*\s*"), re.compile(rb"\s*\+?[0-9]+(_[0-9]+)*\s*")
# Leading zeros, which Python's module in C takes for octal, and the one in Python for a mistake
_OCTAL = re.compile(rb"\s*[-+]?0[0-7]+\s*")


# Functions that make operations: these differ only in a width, a constant or an action.


def pushed(value: Callable[[bytes], object]) -> Callable[[Machine, bytes], None]:
    """Push what `value` makes of some bytes."""
    return lambda m, raw: m.stack.append(value(raw))


def constant(make: Callable[[], object]) -> Operation:
    """Push a value made by `make`: containers must be new ones each time."""

    def operation(m: Machine, position: int) -> int:
        m.stack.append(make())
        return position

    return operation


def number(layout: str) -> Operation:
    """Push a number of a `layout` of `struct`."""
    read, width = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def operation(m: Machine, position: int) -> int:
        m.stack.append(read(m.data, position)[0])
        return position + width

    return operation


def indexed(layout: str, act: Callable[[Machine, int], None]) -> Operation:
    """Call `act` with a memo index."""
    read, width = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def operation(m: Machine, position: int) -> int:
        act(m, read(m.data, position)[0])
        return position + width

    return operation


def sized(layout: str, value: Callable[[bytes], object]) -> Operation:
    """Push what `value` makes of bytes that follow their count."""
    read, width = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def operation(m: Machine, position: int) -> int:
        count: int = read(m.data, position)[0]
        m.stack.append(value(m.take(position + width, count)))
        return position + width + count

    return operation


def line(act: Callable[[Machine, bytes], object]) -> Operation:
    """Call `act` with a line of text (protocol 0)."""

    def operation(m: Machine, position: int) -> int:
        text, position = m.line(position)
        act(m, text)
        return position

    return operation


def number_line(act: Callable[[Machine, bytes], object]) -> Operation:
    """Call `act` with a line that is a number."""

    def operation(m: Machine, position: int) -> int:
        digits, position = m.line(position)
        act(m, (digits.partition(b"\0")[0] or b"0") if m.as_in_c and b"\0" in digits else digits)
        return position

    return operation


def grouped(act: Callable[[Machine, list[Any]], object]) -> Operation:
    """Call `act` with all values above the last MARK, which are removed."""

    def operation(m: Machine, position: int) -> int:
        act(m, m.pop_mark())
        return position

    return operation


def popping(count: int, act: Callable[..., object]) -> Operation:
    """Call `act` with the topmost `count` values, the lowest first; they are removed."""

    def operation(m: Machine, position: int) -> int:
        if len(m.stack) < count:
            raise IndexError
        values = m.stack[-count:]
        del m.stack[-count:]
        act(m, *values)
        return position

    return operation


PUSHING: dict[bytes, Operation] = {
    # Constants and numbers.
    b"N": constant(lambda: None),
    b"\x88": constant(lambda: True),
    b"\x89": constant(lambda: False),
    b")": constant(tuple),
    b"]": constant(list),
    b"}": constant(dict),
    b"J": number("<i"),
    b"K": number("<B"),
    b"M": number("<H"),
    b"G": number(">d"),
    b"\x8a": sized("<B", signed),
    b"\x8b": sized("<I", signed),
    b"I": number_line(pushed(integer_or_bool)),
    b"L": number_line(pushed(integer_or_bool)),
    b"F": number_line(pushed(real)),
    # Text and bytes.
    b"\x8c": sized("<B", text),
    b"X": sized("<I", text),
    b"\x8d": sized("<Q", text),
    b"V": line(pushed(escaped_text)),
    b"U": sized("<B", string),
    b"T": sized("<I", string),
    b"S": line(pushed(quoted_string)),
    b"C": sized("<B", bytes),
    b"B": sized("<I", bytes),
    b"\x8e": sized("<Q", bytes),
    b"\x96": sized("<Q", bytearray),
}
"""Opcodes that push a value which is in the pickle, or a new container."""


# ---- The opcodes of a pickle: how each is encoded, and what it does to the machine.
#
# Source: the `pickletools` module of the standard library.


MAX_NAME = 1000  # characters in the name of a class or function: messages and lists repeat it

uint4: Callable[[bytes, int], tuple[int]] = struct.Struct("<I").unpack_from


def unknown(m: Machine, position: int) -> int:
    malformed(f"its pickle has an unknown opcode {m.data[position - 1]:#04x} at byte {position - 1}")


def unsupported(m: Machine, position: int) -> int:
    malformed("its pickle refers to something outside the file (extension registry or out-of-band buffer)")


def proto(m: Machine, position: int) -> int:
    m.protocol = m.data[position]
    if m.protocol > 5:
        malformed(f"its pickle has protocol {m.protocol}, newer than 5")
    return position + 1


def stop(m: Machine, position: int) -> int:
    if not m.stack:
        raise IndexError
    if m.below:
        fault("its pickle stops inside a group")
    raise PickleEnd(position)


def mark(m: Machine, position: int) -> int:
    m.below.append(m.stack)
    m.stack = []
    return position


def pop(m: Machine, position: int) -> int:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()
    return position


def memoize(m: Machine, position: int) -> int:
    m.memoize()
    return position


def empty_set(m: Machine, position: int) -> int:
    m.spend(SET)
    m.stack.append(Set_())
    return position


def add_items(m: Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not Set_:
        fault(f"its pickle adds to a {type(target).__name__}")
    target.update(m.key(item, target) for item in items)


def make_dict(m: Machine, items: list[Any]) -> None:
    m.stack.append({})
    m.set_items(items)


def global_(m: Machine, position: int) -> int:
    module, position = m.line(position)
    name, position = m.line(position)
    stack_global(m, text(module), text(name))
    return position


def stack_global(m: Machine, module: Any, name: Any) -> None:
    if type(name) is not str or type(module) is not str:
        fault("its pickle has a name that is not text")
    if (length := len(module) + len(name)) > MAX_NAME:
        refuse = fault if is_importable(Global(module, name)) else malformed
        refuse(f"its pickle has a name of {length} characters")
    m.name(module, name)


def build(m: Machine, position: int) -> int:
    """BUILD. In joblib's files the bytes of an array stand behind the object that describes it."""
    state = m.stack.pop()
    m.build(state)
    return position if m.after_build is None else m.after_build(m.stack[-1], position)


def new_object_ex(m: Machine, cls: Any, args: Any, kwargs: Any) -> None:
    if type(kwargs) is not dict:
        fault("its pickle creates an object from malformed arguments")
    m.make("newobj", cls, args, kwargs)


def instance(m: Machine, position: int) -> int:
    """INST: an instance of an old-style class, a call where there are arguments."""
    items = m.pop_mark()
    position = global_(m, position)
    m.make("reduce" if items else "newobj", m.stack.pop(), tuple(items))
    return position


def object_(m: Machine, items: list[Any]) -> None:
    """OBJ: the same as INST, with the class on the stack."""
    m.make("reduce" if len(items) > 1 else "newobj", items[0], tuple(items[1:]))


OPCODES: dict[bytes, Operation] = {
    b"\x80": proto,
    b"\x95": indexed("<Q", lambda m, size: None),  # of a frame
    b".": stop,
    **PUSHING,
    b"\x8f": empty_set,
    # Stack and memo.
    b"(": mark,
    b"0": pop,
    b"1": grouped(lambda m, items: None),
    b"2": popping(1, lambda m, value: m.stack.extend((value, value))),
    b"g": number_line(lambda m, raw: m.get(index(raw))),
    b"h": indexed("<B", Machine.get),
    b"j": indexed("<I", Machine.get),
    b"p": number_line(lambda m, raw: m.put(index(raw), m.stack[-1])),
    b"q": indexed("<B", lambda m, index: m.put(index, m.stack[-1])),
    b"r": indexed("<I", lambda m, index: m.put(index, m.stack[-1])),
    b"\x94": memoize,
    # Containers.
    b"\x85": popping(1, lambda m, a: m.stack.append((a,))),
    b"\x86": popping(2, lambda m, a, b: m.stack.append((a, b))),
    b"\x87": popping(3, lambda m, a, b, c: m.stack.append((a, b, c))),
    b"t": grouped(lambda m, items: m.stack.append(tuple(items))),
    b"l": grouped(lambda m, items: m.stack.append(items)),
    b"d": grouped(make_dict),
    b"\x91": grouped(Machine.frozen_set),
    b"a": popping(1, lambda m, item: m.extend([item])),
    b"e": grouped(Machine.extend),
    b"s": popping(2, lambda m, key, value: m.set_items([key, value])),
    b"u": grouped(Machine.set_items),
    b"\x90": grouped(add_items),
    # Names and objects.
    b"c": global_,
    b"\x93": popping(2, stack_global),
    b"R": popping(2, lambda m, callable, args: m.make("reduce", callable, args)),
    b"\x81": popping(2, lambda m, cls, args: m.make("newobj", cls, args)),
    b"\x92": popping(3, new_object_ex),
    b"i": instance,
    b"o": grouped(object_),
    b"b": build,
    b"P": line(lambda m, raw: m.persistent(raw.decode("ascii", "replace"))),
    b"Q": popping(1, Machine.persistent),
    **dict.fromkeys((b"\x82", b"\x83", b"\x84", b"\x97", b"\x98"), unsupported),
}
