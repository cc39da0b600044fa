"""Windows in the place of POSIX: the same names as in `system`, where each is documented.

On Windows a folder has no descriptor, so it can't be locked, flushed or held. An open file can't be replaced
or removed, whoever has it open: so we first close our own. A file being written is thereby safe.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import ntpath
import os
import posixpath
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import BinaryIO, Protocol
from weakref import WeakSet


class Opened(Protocol):
    """A file that is open for reading, and can be let go of."""

    def release(self, replaced: Collection[object]) -> None: ...


SEPARATORS = "/", "\\"
HAS_OWNERS = False  # a new file has the list of its folder
REPLACES_MAPPED = False  # error 1224
PRIVATE_FOLDER = 0o777  # it keeps the list of its parent, which 0o700 would not take

# ---- Bytes at a place

_moving = threading.Lock()  # one for all: duplicates of a descriptor share its position


@contextlib.contextmanager
def _at(fd: int, offset: int) -> Iterator[None]:
    with _moving:
        before = os.lseek(fd, 0, os.SEEK_CUR)
        os.lseek(fd, offset, os.SEEK_SET)
        try:
            yield
        finally:
            os.lseek(fd, before, os.SEEK_SET)


def pread(fd: int, length: int, offset: int, /) -> bytes:
    with _at(fd, offset):
        return os.read(fd, length)


def preadv(fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
    done = 0
    for buffer in buffers:
        data = pread(fd, len(buffer), offset + done)
        buffer[: len(data)] = data
        done += len(data)
    return done


def pwrite(fd: int, data: bytes | bytearray | memoryview, offset: int, /) -> int:
    with _at(fd, offset):
        return os.write(fd, data)


sync_data = os.fsync


def block_size(folder: str) -> int:
    return 4096


def share_blocks(source: int, offset: int, nbytes: int, target: int, position: int) -> str:
    return "this system has no call for it"


def memory(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes)


# ---- Files and folders in their places

LONG = 160  # characters, beyond which names of ours next to a path or in it may be too long
RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])\s*(\..*)?", re.IGNORECASE)
FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f]')


def local(path: str) -> str:
    if path in ("", "-"):
        return path
    drive = ntpath.splitdrive(path)[0]
    whole = ntpath.abspath(path) if drive or len(path) > LONG or os.path is ntpath else path
    if len(whole) <= LONG or not ntpath.splitdrive(whole)[0] or whole.startswith("\\\\?\\"):
        return path
    end = "\\" * path.endswith(("/", "\\"))
    return (f"\\\\?\\UNC{whole[1:]}" if whole.startswith("\\\\") else f"\\\\?\\{whole}") + end


def real(path: str) -> str:
    return local(os.path.realpath(path))


def join(folder: str, *names: str) -> str:
    return posixpath.join(folder, *names) if "://" in folder else os.path.join(folder, *names)


def path_of_url(path: str) -> str:
    return path[1:] if re.match(r"/[A-Za-z]:", path) else path


def unfit_name(path: str) -> str | None:
    rest = ntpath.splitdrive(path)[1] if not path.startswith("\\\\?\\") else path[6:]
    for name in re.split(r"[/\\]", rest):
        if RESERVED.fullmatch(name):
            return f"'{name}' is the name of a device on Windows"
        if found := FORBIDDEN.search(name):
            return f"'{name}' has a character that no name has on Windows: {found[0]!r}"
        if name.endswith((".", " ")) and name not in (".", ".."):
            return f"'{name}' ends in a dot or a space, which Windows takes off"
    return None


_open: WeakSet[Opened] = WeakSet()


def opened(source: Opened) -> None:
    _open.add(source)


def release(path: str) -> None:
    places = [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path]
    found = set[object]()
    for place in places:
        with contextlib.suppress(OSError):  # there is nothing, or a link that leads nowhere
            found.add(((facts := os.stat(place)).st_dev, facts.st_ino))
    for source in [*_open]:
        source.release(found)


def put(
    file: BinaryIO, written: str, target: str, changed: int | None = None, *, exclusive: bool = False
) -> None:
    os.fsync(file.fileno())
    file.close()
    if changed is not None:
        os.utime(written, ns=(changed, changed))
    if exclusive:
        release(written)
        os.rename(written, target)  # which replaces nothing there
    else:
        replace(written, target)


PATIENCE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.0)  # seconds: what looks for viruses opens new files too


def replace(written: str, target: str) -> None:
    release(written)
    release(target)
    for seconds in PATIENCE:
        with contextlib.suppress(PermissionError):
            return os.replace(written, target)
        time.sleep(seconds)
    raise PermissionError(errno.EACCES, "another program has it open, or this one has it mapped", target)


def link(old: str, new: str) -> None:
    os.link(old, new)


def sync_folder(folder: str) -> None:
    """NTFS writes the changes of a folder into its journal itself."""


def exchange(one: str, other: str) -> bool:
    return False


# ---- Locks and owners


def lock(fd: int) -> None:
    import msvcrt

    try:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except PermissionError as error:
        raise BlockingIOError(errno.EAGAIN, "is locked") from error


def hold_folder(path: str) -> int:
    return os.open(os.devnull, os.O_RDONLY)  # which can't be locked either


def lock_folder(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_TEMPORARY", 0)
    fd = os.open(os.path.join(path, ".ckpttool.lock"), flags)
    try:
        lock(fd)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_mine(facts: os.stat_result) -> bool:
    return True  # whether another user may write is in lists that `os` does not show


is_mine_alone = is_mine

_random = os.urandom(4)


def boot() -> bytes:
    return _random


# ---- The process


def open_files_allowed() -> tuple[float, float]:
    return 8192, 8192  # the most that its C library has


def allow_open_files(count: int) -> None:
    pass


def in_forked(call: Callable[[], object]) -> None:
    pass


def end_by(number: int) -> None:
    pass


@contextlib.contextmanager
def every(seconds: float, call: Callable[..., object]) -> Iterator[None]:
    yield  # nothing there interrupts `re`
