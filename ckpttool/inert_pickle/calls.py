"""Calls that a pickle makes for plain values that its protocol has no opcode for.

Each function takes the machine and the arguments, and returns the value, or None for arguments that no
pickler writes; the call then becomes a Record. Source: Python's `pickle` module, version 2 included.
"""

from __future__ import annotations

from typing import Any

from .machine import RECORD, SET, Call, Machine
from .values import ORDERED_DICT, FrozenSet_, Global, OrderedDict_, Record, Set_

BUILTINS = ("builtins", "__builtin__")


def ordered_dict(m: Machine, args: tuple[Any, ...]) -> OrderedDict_ | None:
    """`OrderedDict()`, or in pickles of Python 2 `OrderedDict(pairs)`."""
    if not args:
        return OrderedDict_()
    pairs = args[0] if len(args) == 1 else None
    if type(pairs) is not list:
        return None
    m.copy(len(pairs))
    if not all(type(p) in (list, tuple) and len(p) == 2 for p in pairs):
        return None
    return OrderedDict_((m.key(key, pairs), value) for key, value in pairs)


def set_(m: Machine, args: tuple[Any, ...]) -> Set_ | None:
    """`set(items)`."""
    items = _elements(m, args)
    return None if items is None else Set_(items)


def frozenset_(m: Machine, args: tuple[Any, ...]) -> FrozenSet_ | None:
    """`frozenset(items)`."""
    items = _elements(m, args)
    return None if items is None else FrozenSet_(items)


def _elements(m: Machine, args: tuple[Any, ...]) -> list[Any] | None:
    if len(args) != 1 or type(args[0]) is not list:
        return None
    m.spend(SET)
    m.copy(len(args[0]))
    return [m.key(item, args[0]) for item in args[0]]


def bytes_(m: Machine, args: tuple[Any, ...]) -> bytes | None:
    """`bytes()`."""
    return None if args else b""


def encode(m: Machine, args: tuple[Any, ...]) -> bytes | None:
    """`_codecs.encode(text, "latin1")`: bytes as text, one character each."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        return None
    m.copy(len(args[0]))
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        return None


def bytearray_(m: Machine, args: tuple[Any, ...]) -> bytearray | None:
    """`bytearray()`, `bytearray(bytes)` or `bytearray(text, "latin-1")`."""
    if len(args) == 1 and type(args[0]) is bytes:
        m.copy(len(args[0]))
        return bytearray(args[0])
    raw = encode(m, args) if args else b""
    return None if raw is None else bytearray(raw)


def new_object(m: Machine, args: tuple[Any, ...]) -> Record | None:
    """`copyreg.__newobj_ex__(cls, args, kwargs)`: what the opcode NEWOBJ_EX does since protocol 4."""
    if len(args) != 3 or type(args[1]) is not tuple or type(args[2]) is not dict:
        return None
    if type(args[0]) not in (Global, Record):
        return None
    m.spend(RECORD)
    return Record("newobj", *args)


CALLS: dict[Global, Call] = {
    ORDERED_DICT: ordered_dict,
    **{Global(module, "set"): set_ for module in BUILTINS},
    **{Global(module, "frozenset"): frozenset_ for module in BUILTINS},
    **{Global(module, "bytes"): bytes_ for module in BUILTINS},
    **{Global(module, "bytearray"): bytearray_ for module in BUILTINS},
    Global("_codecs", "encode"): encode,
    Global("copyreg", "__newobj_ex__"): new_object,
}
