"""Read a pickle without importing or calling anything it names: the loop over its opcodes.

A pickle is a program for a small stack machine (`machine`); its opcodes are run one by one (`opcodes`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NoReturn

from .machine import (
    RECORD,
    SET,
    AfterBuild,
    BadKey,
    Call,
    CutShort,
    Machine,
    Malformed,
    OpcodeShortcut,
    PersistentLoad,
    PickleEnd,
    Reducers,
    fault,
)
from .machine import PickleFault as PickleFault
from .operands import OPCODES, uint4, unknown
from .values import ORDERED_DICT, FrozenSet_, Global, OrderedDict_, Record, Set_

# Calls that a pickle makes for plain values that its protocol has no opcode for (Python's `pickle` module,
# version 2 included). For arguments that no pickler writes each returns None, and the call becomes a Record.


def ordered_dict(m: Machine, args: tuple[Any, ...]) -> OrderedDict_ | None:
    """`OrderedDict()`, or in pickles of Python 2 `OrderedDict(pairs)`."""
    match args:
        case ():
            return OrderedDict_()
        case (list(pairs),):
            m.copy(len(pairs))
            if all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
                return OrderedDict_((m.key(key, pairs), value) for key, value in pairs)
    return None


def collected(kind: Callable[[Iterable[Any]], object]) -> Call:
    """`set(items)` or `frozenset(items)`."""

    def call(m: Machine, args: tuple[Any, ...]) -> object:
        match args:
            case (list(items),):
                m.spend(SET)
                m.copy(len(items))
                return kind(m.key(item, items) for item in items)
        return None

    return call


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
    match args:
        case (Global() | Record(), tuple(), kwargs) if type(kwargs) is dict:
            m.spend(RECORD)
            return Record("newobj", *args)
    return None


_BUILTINS: dict[str, Call] = {
    "set": collected(Set_),
    "frozenset": collected(FrozenSet_),
    "bytes": lambda m, args: None if args else b"",
    "bytearray": bytearray_,
}
CALLS: dict[Global, Call] = {
    ORDERED_DICT: ordered_dict,
    **{Global(module, name): _BUILTINS[name] for module in ("builtins", "__builtin__") for name in _BUILTINS},
    Global("_codecs", "encode"): encode,
    Global("copyreg", "__newobj_ex__"): new_object,
}


MARK, TUPLE, TUPLE1, EMPTY_TUPLE, BININT1, BINGET, BINPUT, LONG_BINPUT, LONG_BINGET = b"(t\x85)Khqrj"
NONE, POP = b"N0"
WITHOUT_END = repeat(None)
MALFORMED = "its pickle is cut short or malformed"


@dataclass(frozen=True, slots=True)
class Pickle:
    """A pickle that was read."""

    value: object
    end: int
    protocol: int  # 0 where the pickle states none
    # Those of values that it drops too: a pickle can call a function and pop what it returned.
    names: frozenset[Global] = frozenset()


def read_pickle(
    data: bytes,
    start: int = 0,
    *,
    persistent_load: PersistentLoad | None = None,
    reducers: Reducers | None = None,
    shortcuts: Mapping[Global, OpcodeShortcut] | None = None,
    after_build: AfterBuild | None = None,
    steps: Iterator[None] = WITHOUT_END,
    as_in_c: bool = False,
) -> Pickle:
    """Read the pickle that begins at `start`; raise PickleFault, or CutShort where the data ends first.

    `reducers` return the values of calls by name, besides those of Python's own types; `persistent_load`
    those of persistent ids (torch's storages), without which a pickle that has one is refused. `after_build`
    passes over what is no pickle behind an object (joblib's arrays). `steps` are those that it may take, as
    many as it yields; several pickles can share them. `as_in_c` reads numbers up to a NUL, as Python's module
    in C does; otherwise such a number is refused.
    """
    machine = Machine(data, persistent_load, reducers or {}, shortcuts or {}, CALLS, after_build, as_in_c)
    try:
        _run(machine, start, steps)
    except PickleEnd as stop:
        return Pickle(machine.stack.pop(), stop.end, machine.protocol, frozenset(machine.names))
    except (EOFError, struct.error):
        wrong: PickleFault = CutShort(MALFORMED)
    except IndexError:
        wrong = Malformed(MALFORMED)
    except BadKey as key:
        wrong = PickleFault(f"its pickle uses {key} as a key")
    except PickleFault as own:
        wrong = own
    wrong.names, wrong.called = frozenset(machine.names) | wrong.names, machine.called or wrong.called
    try:
        raise wrong from None
    finally:
        del wrong  # its traceback holds this frame, and so the machine


def _run(machine: Machine, position: int, steps: Iterator[None]) -> NoReturn:
    """Run opcode after opcode; those that make up most of a state dict are inlined here."""
    handlers = [partial(unknown, machine)] * 256
    for opcode, operation in OPCODES.items():
        handlers[opcode[0]] = partial(operation, machine)
    data, memo, far, below, stack = machine.data, machine.memo, machine.far, machine.below, machine.stack
    shortcuts = machine.shortcuts
    try:
        for _ in steps:
            code = data[position]
            if code == LONG_BINPUT:
                index = uint4(data, position + 1)[0]
                if index == len(memo) and not far:
                    memo.append(stack[-1])
                else:
                    machine.put(index, stack[-1])
                position += 5
            elif code in (BINGET, LONG_BINGET):
                index = data[position + 1] if code == BINGET else uint4(data, position + 1)[0]
                value = memo[index] if index < len(memo) else None
                if id(value) in shortcuts and (end := shortcuts[id(value)](machine, position)) > position:
                    position = end
                    continue
                position += 2 if code == BINGET else 5
                if value is None:
                    machine.get(index)
                else:
                    stack.append(value)
            elif code == BININT1:
                stack.append(data[position + 1])
                position += 2
            elif code == BINPUT:
                machine.put(data[position + 1], stack[-1])
                position += 2
            elif code == MARK:
                below.append(stack)
                stack = machine.stack = []
                position += 1
            elif code == TUPLE:
                items = tuple(stack)
                stack = machine.stack = below.pop()
                stack.append(items)
                position += 1
            elif code == TUPLE1:
                stack[-1] = (stack[-1],)
                position += 1
            elif code == EMPTY_TUPLE:
                stack.append(())
                position += 1
            elif code == NONE:
                stack.append(None)
                position += 1
            elif code == POP and stack:
                stack.pop()
                position += 1
            else:
                position = handlers[code](position + 1)
                stack = machine.stack
    except IndexError:  # of an empty stack, unless the opcode or its operand of one byte is past the end
        if position + 1 < machine.size:
            raise
        raise EOFError from None
    fault("its pickle has more steps than are followed")
