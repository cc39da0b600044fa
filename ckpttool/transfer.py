"""Byte ranges from file to file, by the fastest way the file systems allow, and the commit of a whole file.

A file written here appears complete or not at all: it is built under another name in the same folder,
flushed to the disk, and renamed over the target. A killed process leaves the old file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from .ahead import cores, in_order
from .errors import Damaged, Unreadable, UsageFault
from .tensor import ByteRange, Computed

BUFFER = 4 << 20
"""Bytes moved at a time where data must pass through this process."""

AHEAD = 1 << 20
"""Bytes read at a time by another thread."""

COPY = 64 << 20
"""Bytes asked of the kernel at a time, so that progress shows and a signal is heard."""

# The kernel's ways of saying "not between these two files": another file system, a file
# system without the call, an old kernel, a sandbox.
NOT_HERE = {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EPERM}

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Progress = Callable[[int], object]


def _ignore(_: int) -> None:
    pass


class Output:
    """A file being written, front to back or at chosen places.

    `write` takes bytes, `copy` a range of another file without looking at it, `copy_with_crc` the same and
    returns the CRC-32 of what was moved. All three append at `position`.
    """

    def __init__(self, file: BinaryIO, progress: Progress = _ignore) -> None:
        self.fd = file.fileno()
        self.position = 0
        self._progress = progress
        self._buffer: memoryview | None = None
        self._ways = [self._copy_file_range, self._sendfile, self._buffered]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.write_at(self.position, data)
        self.position += len(data)

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while view:
            done = os.pwrite(self.fd, view, position)
            position += done
            view = view[done:]

    def write_all(self, chunks: Iterable[memoryview], nbytes: int) -> int:
        """Append computed bytes, so many, chunk by chunk; returns their CRC-32."""
        crc = 0
        for chunk in chunks:
            crc = zlib.crc32(chunk, crc)
            self.write(chunk)
            self._progress(len(chunk))
        return crc

    def copy(self, range: ByteRange) -> None:
        """Append a range of another file. Raises Damaged when that file ends early."""
        done = 0
        while done < range.nbytes:
            count = min(COPY, range.nbytes - done)
            try:
                moved = self._ways[0](range, done, count)
            except OSError as error:
                if error.errno not in NOT_HERE or len(self._ways) == 1:
                    raise
                del self._ways[0]  # it would fail for every other range too
                continue
            if moved == 0:
                raise Damaged(range.source.path, "the file became shorter while it was read")
            done += moved
            self._progress(moved)
        self.position += range.nbytes

    def copy_with_crc(self, data: ByteRange | Computed) -> int:
        """Append bytes from elsewhere, read once; returns their CRC-32."""
        if isinstance(data, ByteRange) and data.nbytes > AHEAD:
            return self.write_all(map(memoryview, in_order(_reads(data), cores(2))), data.nbytes)
        return self.write_all(data.chunks(self._reused_buffer()), data.nbytes)

    def _copy_file_range(self, range: ByteRange, done: int, count: int) -> int:
        if not hasattr(os, "copy_file_range"):
            raise OSError(errno.ENOSYS, "no copy_file_range on this platform")
        source = range.source.fd
        return os.copy_file_range(source, self.fd, count, range.offset + done, self.position + done)

    def _sendfile(self, range: ByteRange, done: int, count: int) -> int:
        if sys.platform != "linux":  # elsewhere sendfile writes to sockets only
            raise OSError(errno.ENOSYS, "no file-to-file sendfile on this platform")
        os.lseek(self.fd, self.position + done, os.SEEK_SET)
        return os.sendfile(self.fd, range.source.fd, range.offset + done, count)

    def _buffered(self, range: ByteRange, done: int, count: int) -> int:
        buffer = self._reused_buffer()[:count]
        moved = os.preadv(range.source.fd, [buffer], range.offset + done)
        self.write_at(self.position + done, buffer[:moved])
        return moved

    def _reused_buffer(self) -> memoryview:
        if self._buffer is None:
            self._buffer = memoryview(bytearray(BUFFER))
        return self._buffer


def _reads(data: ByteRange) -> Iterator[Callable[[], bytes]]:
    """A range in pieces, to be read while what came before is summed and written."""
    for start in range(0, data.nbytes, AHEAD):
        yield data.part(start, min(AHEAD, data.nbytes - start)).read


class DryOutput(Output):
    """An output that takes everything and keeps nothing but the size."""

    def __init__(self) -> None:
        self.position = 0
        self._progress = _ignore

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        pass

    def copy(self, range: ByteRange) -> None:
        self.position += range.nbytes

    def copy_with_crc(self, data: ByteRange | Computed) -> int:
        self.position += data.nbytes
        return 0

    def write_all(self, chunks: Iterable[memoryview], nbytes: int) -> int:
        next(iter(chunks), None)  # what is refused is refused here too
        self.position += nbytes
        return 0


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file, open for reading and writing, that becomes `path` when the block ends well.

    The old file stays whole until the last moment; if the block raises, nothing is left behind. A symbolic
    link stays a link and what it points to is replaced. The new file has the permissions of the old one, or
    those that the umask gives. `-` is standard output: the file is spooled and then sent there.

    Raises:
        UsageFault: the folder does not exist or can't be written, or the target is no plain file.
    """
    if os.fspath(path) == "-":
        if sys.stdout.isatty():
            raise UsageFault("-: standard output is a terminal", hint="redirect it, or name a file")
        with tempfile.TemporaryFile() as spool:
            yield spool
            spool.flush()
            spool.seek(0)
            shutil.copyfileobj(spool, sys.stdout.buffer, BUFFER)
            sys.stdout.buffer.flush()
        return
    target = os.path.realpath(path)
    _check_target(path, target)
    folder, name = os.path.split(target)
    temporary = _beside(folder, name)
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageFault(
            f"{os.fspath(path)}: can't write there: {error.strerror}", hint="choose another output"
        ) from error
    try:
        with os.fdopen(fd, "w+b") as file:
            yield file
            file.flush()
            _keep_permissions(target, file.fileno())
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            error.filename = os.fspath(path)  # the calls that meet it know no names
        raise
    sync_folder(folder)


