"""The atomic commit of a file: it appears complete, or not at all.

A file is built under another name in the same folder, flushed to the disk, and renamed over its target. A
killed process leaves the old contents or the new ones; the next save into the folder removes what else it
left.
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
from .copying import BUFFER, NO_ROOM, no_room_named
from .permissions import keep_permissions
from .temporaries import new_file, remove_abandoned


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new binary file that takes the place of `path` when the block ends without an error.

    The old file stays whole until then, and readers that have it open keep it; after an error nothing of the
    new one is left. Of a symbolic link the target is replaced. The new file has the owner, permissions and
    access control lists of the old one where that is allowed, or those that the umask gives, and while it is
    written no more than these. Temporary files that killed processes left in the folder are removed first.

    Args:
        path: the file to replace or create; `-` is standard output, to which the whole file is sent at the
            end.

    Yields:
        The file, open for reading and writing. It must stay open.

    Raises:
        UsageFault: the folder does not exist or can't be written, the target is not a regular file, or
            standard output is a terminal.
        OSError: the disk is full, or failed; its `filename` is `path`.
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
    exists = _check_target(path, target)
    folder = os.path.dirname(target)
    remove_abandoned(folder)
    try:
        fd, temporary = new_file(target, 0o600 if exists else 0o666)
    except OSError as error:
        raise not_writable(path, error) from error
    try:
        with no_room_named(path), os.fdopen(fd, "w+b") as file:
            yield file
            file.flush()
            with _errors_named(path):
                with contextlib.suppress(FileNotFoundError):
                    keep_permissions(fd, target)
                os.fsync(fd)
                os.replace(temporary, target)  # before the file, and with it the lock, is closed
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(folder)


def require_folder(path: str) -> None:
    """Check that an output's folder exists, before any work is done.

    Raises:
        UsageFault: it does not.
    """
    folder = os.path.dirname(path.rstrip(os.sep))
    if folder and not os.path.lexists(folder):
        raise UsageFault(f"{path}: there is no folder {folder}", hint=f"mkdir -p {shlex.quote(folder)}")


@contextlib.contextmanager
def _errors_named(path: str) -> Iterator[None]:
    """Give an OSError the name of the output, in the place of a descriptor or a temporary's name."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = path, None
        raise


def not_writable(path: str, error: OSError) -> UsageFault | OSError:
    """Return the error for an output that can't be created: the user's, or that of a full or failing disk."""
    if error.errno in NO_ROOM | {errno.EIO, errno.EINTR}:
        return OSError(error.errno, error.strerror, path)
    reason = (error.strerror or str(error)).lower()
    return UsageFault(f"{path}: can't write there: {reason}", hint="choose another output")


@contextlib.contextmanager
def writing_into(path: str) -> Iterator[BinaryIO]:
    """Create a binary file in a folder that is not yet in place; flush it to the disk when the block ends.

    Yields:
        The file, open for reading and writing.

    Raises:
        FileExistsError: there is such a file.
    """
    with open(path, "x+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _check_target(path: str, target: str) -> bool:
    """Check that the target may be replaced; return whether it exists."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        if path.endswith(os.sep):
            raise UsageFault(f"{path}: is named like a folder", hint="name a file") from None
        return False
    except OSError as error:
        raise not_writable(path, error) from error
    if not stat.S_ISREG(mode):
        raise UsageFault(f"{path}: is not a regular file, so it can't be replaced")
    return True


def sync_folder(folder: str) -> None:
    """Flush a folder's entries to the disk, without which a rename may not survive a power cut.

    Raises:
        OSError: the disk failed. A folder that can't be read, and a file system that can't flush one, are
            none.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder may be writable and not readable
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EBADF, errno.EROFS}:
            raise
    finally:
        os.close(fd)
