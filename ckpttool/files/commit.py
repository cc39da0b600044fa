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
import stat
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from ..errors import UsageFault
from .copying import BUFFER, no_room_named

TEMPORARY, ASIDE = ".tmp", ".tmp.old"
"""How the names end of what is being written, and of a folder on its way out."""


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
