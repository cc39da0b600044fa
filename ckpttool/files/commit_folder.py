"""The atomic commit of a whole folder: it appears complete, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator

from ..errors import UsageFault
from .commit import ASIDE, TEMPORARY, _beside, _not_there, sync_folder
from .copying import no_room_named
from .signals import signals_deferred

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Arguments of renameat2 (linux/fcntl.h, linux/fs.h)."""


# Of renameat2: an old kernel, a file system that can't, a sandbox.
NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}


@contextlib.contextmanager
def replacing_folder(path: str, is_ours: Callable[[str], bool]) -> Iterator[str]:
    """An empty folder that becomes `path` when the block ends well; else nothing is left of it.

    A folder that already exists is replaced as a whole, if it holds nothing but what `is_ours` knows by
    name: somebody's other files are never removed.

    Raises:
        UsageFault: the place can't be written, or holds other files.
    """
    target = os.path.realpath(path)
    _check_folder(path, target, is_ours)
    parent, name = os.path.split(target)
    temporary = _beside(parent, name)
    try:
        os.mkdir(temporary)
    except OSError as error:
        raise _not_there(path, error) from error
    try:
        with no_room_named(path):
            yield temporary
            sync_folder(temporary)
        with signals_deferred():
            _put(temporary, target)
            shutil.rmtree(temporary, ignore_errors=True)
    except BaseException:
        with signals_deferred():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(parent)


def _check_folder(path: str, target: str, is_ours: Callable[[str], bool]) -> None:
    if not os.path.lexists(target):
        return
    if not os.path.isdir(target):
        raise UsageFault(f"{path}: is a file, and the output is a folder", hint="choose another output")
    others = sorted(name for name in os.listdir(target) if not is_ours(name))
    if others:
        raise UsageFault(
            f"{path}: holds other files too ({', '.join(others[:3])})", hint="choose a new folder as output"
        )


def _put(new: str, target: str) -> None:
    """Puts a folder in its place; an old one that was there ends up under the new one's name."""
    if not os.path.lexists(target):
        os.rename(new, target)
    elif not _exchange(new, target):
        _swap(new, target)


def _exchange(one: str, other: str) -> bool:
    """Gives each of two paths what is under the other one, in one step; False where that can't be done."""
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # another platform, or an old C library
        return False
    paths = map(os.fsencode, (one, other))
    if call(AT_FDCWD, ctypes.c_char_p(next(paths)), AT_FDCWD, ctypes.c_char_p(next(paths)), RENAME_EXCHANGE):
        number = ctypes.get_errno()
        if number not in NO_EXCHANGE:
            raise OSError(number, os.strerror(number), other)
        return False
    return True


def _swap(new: str, target: str) -> None:
    """The same in two steps, between which there is no folder; `set_aside` finds what a kill leaves there."""
    aside = new.removesuffix(TEMPORARY) + ASIDE
    os.rename(target, aside)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(aside, target)
        raise
    os.rename(aside, new)


def set_aside(path: str) -> str | None:
    """The old folder of a replacing that was cut off between its two steps; None where there is none."""
    folder, name = os.path.split(os.path.realpath(path))
    begin = os.path.basename(_beside(folder, name)).removesuffix(TEMPORARY)[:-12]
    try:
        found = [each for each in os.listdir(folder) if each.startswith(begin) and each.endswith(ASIDE)]
    except OSError:
        return None
    return os.path.join(folder, found[0]) if len(found) == 1 and not os.path.lexists(path) else None
