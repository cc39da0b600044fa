"""Classes as users have them in their checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class Config:
    """A dataclass of a user's."""

    lr: float
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Key:
    """A dataclass with a hash."""

    size: int
    inner: Any = None
