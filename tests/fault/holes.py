"""Faults put into the program on purpose: each must be found, or the machine looks in the wrong place."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from typing import Any

from ckpttool.core import system
from ckpttool.core.files import resuming


def remove_fsync() -> None:
    """Flush nothing."""
    os.fsync = lambda fd: None


def flush_after_the_rename() -> None:
    """Flush a file only when it has its name already."""
    replace, fsync = os.replace, os.fsync
    waiting: list[int] = []

    def replace_and_flush(source: str, target: str) -> None:
        replace(source, target)
        while waiting:
            fsync(waiting.pop())

    def flush(fd: int) -> None:
        fsync(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else waiting.append(fd)

    os.fsync, os.replace = flush, replace_and_flush  # type: ignore[assignment]


def follow_links() -> None:
    """Follow links when abandoned temporaries are looked for."""
    os.lstat = os.stat
    system.NO_LINK = 0
    resuming._is_abandoned = lambda fd, path, boot: True


def trust_short_writes() -> None:
    """Take each write for complete."""

    def complete(write: Callable[..., int]) -> Callable[..., int]:
        def write_all(fd: int, data: Any, *more: Any) -> int:
            write(fd, data, *more)
            return sum(map(len, data)) if isinstance(data, list | tuple) else len(data)

        return write_all

    for name in ("write", "writev", "pwrite", "pwritev"):
        setattr(os, name, complete(getattr(os, name)))
    system.pwrite = os.pwrite


def leave_temporaries() -> None:
    """Remove nothing after an error."""
    os.unlink = lambda path, **_: None  # type: ignore[assignment]


def write_in_place() -> None:
    """Copy the new file over the old one in the place of a rename."""

    def copy(source: str, target: str) -> None:
        with open(source, "rb") as new, open(target, "wb") as old:
            old.write(new.read())
            old.flush()
            os.fsync(old.fileno())
        os.unlink(source)

    os.replace = copy  # type: ignore[assignment]


def swallow_errors() -> None:
    """Go on when a file can't be flushed."""
    fsync = os.fsync

    def try_to_flush(fd: int) -> None:
        with contextlib.suppress(OSError):
            fsync(fd)

    os.fsync = try_to_flush


# By name, what breaks something in the process in which it is called
HOLES: dict[str, Callable[[], None]] = {
    hole.__name__.replace("_", "-"): hole
    for hole in (
        *(remove_fsync, flush_after_the_rename, follow_links, trust_short_writes, leave_temporaries),
        *(write_in_place, swallow_errors),
    )
}
