"""Keys that a file asks for: of a kind whose hash runs no code, and found in bounded time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .values import container_name

MAX_DEPTH = 50
"""Tuples inside tuples in a key: comparing two of them is recursive."""

MAX_PARTS = 1000
"""Values inside a tuple used as a key: hashing visits each, and a tuple can repeat itself 2^60 times."""

ROOM = 1 << 20
ROOM_PER_BYTE = 2
"""Values inside all tuples of a file used as keys: so many for any file, and so many more for each of its
bytes. Where no key shares a tuple with another, each value takes a byte or more of its own."""

MAX_EQUAL_HASHES = 1000
"""Keys of one dict or set with the same hash; each is compared with all the others."""


class BadKey(ValueError):
    """A value that is not a key in any ordinary dict; says what it is."""


class KeyGuard:
    """Looks at all keys of one file, which has so many bytes."""

    def __init__(self, size: int) -> None:
        self.room = ROOM + ROOM_PER_BYTE * size
        self.hashes: dict[int, tuple[object, Counter[int]]] = {}

    def check(self, value: Any, owner: object) -> Any:
        """The value, fit to be a key of `owner`. Raises BadKey."""
        self._look_inside(value)
        if isinstance(value, tuple | frozenset) or (isinstance(value, int) and value.bit_length() > 60):
            # The owner is kept, so that its id is not another's.
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
        self.room -= seen
        if self.room < 0:
            raise BadKey("one of too many large tuples")
