"""Classes as users have them in their checkpoints."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


@dataclasses.dataclass
class Config:
    """A dataclass of a user's."""

    lr: float
    inner: Any = None


# What a pickle names for a member of an enumeration besides its class, as DCP's metadata has one: Python 3.11
# before 3.11.4 has it found by `getattr`.
NAMES_BY_ENUMS = ["builtins.getattr"] if enum.Enum("Any", "A").A.__reduce_ex__(2)[0] is getattr else []


class Colour(enum.Enum):
    """An enumeration of a user's, which every Python pickles in the same way."""

    RED = 1

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Colour, (self.value,)


@dataclasses.dataclass(frozen=True)
class Key:
    """A dataclass with a hash."""

    size: int
    inner: Any = None
