"""Which files deltas are built on: nothing but their headers is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from ...errors import CkptToolError, Unreadable
from ..reading import open_alone
from .header import is_delta, read_header


def base_of(path: str) -> str | None:
    """Return where the base of a delta lies if it lies beside it; None of a file that is no delta.

    Raises:
        Unreadable, Damaged, Unsupported: as `ckpttool.open`, and for a delta that breaks the rules.
    """
    with open_alone(path) as file:
        if not is_delta(file):
            return None
        return os.path.join(os.path.dirname(path), read_header(file).base.name)


def chain(path: str) -> list[str]:
    """Return a file and what it is built on, down to one that is no delta.

    Raises:
        Unreadable, Damaged, Unsupported: as `base_of`, for any of them.
    """
    found = [path]
    while (base := base_of(found[-1])) is not None:
        if base in found:
            raise Unreadable(path, "is its own base, by way of others")
        found.append(base)
    return found


def needed_by(paths: Iterable[str]) -> set[str]:
    """Return files, and what they are built on as far as it can be read."""
    found: set[str] = set()
    for path in paths:
        below: str | None = path
        while below is not None and below not in found:
            found.add(below)
            with suppress(CkptToolError):
                below = base_of(below)
    return found