def _beside(folder: str, name: str) -> str:
    begin = os.fsdecode(os.fsencode(name)[:200])  # names have at most 255 bytes, whatever the letters
    return os.path.join(folder, f".{begin}.{os.urandom(6).hex()}.tmp")


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

    A folder that is there already is replaced as a whole, if it holds nothing but what `is_ours` knows by
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
        raise UsageFault(
            f"{path}: can't write there: {(error.strerror or '').lower()}", hint="choose another output"
        ) from error
    try:
        yield temporary
        sync_folder(temporary)
        _swap(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
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


def _swap(new: str, target: str) -> None:
    """Puts a folder in place of another; the old one ends up under the new one's name."""
    if not os.path.lexists(target):
        os.rename(new, target)
        return
    aside = new + ".old"
    os.rename(target, aside)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(aside, target)
        raise
    os.rename(aside, new)


def _check_target(path: str | os.PathLike[str], target: str) -> None:
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        if os.fspath(path).endswith(os.sep):
            raise UsageFault(f"{os.fspath(path)}: is named like a folder", hint="name a file") from None
        return
    except OSError as error:
        raise UsageFault(f"{os.fspath(path)}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise UsageFault(f"{os.fspath(path)}: is not a plain file, so it can't be replaced")


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


def open_source_descriptor(path: str) -> int:
    """A read-only descriptor of a plain file; `-` is standard input, spooled when it can't seek.

    Raises:
        Unreadable: with the reason in words.
    """
    if path == "-":
        return _standard_input()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unreadable(path, _reason(error)) from error
    except ValueError:
        raise Unreadable(path, "is no name of a file") from None
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = "a folder" if stat.S_ISDIR(mode) else "no plain file"
        raise Unreadable(path, f"is {what}", hint="name the checkpoint file")
    return fd


def _standard_input() -> int:
    if stat.S_ISREG(os.fstat(0).st_mode):
        return os.dup(0)
    with tempfile.TemporaryFile() as spool:
        shutil.copyfileobj(sys.stdin.buffer, spool, BUFFER)
        spool.flush()
        return os.dup(spool.fileno())


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return (error.strerror or str(error)).lower()
