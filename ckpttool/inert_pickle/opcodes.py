"""The opcodes of a pickle: how each is encoded, and what it does to the machine.

Source: the `pickletools` module of the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from .machine import SET, Machine, PickleEnd, fault, is_importable, malformed
from .operands import PUSHING, Operation, grouped, index, indexed, line, popping, text
from .values import Global, Set_

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
    if m.below:
        fault("its pickle stops inside a group")
    if not m.stack:
        raise IndexError
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
    b"g": line(lambda m, raw: m.get(index(raw))),
    b"h": indexed("<B", Machine.get),
    b"j": indexed("<I", Machine.get),
    b"p": line(lambda m, raw: m.put(index(raw), m.stack[-1])),
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
