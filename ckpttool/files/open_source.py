"""Opening what is read: regular files, standard input; and what to say of a path that is not there."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import sys
import tempfile
from itertools import islice

from .. import system
from ..errors import Unreadable
from ..words import first_few
from .failures import no_room_named, reason
from .pieces import BUFFER


def open_source_descriptor(path: str) -> int:
    """Return a read-only descriptor of a regular file whose first byte is the first to be read.

    `-` is standard input from where it stands: what can't be read at any offset, a pipe or the rest of a
    file, is first copied to a temporary file. Raises Unreadable for all else.
    """
    if path == "-":
        return _standard_input()
    try:
        fd = os.open(path, system.READ)
    except FileNotFoundError:
        raise no_such_file(path) from None
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
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


SPARE = 64  # descriptors that stay free for everything else


def allow_open_files(count: int, path: str) -> None:
    """Raise this process's soft limit of open files if a checkpoint needs it."""
    # A tensor is a place in an open file, so all files of a checkpoint stay open, and mapping one takes a
    # second descriptor. Many systems allow 1,024, and let a process raise that itself up to a hard limit.
    soft, hard = system.open_files_allowed()
    used = SPARE
    with contextlib.suppress(OSError):  # there is no /dev/fd, or no descriptor left to read it
        used = len(os.listdir("/dev/fd"))
    wanted = used + 2 * count + SPARE
    if wanted <= soft:
        return
    allowed = min(wanted, hard)
    if allowed < used + count + 1:
        what = "is one file too many:" if count == 1 else f"consists of {count} files, and"
        hint = f"raise the limit first: ulimit -n {wanted}"
        raise Unreadable(path, f"{what} this process may open only {hard} at once", hint=hint)
    if allowed > soft:
        system.allow_open_files(int(allowed))


MOST_NAMES = 10_000  # of a folder, that are looked at

# How the names of files begin in which macOS keeps what other file systems can't hold: they are nobody's.
OF_MACOS = "._"

# Usual endings of checkpoints' names. Only for hints: a format is recognised by content.
CHECKPOINT_ENDINGS = (
    *(".pt", ".pth", ".th", ".tar", ".bin", ".ckpt", ".safetensors", ".index.json"),
    *(".pt2", ".gguf", ".onnx", ".npz", ".npy"),
)


def no_such_file(path: str) -> Unreadable:
    """Return the error for a missing path, with a similar path or the checkpoints of the folder as hint."""
    if os.path.islink(path):
        hint = f"see what it points to: ls -l {shlex.quote(path)}"
        return Unreadable(path, f"is a link to {os.readlink(path)}, where there is no file", hint=hint)
    return Unreadable(path, "no such file", hint=_near(*os.path.split(path)))


def _near(folder: str, name: str) -> str:
    from difflib import get_close_matches

    if not os.path.isdir(folder or "."):
        return f"there is no folder {_first_missing(folder)}"
    names = [other for other in names_in(folder or ".") if other != name]
    if close := get_close_matches(name, names, n=2, cutoff=0.7):
        return f"did you mean {' or '.join(os.path.join(folder, other) for other in close)}?"
    here = f"the folder {folder}" if folder else "this folder"
    if files := checkpoints_among(names):
        return f"{here} has {first_few(files)}"
    return f"see what is there: ls {shlex.quote(folder or '.')}"


def _first_missing(folder: str) -> str:
    while (above := os.path.dirname(folder)) and not os.path.isdir(above):
        folder = above
    return folder


def names_in(folder: str) -> list[str]:
    """Return the names in a folder, sorted, MOST_NAMES at most; none where it can't be read."""
    try:
        with os.scandir(folder) as entries:
            names = (entry.name for entry in entries if not entry.name.startswith(OF_MACOS))
            return sorted(islice(names, MOST_NAMES))
    except OSError:
        return []


def checkpoints_among(names: list[str]) -> list[str]:
    """Return the names with a usual ending of a checkpoint."""
    return [name for name in names if name.lower().endswith(CHECKPOINT_ENDINGS)]
