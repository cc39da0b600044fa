"""Read a pickle without importing or calling anything it names: the loop over its opcodes.

A pickle is a program for a small stack machine (`machine`); its opcodes are run one by one (`opcodes`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from .calls import CALLS
from .key_guard import BadKey
from .machine import CutShort, Machine, PersistentLoad, Reducers, Shortcut
from .machine import PickleFault as PickleFault
from .opcodes import OPCODES, Stop, uint4, unknown
from .values import Global

MARK, TUPLE, TUPLE1, EMPTY_TUPLE, BININT1, BINGET, BINPUT, LONG_BINPUT, LONG_BINGET = b"(t\x85)Khqrj"


MALFORMED = "its pickle is cut short or malformed"


@dataclass(frozen=True, slots=True)
class Pickle:
    """A pickle that was read.

    Attributes:
        end: the position after it.
        protocol: 0 where the pickle states none.
        names: every name that it mentions, also those of values that it drops: a pickle can call a function
            and pop what it returned.
    """

    value: object
    end: int
    protocol: int
    names: frozenset[Global] = frozenset()


def read_pickle(
    data: bytes,
    start: int = 0,
    *,
    persistent_load: PersistentLoad | None = None,
    reducers: Reducers | None = None,
    shortcuts: Mapping[Global, Shortcut] | None = None,
) -> Pickle:
    """Read the pickle that begins at `start`.

    Args:
        data: the bytes; more may follow the pickle.
        persistent_load: returns the value of a persistent id (torch's storages); without it a pickle that has
            one is refused.
        reducers: by name, what returns the value of a call; `CALLS` adds those of Python's own types. Any
            other call becomes a Record, and so does one for which the reducer returns None.
        shortcuts: by name, what runs the opcodes after a reference to that name in one step.

    Returns:
        The value, made of Python's plain types and those of `values`.

    Raises:
        CutShort: the data ends before the pickle does.
        PickleFault: malformed, or made to take much time or memory.
    """
    machine = Machine(data, persistent_load, reducers or {}, shortcuts or {}, CALLS)
    try:
        _run(machine, start)
    except Stop as stop:
        return Pickle(machine.stack.pop(), stop.end, machine.protocol, frozenset(machine.names))
    except (EOFError, struct.error):
        raise CutShort(MALFORMED) from None
    except IndexError:
        raise PickleFault(MALFORMED) from None
    except BadKey as fault:
        raise PickleFault(f"its pickle uses {fault} as a key") from None


def _run(machine: Machine, position: int) -> NoReturn:
    """Run opcode after opcode; the nine that make up most of a state dict are inlined here."""
    handlers = [partial(unknown, machine)] * 256
    for each, operation in OPCODES.items():
        handlers[each[0]] = partial(operation, machine)
    data, memo, far, below, stack = machine.data, machine.memo, machine.far, machine.below, machine.stack
    shortcuts = machine.shortcuts
    try:
        while True:
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
                position += 2 if code == BINGET else 5
                value = memo[index] if index < len(memo) else None
                if value is None:
                    machine.get(index)
                elif id(value) in shortcuts and (end := shortcuts[id(value)](machine, position)) > position:
                    position = end
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
            else:
                position = handlers[code](position + 1)
                stack = machine.stack
    except IndexError:  # of an empty stack, unless the opcode or its operand of one byte is past the end
        if position + 1 < machine.size:
            raise
        raise EOFError from None
