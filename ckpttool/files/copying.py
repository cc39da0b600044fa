"""Byte ranges from file to file, by the fastest way the file systems allow."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import BinaryIO

from ..errors import Damaged
from ..tensors.ref import ByteRange, Computed
from .crc32 import combined, crc32_of
from .threads import beside, cores

BUFFER = 1 << 20
"""Bytes moved at a time where data must pass through this process."""

STRETCH = 1 << 20
"""Bytes that one of two processes makes before the other's turn; whole elements."""

COPY = 64 << 20
"""Bytes asked of the kernel at a time, so that progress shows and a signal is heard."""

MIN_TO_THREAD = 2 << 20
"""Bytes of which the checksum is worth a thread of its own."""

# The kernel's ways of saying "not between these two files": another file system, a file
# system without the call, an old kernel, a sandbox.
NOT_HERE = {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EPERM}

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Progress = Callable[[int], object]


def _ignore(_: int) -> None:
    pass


@contextlib.contextmanager
def no_room_named(path: str) -> Iterator[None]:
    """An error that says there is no room gets the name of the place: the calls that meet it know none."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            error.filename = path
        raise


class Output:
    """A file being written, front to back or at chosen places.

    `write` takes bytes, `copy` a range of another file without looking at it, `copy_with_crc` the same and
    returns the CRC-32 of what was moved. All that is not given a place is appended at `position`.
    """

    def __init__(self, file: BinaryIO, progress: Progress | None = None) -> None:
        self.fd = file.fileno()
        self.position = 0
        self._progress = progress or _ignore
        self._spare: list[memoryview] = []
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

    def write_all(self, chunks: Iterable[memoryview], nbytes: int) -> None:
        """Append computed bytes, so many, chunk by chunk."""
        for chunk in chunks:
            self.write(chunk)
            self._progress(len(chunk))

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

    def make(self, data: Computed) -> None:
        """Append computed bytes."""
        self.write_all(data.make(0, data.nbytes), data.nbytes)

    def copy_with_crc(self, data: ByteRange | Computed) -> int:
        """Append bytes from elsewhere; returns their CRC-32."""
        crc = 0
        if isinstance(data, Computed):
            for chunk in data.make(0, data.nbytes):
                crc = zlib.crc32(chunk, crc)
                self.write_all([chunk], len(chunk))
            return crc
        for start in range(0, data.nbytes, COPY):
            part = data.part(start, min(COPY, data.nbytes - start))
            crc = combined(crc, self._copy_part_with_crc(part), part.nbytes)
        return crc

    def _copy_part_with_crc(self, part: ByteRange) -> int:
        # Two threads that each read, sum and write would read once, but wait for each other: only one can
        # write to a file at a time.
        if part.nbytes >= MIN_TO_THREAD and cores(2) == 2:
            return beside(partial(self._crc, part), partial(self.copy, part))
        crc, _ = self.put(part, self.position)
        self.position += part.nbytes
        self._progress(part.nbytes)
        return crc

    def _crc(self, data: ByteRange) -> int:
        buffer = self._buffer()
        crc = crc32_of(data.chunks(buffer))
        self._spare.append(buffer)
        return crc

    def put(self, data: ByteRange | Computed, position: int, summed: bool = True) -> tuple[int, int]:
        """Writes bytes from elsewhere to a place; returns their CRC-32 (0 if not summed) and their number."""
        buffer, crc = self._buffer(), 0
        for chunk in data.chunks(buffer):
            crc = zlib.crc32(chunk, crc) if summed else 0
            self.write_at(position, chunk)
            position += len(chunk)
        self._spare.append(buffer)
        return crc, data.nbytes

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
        buffer = self._buffer()
        moved = os.preadv(range.source.fd, [buffer[:count]], range.offset + done)
        self.write_at(self.position + done, buffer[:moved])
        self._spare.append(buffer)
        return moved

    def _buffer(self) -> memoryview:
        """One that no thread uses; to be given back to the spare ones."""
        try:
            return self._spare.pop()
        except IndexError:  # not asked first: another thread may take the last one in between
            return memoryview(bytearray(BUFFER))


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

    def write_all(self, chunks: Iterable[memoryview], nbytes: int) -> None:
        self.position += nbytes
