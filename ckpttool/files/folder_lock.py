"""The lock of a run's folder: one process at a time writes checkpoints there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from .. import system
from ..errors import UsageFault

# Descriptors of the folders that this process has locked.
_locks: set[int] = set()


def _release_in_child() -> None:
    """Close the descriptors that a fork has copied.

    A lock lasts as long as any process has one, and a process that loads data may outlive its rank.
    """
    while _locks:
        os.close(_locks.pop())


system.in_forked(_release_in_child)


@contextlib.contextmanager
def locked(folder: str, shown: str) -> Iterator[None]:
    """Lock a folder, itself and not a file in it, until the block or the process ends.

    Raises UsageFault, which begins with `shown`, if another process has locked it.
    """
    try:
        fd = system.lock_folder(folder)
    except BlockingIOError:
        hint = "name another folder, or wait for it to end"
        raise UsageFault(f"{shown}: another run, or slim, writes there now", hint=hint) from None
    _locks.add(fd)
    try:
        yield
    finally:
        _locks.discard(fd)
        os.close(fd)
