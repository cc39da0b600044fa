"""The stack machine that a pickle is a program for, working on inert values.

Python's own machine runs code of the objects it builds, at REDUCE, BUILD, APPENDS and SETITEMS, hashes any
key it is given, and trusts the file for the size of its memo. This one builds the values of `values`
instead, checks the type of every operand, and bounds its memory. `opcodes` reads the opcodes from the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from .values import FrozenSet_, Global, OrderedDict_, Record, container_name, is_state

MAX_DEPTH = 50  # levels of tuples in a key: comparing two of them is recursive
MAX_PARTS = 1000  # values inside a key: hashing visits each, and a tuple can repeat itself 2^60 times

# Values inside all tuples of a file used as keys: a base, and more for each byte of the file. Each value
# takes at least one byte, unless keys share tuples.
BASE_PARTS, PARTS_PER_BYTE = 1 << 20, 2

MAX_EQUAL_HASHES = 1000  # keys of one dict or set with the same hash: each is compared with all others


class BadKey(ValueError):
    """A value that is not a key in any ordinary dict; its message says what it is."""


class KeyGuard:
    """Checks all keys of one file."""

    def __init__(self, size: int) -> None:
        self.parts_left = BASE_PARTS + PARTS_PER_BYTE * size
        self.hashes: dict[int, tuple[object, Counter[int]]] = {}

    def check(self, value: Any, owner: object) -> Any:
        """Return a key of `owner`; raise BadKey if it is unhashable, or takes long to hash or compare."""
        self._look_inside(value)
        if isinstance(value, tuple | frozenset) or (isinstance(value, int) and value.bit_length() > 60):
            # The owner is kept, so that no other object gets its id.
            _, hashes = self.hashes.setdefault(id(owner), (owner, Counter()))
            hashes[hash(value)] += 1
            if hashes[hash(value)] > MAX_EQUAL_HASHES:
                raise BadKey("one of many that were crafted to collide")
        return value

    def _look_inside(self, value: Any) -> None:
        level, seen, depth = [value], 0, 0
        while level:
            if depth > MAX_DEPTH:
                raise BadKey("a deeply nested tuple")
            inside: list[Any] = []
            for part in level:
                if isinstance(part, tuple | frozenset):
                    seen += len(part)
                    if seen > MAX_PARTS:
                        raise BadKey("a giant tuple")
                    inside.extend(part)
                elif isinstance(part, dict | list | set | bytearray):
                    raise BadKey(f"a {container_name(part)}")
            level, depth = inside, depth + 1
        self.parts_left -= seen
        if self.parts_left < 0:
            raise BadKey("one of too many large tuples")


# Bytes of memory that the sets and objects of a pickle may take: a base, and more for each byte of the
# pickle. An opcode of one byte makes a set of 328 bytes.
BASE_MEMORY, MEMORY_PER_BYTE = 32 << 20, 48

MAX_LINE = 16 << 20  # bytes of a line of text; only protocol 0 has more than names in lines
SET, RECORD = 328, 112  # bytes of memory of an empty set, and of a Record
PLAIN_KEYS = (str, bytes, type(None), Global)

PersistentLoad = Callable[[object], object]  # returns the value of a persistent id

# By the name of a callable: returns the value that calling it makes, or None, and the call becomes a Record.
Reducers = Mapping[Global, Callable[[tuple[Any, ...]], object]]

# A reducer that is also given the machine. (A method would keep the machine alive in a cycle.)
Call = Callable[["Machine", tuple[Any, ...]], object]

# Gets the object that BUILD set the state of and the position behind it; returns where the next opcode is.
AfterBuild = Callable[[object, int], int]


class OpcodeShortcut(Protocol):
    """Runs opcodes that begin with a reference to a name in one step.

    It may leave None in the memo for values that nobody may ever ask for, and puts them there when one does.
    """

    def __call__(self, machine: Machine, position: int) -> int:
        """Return the position after the opcodes, or the one it got where they are others."""

    def recall(self, machine: Machine, index: int) -> None:
        """Put the value that belongs to a place in the memo there, if it was left out."""

    def settle(self, machine: Machine) -> None:
        """Put all values that were left out into the memo."""


class PickleFault(ValueError):
    """The pickle is malformed, or does what no checkpoint may. Format readers add the file's name.

    Python's own machine may go on where this one does not.

    Attributes:
        names: those that the pickle mentions before: Python would have called them by then.
        called: whether it makes an object by one of them that can be imported, other than those that are
            understood.
    """

    names: frozenset[Global] = frozenset()
    called = False


class Malformed(PickleFault):
    """What Python's own machine stops at too, in what is no pickle, or at the end of what has run."""


