"""Errors of the system, worded in one place and with the file's name."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ..errors import FileError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def reason(error: OSError) -> str:
    """Return why a call of the system failed: `no space left on device`."""
    return (error.strerror or str(error) or type(error).__name__).lower()


@contextlib.contextmanager
def naming(path: str, done: str = "written") -> Iterator[None]:
    """Turn the system's errors in the block into a FileError: the file could not be `done`."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's zip writer raises this on closing a file cut short
        behind = system_error(error)
        why = reason(behind) if behind else str(error).splitlines()[0]
        hint = "is the disk full?" if behind is None or behind.errno in NO_ROOM else None
        raise FileError(path, f"could not be {done}: {why}", hint=hint) from error


def system_error(error: BaseException) -> OSError | None:
    """Return the system's own error, if there is one behind this one."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind
        behind = behind.__context__
    return None


@contextlib.contextmanager
def no_room_named(path: str, *, every: bool = False) -> Iterator[None]:
    """Name the place in an OSError for lack of room, or in every one: a call may know no name, or another."""
    try:
        yield
    except OSError as error:
        if every or error.errno in NO_ROOM:
            error.filename, error.filename2 = path, None
        raise
