"""Errors of the system while a run's files are written, in words that name the file."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ckpttool.errors import FileError


@contextlib.contextmanager
def naming(path: str, done: str = "written") -> Iterator[None]:
    """Turn the system's errors in the block into one that names the file.

    Args:
        path: the file.
        done: what could not be done with it.

    Raises:
        FileError: in place of an OSError, or of the RuntimeError with which torch's zip writer closes a file
            that was cut short.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        behind = system_error(error)
        reason = (behind.strerror or "").lower() if behind else str(error).splitlines()[0]
        no_space = behind is None or behind.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "is the disk full?" if no_space else None
        raise FileError(path, f"could not be {done}: {reason}", hint=hint) from error


def system_error(error: BaseException) -> OSError | None:
    """Return the system's own error, if there is one behind this one."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind
        behind = behind.__context__
    return None
