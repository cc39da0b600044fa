"""Temporary files and folders next to their targets: names, locks, and the removal of abandoned ones.

A temporary is called `.NAME.<boot><random>.ckpttool.tmp`. Its writer holds a lock (flock) on it, which the
kernel drops however the process ends, so process ids, and containers that have their own, don't matter.
Whoever saves into the same folder later removes the temporaries whose lock is free. A lock may not reach
other machines (NFS mounted with `nolock`), so a temporary of another machine, or of this one before it was
restarted, must also have been left alone for a day.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache

from .. import system

# Name endings: of a file or folder being written, and of a folder that a new one replaced.
TEMPORARY, OLD = ".ckpttool.tmp", ".ckpttool.old"

PART = ".ckpttool.part"  # of an output that was interrupted, and can be gone on with

NAME = re.compile(r"\.(?P<begin>.+)\.(?P<boot>[0-9a-f]{8})[0-9a-f]{12}\.ckpttool\.(tmp|old)", re.DOTALL)

LONGEST = 190  # bytes of the target's name that are used: file systems allow 255 for a name
QUIET = 24 * 60 * 60  # seconds without a change: then a temporary of another machine counts as abandoned


def begin_of(target: str) -> str:
    """Return how the names of a target's temporaries begin, after the dot."""
    name = os.fsencode(os.path.basename(target))
    if len(name) <= LONGEST:
        return os.fsdecode(name)
    return os.fsdecode(name[:LONGEST]) + f"~{zlib.crc32(name):08x}"


def temporary_name(target: str, ending: str) -> str:
    """Return the path of a temporary of this target that nobody has."""
    name = f".{begin_of(target)}.{_boot()}{os.urandom(6).hex()}{ending}"
    return os.path.join(os.path.dirname(target), name)


def new_file(target: str, mode: int) -> tuple[int, str]:
    """Create a temporary file that will replace `target`; return its descriptor, which locks it, and path."""
    flags = system.CREATE | os.O_EXCL
    return _new(target, lambda path: os.open(path, flags, mode), os.unlink)


def new_folder(target: str, mode: int) -> tuple[int, str]:
    """Create a temporary folder as `new_file` does a file."""

    def create(path: str) -> int | None:
        os.mkdir(path, mode)
        with contextlib.suppress(FileNotFoundError):  # another process took it for abandoned meanwhile
            return system.hold_folder(path)
        return None

    return _new(target, create, os.rmdir)


def _new(
    target: str, create: Callable[[str], int | None], remove: Callable[[str], object]
) -> tuple[int, str]:
    while True:
        path = temporary_name(target, TEMPORARY)
        try:
            if (fd := create(path)) is not None:
                if _lock_new(fd, path):
                    return fd, path
                os.close(fd)
        except BaseException:  # a signal may come as soon as it is there
            with contextlib.suppress(OSError):
                remove(path)
            raise


def _lock_new(fd: int, path: str) -> bool:
    """Lock a new temporary; return False if another process already took it for abandoned."""
    try:
        system.lock(fd)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, on which nobody removes anything
        return True
    return is_at(fd, path)


def is_at(fd: int, path: str) -> bool:
    """Return whether a descriptor is of what lies at a path now."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def remove_abandoned(folder: str) -> None:
    """Remove the temporaries in `folder` that were still being written when their process ended."""
    # Other users' temporaries stay, and whatever can't be removed: a save does not depend on it.
    for path in abandoned(folder, TEMPORARY):
        with contextlib.suppress(OSError):
            if os.path.isdir(path):
                for name in os.listdir(path):  # files alone: no folder is ever made in a temporary one
                    os.unlink(os.path.join(path, name))
                os.rmdir(path)
            else:
                os.unlink(path)


def temporaries_in(folder: str, ending: str, begin: str | None = None) -> list[tuple[str, str]]:
    """Return the paths of temporaries, each with the start of the machine that it is of."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    named = (NAME.fullmatch(name) for name in names if name.endswith(ending))
    parts = (match for match in named if match and begin in (None, match["begin"]))
    return [(os.path.join(folder, match[0]), match["boot"]) for match in parts]


def abandoned(folder: str, ending: str, begin: str | None = None) -> Iterator[str]:
    """Yield the paths of abandoned temporaries, each while its lock is held."""
    for path, boot in temporaries_in(folder, ending, begin):
        with _claimed(path, boot) as is_abandoned:
            if is_abandoned:
                yield path


@contextlib.contextmanager
def _claimed(path: str, boot: str) -> Iterator[bool]:
    """Hold the lock of a temporary if no process does; yield whether it is abandoned."""
    with contextlib.ExitStack() as stack:
        fd = None
        with contextlib.suppress(OSError):
            kind = os.lstat(path).st_mode
            if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
                # NFS locks only what is open for writing.
                access = system.CHANGE if stat.S_ISREG(kind) else system.FOLDER
                fd = os.open(path, access | system.NO_LINK)
                stack.callback(os.close, fd)
        yield fd is not None and _is_abandoned(fd, path, boot)


def _is_abandoned(fd: int, path: str, boot: str) -> bool:
    facts = os.fstat(fd)
    if not system.is_mine(facts):
        return False
    try:
        system.lock(fd)
    except OSError:  # its writer lives, or nobody can tell
        return False
    changed = max(facts.st_mtime, facts.st_ctime)
    return is_at(fd, path) and (boot == _boot() or time.time() - changed > QUIET)


@cache
def _boot() -> str:
    """Return eight digits for this start of this kernel: all its containers share them, and its locks."""
    return f"{zlib.crc32(system.boot()):08x}"