class CutShort(Malformed):
    """The data ends inside the pickle, so far as can be told."""


class PickleEnd(Exception):
    """The pickle ends at byte `end`."""

    def __init__(self, end: int) -> None:
        self.end = end


def fault(what: str) -> NoReturn:
    """Raise PickleFault."""
    raise PickleFault(what)


def malformed(what: str) -> NoReturn:
    """Raise Malformed."""
    raise Malformed(what)


def _refuse_for(target: object, items: list[Any], what: str) -> NoReturn:
    """Refuse to put items into a value: Python stops at one that takes none."""
    is_stopped = items and isinstance(target, int | float | str | bytes | tuple | type(None))
    (malformed if is_stopped else fault)(what)


# A module, or the way to a class in it; a part of a name is also that of a file.
_PATH = re.compile(r"\w{1,255}(\.\w{1,255})*")


def is_importable(value: object) -> bool:
    """Return whether a value is a name that could be one of Python's."""
    return type(value) is Global and all(map(_PATH.fullmatch, (value.module, value.name)))


class Machine:
    """The state of the machine, and what opcodes do to it."""

    def __init__(
        self,
        data: bytes,
        persistent_load: PersistentLoad | None,
        reducers: Reducers,
        shortcuts: Mapping[Global, OpcodeShortcut],
        calls: Mapping[Global, Call],
        after_build: AfterBuild | None = None,
        as_in_c: bool = False,
    ) -> None:
        self.data = data
        self.as_in_c = as_in_c
        self.size = len(data)
        self.persistent_load = persistent_load
        # A known name is one object wherever it appears, so that comparing identities is enough.
        self.known = {(name.module, name.name): name for name in (*reducers, *shortcuts, *calls)}
        self.reducers = {id(name): reducer for name, reducer in reducers.items()}
        self.calls = {id(name): call for name, call in calls.items()}
        self.shortcuts = {id(name): shortcut for name, shortcut in shortcuts.items()}
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each MARK
        self.memo: list[Any] = []
        self.far: dict[int, Any] = {}  # values whose index does not follow on the one before
        self.rewrites = 0  # how often a value in the memo was replaced
        self.names: set[Global] = set()  # also of values that were dropped since
        self.called = False  # a Record was made, of a name that could be one
        self.after_build = after_build
        self.protocol = 0
        self.key = KeyGuard(self.size).check
        self.copied = 0
        self.memory_left = BASE_MEMORY + MEMORY_PER_BYTE * self.size

    def take(self, position: int, count: int) -> bytes:
        """Return `count` bytes of the pickle. Raises EOFError past its end."""
        end = position + count
        if end > self.size:
            raise EOFError
        return self.data[position:end]

    def line(self, position: int) -> tuple[bytes, int]:
        """Return a line without its end, and the position after it. Raises EOFError without an end."""
        end = self.data.find(b"\n", position, position + MAX_LINE)
        if end < 0 and self.size - position >= MAX_LINE:
            fault(f"its pickle has a line of more than {MAX_LINE} bytes")
        if end < 0:
            raise EOFError
        return self.data[position:end], end + 1

    def pop_mark(self) -> list[Any]:
        """Return the values above the last MARK, and remove them and the mark."""
        items = self.stack
        self.stack = self.below.pop()
        return items

    def spend(self, nbytes: int) -> None:
        """Count memory of a new object. Raises PickleFault when it is more than the pickle may take."""
        self.memory_left -= nbytes
        if self.memory_left < 0:
            fault(f"its pickle of {self.size} bytes creates more objects than its memory allows")

    # The memo.

    def put(self, index: int, value: object) -> None:
        """Store a value in the memo."""
        if index < len(self.memo):
            for shortcut in self.shortcuts.values():
                shortcut.settle(self)  # later it could not tell that this place was taken
            self.memo[index] = value
            self.rewrites += 1
        elif index == len(self.memo):
            self.memo.append(value)
            self.far.pop(index, None)
        else:
            self.far[index] = value

    def memoize(self) -> None:
        """Store the topmost value under the next index."""
        self.put(len(self.memo) + len(self.far), self.stack[-1])

    def value_at(self, index: int) -> Any:
        """Return the value at a place that the memo has."""
        if self.memo[index] is None:
            for shortcut in self.shortcuts.values():
                shortcut.recall(self, index)
        return self.memo[index]

    def get(self, index: int) -> None:
        """Push a value of the memo."""
        if index < len(self.memo):
            self.stack.append(self.value_at(index))
        elif index in self.far:
            self.stack.append(self.far[index])
        else:
            malformed(f"its pickle refers to value {index}, which it has not stored")

    # What opcodes do to the values on the stack.

    def extend(self, items: list[Any]) -> None:
        """Append items to the list or object on top."""
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is Record and id(target.callable) not in self.reducers:
            target.elements = target.elements or []
            target.elements.extend(items)
        else:
            _refuse_for(target, items, f"its pickle appends to a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """Set items (key, value, key, value, …) of the dict or object on top."""
        target = self.stack[-1]
        keys, pairs = items[::2], zip(items[::2], items[1::2], strict=False)
        if len(items) % 2:
            malformed("its pickle has a key without a value")
        if isinstance(target, dict) and {*map(type, keys)} == {str}:
            target.update(pairs)
        elif isinstance(target, dict):
            for key, value in pairs:
                target[key if isinstance(key, PLAIN_KEYS) else self.key(key, target)] = value
        elif type(target) is Record and id(target.callable) not in self.reducers:
            target.items = target.items or []
            target.items.extend(pairs)
        else:
            _refuse_for(target, keys, f"its pickle sets items of a {type(target).__name__}")

    def make(self, how: str, callable: Any, args: Any, kwargs: Any = None) -> None:
        """Push what a call would have made: the value of a known callable, or a Record."""
        if type(args) is not tuple or type(callable) not in (Global, Record):
            fault("its pickle creates an object from malformed arguments")
        known = id(callable) if how == "reduce" else None
        value: object = None
        if known in self.reducers:
            value = self.reducers[known](args)
        elif known in self.calls:
            value = self.calls[known](self, args)
        if value is None:
            self.spend(RECORD)
            self.called = self.called or is_importable(callable)
            value = Record(how, callable, args, kwargs)
        self.stack.append(value)

    def copy(self, count: int) -> None:
        """Count items that a call copies: a pickle may repeat a call on one list any number of times."""
        self.copied += count
        if self.copied > self.size:
            fault("its pickle copies a list or text over and over")

    def frozen_set(self, items: list[Any]) -> None:
        """Push a frozenset."""
        self.spend(SET)
        self.stack.append(FrozenSet_(self.key(item, items) for item in items))

    def name(self, module: str, name: str) -> None:
        """Push a name."""
        value = self.known.get((module, name)) or Global(module, name)
        self.names.add(value)
        self.stack.append(value)

    def build(self, state: Any) -> None:
        """Set the state of the object on top."""
        target = self.stack[-1]
        if type(target) is OrderedDict_ and target.attributes is None and is_state(state):
            target.attributes = state
        elif type(target) is Record and not target.has_state and id(target.callable) not in self.reducers:
            target.state, target.has_state = state, True
        else:
            fault(f"its pickle sets the state of a {type(target).__name__}")

    def persistent(self, identity: object) -> None:
        """Push the value of a persistent id."""
        if self.persistent_load is None:
            fault("its pickle refers to something outside itself")
        self.stack.append(self.persistent_load(identity))
