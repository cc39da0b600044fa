"""Which files deltas are built on: nothing but their headers is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from ...errors import CkptToolError, FileError, Unreadable
from ...files.failures import naming
from ...system import join
from .. import safetensors
from ..json_objects import parse_object
from .header import ENTRY, base_name


def base_of(path: str) -> str | None:
    """Return where the base of a delta lies if it lies beside it; None of a file that is no delta.

    Raises:
        Unreadable: it is not there.
        FileError: the disk refuses to read it.
        Damaged: it is a delta that states no base, or has no header where one should be.
    """
    try:
        with naming(path, "read"), open(path, "rb") as file:
            head = file.read(9)
            if not safetensors.sniff(head):
                return None
            raw = head[8:] + file.read(int.from_bytes(head[:8], "little") - 1)
    except FileError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise Unreadable(path, "is not there") from error
        raise
    metadata = parse_object(path, raw, "its header").get(safetensors.METADATA)
    text = metadata.get(ENTRY) if isinstance(metadata, dict) else None
    return join(os.path.dirname(path), base_name(path, text)) if isinstance(text, str) else None


def chain(path: str) -> list[str]:
    """Return a file and what it is built on, down to one that is no delta.

    Raises:
        Unreadable, FileError, Damaged: as `base_of`, for any of them; Unreadable also for a circle.
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
