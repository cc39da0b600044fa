"""Lines and records at the end of a file: written whole, or not at all."""

from __future__ import annotations

import contextlib
import os


def append(path: str, line: bytes, *, durably: bool = False) -> None:
    """Add a line, given without its line break, as `append_record` does."""
    append_record(path, line + b"\n", durably=durably)


def append_record(path: str, record: bytes, *, durably: bool = False) -> None:
    """Add bytes to the end of a file, which is made if there is none.

    Args:
        record: the bytes.
        durably: return only when they are on the disk.

    Raises:
        OSError: the disk is full, or failed. What was written of the record is taken back.
    """
    left, before = record, None
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
