"""Lines at the end of a file: written whole, or not at all."""

from __future__ import annotations

import contextlib
import os


def append(path: str, line: bytes, *, durably: bool = False) -> None:
    """Add a line to the end of a file, which is made if there is none.

    Args:
        line: without its line break.
        durably: return only when it is on the disk.

    Raises:
        OSError: the disk is full, or failed. What was written of the line is taken back.
    """
    left, before = line + b"\n", None
    try:
        with open(path, "ab", buffering=0) as file:
            before = file.tell()
            while left:
                left = left[file.write(left) :]
            if durably:
                os.fsync(file.fileno())
    except OSError:  # of the closing too: NFS says only then that the disk is full
        if before is not None:
            with contextlib.suppress(OSError):
                os.truncate(path, before)
        raise
