"""The stack machine that a pickle is a program for, working on inert values.

Python's own machine runs code of the objects it builds, not only at REDUCE but at BUILD, APPENDS and SETITEMS
too, hashes whatever it is given as a key, and trusts the file for the size of its memo. This one builds the
values of `inert` instead, checks the kind of every operand, and takes no size on trust. What an opcode looks
like in the file is the business of `inert_opcodes`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from .key_guard import KeyGuard
from .values import FrozenSet_, Global, OrderedDict_, Record

ROOM = 32 << 20
ROOM_PER_BYTE = 48
"""Bytes of memory for sets and objects: so many for any pickle, and so many more for each of its bytes. An
opcode of one byte makes a set of 328."""

SET, RECORD = 328, 112

PLAIN_KEYS = (str, bytes, type(None), Global)

PersistentLoad = Callable[[object], object]
Reducers = Mapping[Global, Callable[[tuple[Any, ...]], object]]
Call = Callable[["Machine", tuple[Any, ...]], object]
"""Makes a value of the arguments of a call, or None. It is given the machine: a method of it would
keep the machine, and all that it holds, in a cycle."""

Shortcut = Callable[["Machine", int], int]
"""Carries out at once what follows a name in the file, and returns the position after it; or does nothing and
returns the position it was given."""


class Skipped(tuple[Any, ...]):
    """Placeholder in the memo for values that a shortcut did not make, as hardly anything refers to them.

    It holds the place of the first of them, behind which the others follow, a function that makes them all,
    and its arguments.
    """

    __slots__ = ()


class PickleFault(ValueError):
    """The pickle breaks its own rules, or does what none of ours may. Readers add the file's name."""


def fault(what: str) -> NoReturn:
    raise PickleFault(what)


class Machine:
    """The state of the machine, and what opcodes do to it.

    Attributes:
        memo: values by index, as long as each index is the one that comes next; `far` holds all others.
        rewrites: how often a value in the memo was replaced.
    """

    def __init__(
        self,
        data: bytes | mmap.mmap,
        persistent_load: PersistentLoad | None,
        reducers: Reducers,
        shortcuts: Mapping[Global, Shortcut],
        calls: Mapping[Global, Call],
    ) -> None:
        self.data = data
        self.size = len(data)
        self.persistent_load = persistent_load
        # A name that means something is one object wherever it appears, so that it is known at a glance.
        self.known = {(name.module, name.name): name for name in (*reducers, *shortcuts, *calls)}
        self.reducers = {id(name): reducer for name, reducer in reducers.items()}
        self.calls = {id(name): call for name, call in calls.items()}
        self.shortcuts = {id(name): shortcut for name, shortcut in shortcuts.items()}
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each MARK
        self.memo: list[Any] = []
        self.far: dict[int, Any] = {}
        self.rewrites = 0
        self.protocol = 0
        self.guard = KeyGuard(self.size)
        self.copied = 0
        self.room = ROOM + ROOM_PER_BYTE * self.size

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

    def spend(self, nbytes: int) -> None:
        self.room -= nbytes
        if self.room < 0:
            fault(
                f"its pickle of {self.size} bytes creates more objects than fit in the memory allowed for it"
            )

    # The memo.

    def put(self, index: int, value: object) -> None:
        if index < len(self.memo):
            self.memo[index] = value
            self.rewrites += 1
        elif index == len(self.memo):
            self.memo.append(value)
            self.far.pop(index, None)
        else:
            self.far[index] = value

    def memoize(self) -> None:
        self.put(len(self.memo) + len(self.far), self.stack[-1])

    def refer(self, index: int) -> None:
        if index < len(self.memo):
            value = self.memo[index]
            self.stack.append(self.make_up_for(index, value) if type(value) is Skipped else value)
        elif index in self.far:
            self.stack.append(self.far[index])
        else:
            fault(f"its pickle refers to value {index}, which it has not stored")

    def make_up_for(self, index: int, skipped: Skipped) -> object:
        first, values, *args = skipped
        for at, value in enumerate(values(*args), first):
            if self.memo[at] is skipped:
                self.memo[at] = value
        return self.memo[index]

    # What opcodes do to the values on the stack.

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is Record:
            if not target.elements:
                target.elements = []
            target.elements.extend(items)
        else:
            fault(f"its pickle appends to a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values):
            fault("its pickle has a key without a value")
        if isinstance(target, dict) and {*map(type, keys)} == {str}:
            target.update(zip(keys, values, strict=True))
        elif isinstance(target, dict):
            for key, value in zip(keys, values, strict=True):
                target[key if isinstance(key, PLAIN_KEYS) else self.key(key, target)] = value
        elif type(target) is Record:
            if not target.items:
                target.items = []
            target.items.extend(zip(keys, values, strict=True))
        else:
            fault(f"its pickle sets items of a {type(target).__name__}")

    def make(self, how: str, callable: Any, args: Any, kwargs: Any = None) -> None:
        """What calling a name would have made: a value that is known by that name, or a Record."""
        if type(args) is not tuple or type(callable) not in (Global, Record):
            fault("its pickle creates an object from malformed arguments")
        value: object = None
        if how == "reduce" and id(callable) in self.reducers:
            value = self.reducers[id(callable)](args)
        elif how == "reduce" and id(callable) in self.calls:
            value = self.calls[id(callable)](self, args)
        if value is None:
            self.spend(RECORD)
            value = Record(how, callable, args, kwargs)
        self.stack.append(value)

    def copy(self, count: int) -> None:
        """Counts what a call copies, as its arguments stay in the memo for another turn."""
        self.copied += count
        if self.copied > self.size:
            fault("its pickle copies a list or text over and over")

    def key(self, value: Any, owner: object) -> Any:
        return self.guard.check(value, owner)

    def keys(self, values: list[Any], owner: object) -> Iterator[Any]:
        return (self.guard.check(value, owner) for value in values)

    def frozen_set(self, items: list[Any]) -> None:
        self.spend(SET)
        self.stack.append(FrozenSet_(self.keys(items, items)))

    def build(self, state: Any) -> None:
        target = self.stack[-1]
        if type(target) is OrderedDict_ and target.attributes is None:
            target.attributes = state
        elif type(target) is Record and not target.has_state:
            target.state, target.has_state = state, True
        else:
            fault(f"its pickle sets the state of a {type(target).__name__}")

    def persistent(self, identity: object) -> None:
        if self.persistent_load is None:
            fault("its pickle refers to something outside itself")
        self.stack.append(self.persistent_load(identity))
