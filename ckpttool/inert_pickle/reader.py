"""Reads a pickle without importing or calling anything it names: the loop over its opcodes.

A pickle is a program for a small stack machine (`inert_machine`); its opcodes are carried out one by one
(`inert_opcodes`).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from .calls import CALLS
from .key_guard import BadKey
from .machine import Machine, PersistentLoad, Reducers, Shortcut, Skipped
from .machine import PickleFault as PickleFault
from .opcodes import OPCODES, Stop, uint4, unknown
from .values import Global

MARK, TUPLE, TUPLE1, EMPTY_TUPLE, BININT1, BINGET, BINPUT, LONG_BINPUT, LONG_BINGET = b"(t\x85)Khqrj"


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
    shortcuts: Mapping[Global, Shortcut] | None = None,
) -> Pickle:
    """Reads the pickle that begins at `start`.

    Args:
        data: the bytes; more may follow the pickle.
        persistent_load: makes a value of a persistent id (torch's storages).
        reducers: makes a value of the arguments of a known callable; those of `CALLS` do too, and all others
            become Records. A reducer that returns None leaves the Record in place.
        shortcuts: carries out what follows a known name, when it is met again, at once.

    Raises:
        PickleFault: truncated, malformed, or hostile.
    """
    machine = Machine(data, persistent_load, reducers or {}, shortcuts or {}, CALLS)
    try:
        _run(machine, start)
    except Stop as stop:
        return Pickle(machine.stack.pop(), stop.end, machine.protocol)
    except (IndexError, struct.error):
        raise PickleFault("its pickle is cut short or malformed") from None
    except BadKey as fault:
        raise PickleFault(f"its pickle uses {fault} as a key") from None


def _run(machine: Machine, position: int) -> NoReturn:
    """Runs opcode after opcode; the nine that make up most of a state dict are carried out in place."""
    handlers = [partial(unknown, machine)] * 256
    for each, operation in OPCODES.items():
        handlers[each[0]] = partial(operation, machine)
    data, memo, far, below, stack = machine.data, machine.memo, machine.far, machine.below, machine.stack
    shortcuts = machine.shortcuts
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
            if value is None or type(value) is Skipped:
                machine.refer(index)
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
