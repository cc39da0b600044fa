"""The limit of open files, raised for a checkpoint that consists of very many."""

from __future__ import annotations

import os
import resource

from ..errors import Unreadable

SPARE = 64
"""Descriptors that stay free for everything else."""


def allow_open_files(count: int, path: str) -> None:
    """Raise this process's soft limit of open files if a checkpoint needs it.

    A tensor is a place in an open file, so all files of a checkpoint stay open. Many systems allow 1,024, and
    let a process raise that itself up to a hard limit.

    Args:
        count: the files that will be opened. Mapping one into memory takes a second descriptor.
        path: the checkpoint, for the message.

    Raises:
        Unreadable: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _open_now()
    if soft == resource.RLIM_INFINITY or used + 2 * count + SPARE <= soft:
        return
    wanted = used + 2 * count + SPARE
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed < used + count + 1:
        raise Unreadable(
            path,
            f"is one file too many: this process may open only {hard} at once"
            if count == 1
            else f"consists of {count} files, and this process may open only {hard} at once",
            hint=f"raise the limit first: ulimit -n {wanted}",
        )
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _open_now() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return SPARE
