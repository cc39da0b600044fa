"""Checks on the keys of dicts and sets in a file: of types whose hash runs no code and takes bounded time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .values import container_name

MAX_DEPTH = 50
"""Levels of tuples in a key: comparing two of them is recursive."""

MAX_PARTS = 1000
"""Values inside a tuple used as a key: hashing visits each, and a tuple can repeat itself 2^60 times."""

BASE_PARTS = 1 << 20
PARTS_PER_BYTE = 2
"""Values inside all tuples of a file used as keys: a base, and more for each byte of the file. Each value
takes at least one byte, unless keys share tuples."""

MAX_EQUAL_HASHES = 1000
"""Keys of one dict or set with the same hash: each is compared with all others."""


class BadKey(ValueError):
    """A value that is not a key in any ordinary dict; its message says what it is."""


class KeyGuard:
    """Checks all keys of one file.

    Args:
        size: bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self.parts_left = BASE_PARTS + PARTS_PER_BYTE * size
        self.hashes: dict[int, tuple[object, Counter[int]]] = {}

    def check(self, value: Any, owner: object) -> Any:
        """Return the value, checked.

        Args:
            owner: the dict or set that it becomes a key of.

        Raises:
            BadKey: unhashable, a deeply nested or giant tuple, or one of many with the same hash.
        """
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
