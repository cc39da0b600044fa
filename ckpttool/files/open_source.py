"""Descriptors of the files that are read: regular files, and standard input."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile

from ..errors import Unreadable
from .copying import BUFFER, no_room_named
from .suggestions import no_such_file


def open_source_descriptor(path: str) -> int:
    """Return a read-only descriptor of a regular file whose first byte is the first to be read.

    Args:
        path: the file; `-` is standard input from where it stands. What can't be read at any offset, a pipe
            or the rest of a file, is first copied to a temporary file.

    Raises:
        Unreadable: there is no such file, it may not be read, or it is a folder, a pipe or a device.
    """
    if path == "-":
        return _standard_input()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise no_such_file(path) from None
    except OSError as error:
        raise Unreadable(path, (error.strerror or str(error)).lower()) from error
    except ValueError:
        raise Unreadable(path, "is not a file name") from None
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise Unreadable(path, f"is {what}", hint="name the checkpoint file")
    return fd


def _standard_input() -> int:
    if stat.S_ISREG(os.fstat(0).st_mode) and os.lseek(0, 0, os.SEEK_CUR) == 0:
        return os.dup(0)
    with no_room_named(tempfile.gettempdir()), tempfile.TemporaryFile() as spool:
        shutil.copyfileobj(sys.stdin.buffer, spool, BUFFER)
        spool.flush()
        return os.dup(spool.fileno())
