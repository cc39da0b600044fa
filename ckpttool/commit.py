"""The commit of a whole file or folder: what is written here appears complete, or not at all.

It is built under another name in the same folder, flushed to the disk, and put in place in one step. A killed
process leaves the old contents or the new ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

from .errors import UsageFault
from .transfer import BUFFER, no_room_named
from .two_processes import ENDING

TEMPORARY, ASIDE = ".tmp", ".tmp.old"
"""How the names end of what is being written, and of a folder on its way out."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Arguments of renameat2 (linux/fcntl.h, linux/fs.h)."""

# Of renameat2: an old kernel, a file system that can't, a sandbox.
NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file, open for reading and writing, that becomes `path` when the block ends well.

    The old file stays whole until the last moment; if the block raises, nothing is left behind. A symbolic
    link stays a link and what it points to is replaced. The new file has the permissions of the old one, or
    those that the umask gives. `-` is standard output: the file is spooled and then sent there.

    Raises:
        UsageFault: the folder does not exist or can't be written, or the target is not a regular file.
    """
    with _to_standard_output() if os.fspath(path) == "-" else _replacing(os.fspath(path)) as file:
        yield file


@contextlib.contextmanager
def _to_standard_output() -> Iterator[BinaryIO]:
    if sys.stdout.isatty():
        raise UsageFault("-: standard output is a terminal", hint="redirect it, or name a file")
    with tempfile.TemporaryFile() as spool:
        with no_room_named(tempfile.gettempdir()):
            yield spool
            spool.flush()
        spool.seek(0)
        with no_room_named("standard output"):
            shutil.copyfileobj(spool, sys.stdout.buffer, BUFFER)
            sys.stdout.buffer.flush()


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[BinaryIO]:
    target = os.path.realpath(path)
    _check_target(path, target)
    folder, name = os.path.split(target)
    temporary = _beside(folder, name)
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _not_there(path, error) from error
    try:
        with no_room_named(path):
            with os.fdopen(fd, "w+b") as file:
                yield file
                file.flush()
                _keep_permissions(target, file.fileno())
                os.fsync(file.fileno())
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(folder)


def require_folder(path: str) -> None:
    """Raises UsageFault where an output's folder is not there: known before any work is done."""
    folder = os.path.dirname(path.rstrip(os.sep))
    if folder and not os.path.lexists(folder):
        raise UsageFault(f"{path}: there is no folder {folder}", hint=f"mkdir -p {shlex.quote(folder)}")


def _not_there(path: str, error: OSError) -> UsageFault:
    reason = (error.strerror or str(error)).lower()
    return UsageFault(f"{path}: can't write there: {reason}", hint="choose another output")


def _beside(folder: str, name: str) -> str:
    begin = os.fsdecode(os.fsencode(name)[:200])  # names have at most 255 bytes, whatever the letters
    return os.path.join(folder, f".{begin}.{os.urandom(6).hex()}{TEMPORARY}")


@contextlib.contextmanager
def writing_into(path: str) -> Iterator[BinaryIO]:
    """A new binary file in a folder that is not yet in place, flushed to the disk when the block ends."""
    with open(path, "x+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


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
        with _signals_deferred():
            _put(temporary, target)
            shutil.rmtree(temporary, ignore_errors=True)
    except BaseException:
        with _signals_deferred():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(parent)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Signals that end the process wait until the block has ended.

    A mask would not do: where one thread blocks a signal, the kernel gives it to another. Handlers run in the
    main thread alone, so every other thread is undisturbed already, and may set none.
    """
    heard: list[int] = []
    with contextlib.ExitStack() as after:
        if threading.current_thread() is threading.main_thread():
            after.callback(_raise_all, heard)
            for number in ENDING:
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # None: set by what is not Python
                    after.callback(signal.signal, number, before)
                    signal.signal(number, lambda number, _: heard.append(number))
        yield


def _raise_all(heard: list[int]) -> None:
    for number in heard:
        signal.raise_signal(number)


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


def _check_target(path: str, target: str) -> None:
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        if path.endswith(os.sep):
            raise UsageFault(f"{path}: is named like a folder", hint="name a file") from None
        return
    except OSError as error:
        raise UsageFault(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise UsageFault(f"{path}: is not a regular file, so it can't be replaced")


def _keep_permissions(target: str, fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.fchmod(fd, stat.S_IMODE(os.stat(target).st_mode))


def sync_folder(folder: str) -> None:
    """Flush a folder's entries, without which a rename may not outlive a power cut."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # it may be written and entered, but not read
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EBADF, errno.EROFS}:  # file systems that can't
            raise
    finally:
        os.close(fd)
