"""The bytes of a file, and ranges of them, as they are read; no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from .. import system
from ..errors import Damaged, Unreadable

NEAR, TOGETHER = 1 << 12, 1 << 20  # bytes between two ranges that are read along, and of one read


class Source:
    """A file opened for reading; closed by `close()` or with its last user."""

    is_local = True  # it has a descriptor: it can be mapped, and other files can share its blocks
    content = ""  # a hash of the bytes, where one is known without reading them
    commit = ""  # of a repository on the hub, which the file is of

    def __init__(self, path: str, fd: int) -> None:
        self.path = path  # for messages: the descriptor is what is read, whatever happens to the name
        self._fd = fd
        # Called with the offset and the bytes of whatever is read, in the thread that reads.
        self.observers: list[Observer] = []
        self.size = os.fstat(fd).st_size
        self._replaced: tuple[object, object] | None = None
        system.opened(self)

    @property
    def fd(self) -> int:
        """The descriptor. Raises Unreadable after `close`."""
        if self._fd < 0:
            raise Unreadable(self.path, "is closed", hint="read its tensors inside the `with` block")
        return self._fd

    @property
    def unchecked(self) -> int:
        """How many stretches there are whose preceding bytes were not looked at."""
        return 0

    @property
    def place(self) -> str:
        """Where the file is, whatever messages call it."""
        return self.path

    @property
    def version(self) -> tuple[object, ...]:
        """What differs whenever the bytes do: of a file its inode, size and time of change."""
        facts = os.fstat(self.fd)
        return (*self.identity, facts.st_size, facts.st_mtime_ns)

    @property
    def identity(self) -> tuple[object, object]:
        """What two sources share exactly when they are the same file: its device and inode."""
        if self._replaced:
            return self._replaced
        facts = os.fstat(self.fd)
        return facts.st_dev, facts.st_ino

    def called(self, path: str) -> Source:
        """Return the first file of several under the path by which messages call them all."""
        source = Source(path, os.dup(self.fd))
        source.size = 0  # its bytes are those of the first file, which counts itself
        source.commit = self.commit
        return source

    def guard(self, start: int, nbytes: int, before: int, check: Callable[[bytes], None]) -> None:
        """Have the bytes from `before` to `start` checked before any of those behind them is used."""
        check(self.read(before, start - before))

    def check_rest(self) -> None:
        """Check what stands before stretches of which nothing was read: of a file it was checked at once."""

    def opened(self) -> None:
        """Note that the checkpoint is open: from now on values are read."""

    def expect(self, ranges: Sequence[tuple[int, int]], nbytes: int, first: int, line: Any) -> Any:
        """Announce what will be read, for a source that is slow to ask: a file is not."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`. Raises Damaged where the file ends before them."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise Damaged(self.path, f"ends at byte {self.size}, before its stated contents do")
        data = self._read(offset, nbytes)
        self.seen(offset, data)
        return data

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = system.pread(self.fd, nbytes - len(data), offset + len(data))
            if not piece:
                raise Damaged(self.path, "the file became shorter while it was read")
            data += piece
        return data

    def read_near(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of ranges (offset, size) that are sorted by offset; neighbours are read together.

        Raises Damaged where the file ends before them.
        """
        found: list[bytes] = []
        while len(found) < len(ranges):
            first = last = len(found)
            begin = end = ranges[first][0]
            most = begin + TOGETHER
            for offset, size in islice(ranges, first, None):
                stop = offset + size
                if (offset > end + NEAR or stop > most) and last > first:
                    break
                if stop > end:  # a call of max() would take three times as long
                    end = stop
                last += 1
            if begin < 0 or end > self.size:
                raise Damaged(self.path, f"ends at byte {self.size}, before its stated contents do")
            data = self._read(begin, end - begin)
            found += [data[offset - begin : offset - begin + size] for offset, size in ranges[first:last]]
        for (offset, _), data in zip(ranges, found, strict=True) if self.observers else ():
            self.seen(offset, data)
        return found

    def fill(self, offset: int, view: memoryview) -> None:
        """Fill memory with the bytes from `offset`. Raises Damaged where the file ends before them."""
        self._fill(offset, view)
        self.seen(offset, view)

    def seen(self, offset: int, data: memoryview | bytes) -> None:
        """Show bytes to the observers, those of this file that lie at `offset`."""
        for observer in self.observers:
            observer(offset, data)

    def _fill(self, offset: int, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            moved = system.preadv(self.fd, [view[filled:]], offset + filled)
            if not moved:
                raise Damaged(self.path, "the file became shorter while it was read")
            filled += moved

    def release(self, replaced: Collection[object]) -> None:
        """Close the descriptor if the file is one of those; what tells it from others stays known."""
        if self._fd >= 0 and self.identity in replaced:
            self._replaced = self.identity
            self.close()

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class ByteRange(NamedTuple):
    """`nbytes` bytes of a file from `offset`."""

    source: Source
    offset: int
    nbytes: int

    @property
    def path(self) -> str:
        """The file's name, for messages."""
        return self.source.path

    def read(self) -> bytes:
        """Return all bytes. Raises Damaged where the file ends before them."""
        return self.source.read(self.offset, self.nbytes)

    def part(self, start: int, nbytes: int) -> ByteRange:
        """Return `nbytes` bytes from `start` within this range, which must lie inside it."""
        return ByteRange(self.source, self.offset + start, nbytes)

    def chunks(self, buffer: memoryview) -> Iterator[memoryview]:
        """Read all bytes through one buffer: each chunk is valid until the next."""
        return filled(self._fill, 0, self.nbytes, buffer)

    def _fill(self, start: int, view: memoryview) -> None:
        self.source.fill(self.offset + start, view)


Stretch = tuple[int, ByteRange]  # how many bytes, and where they come from
Observer = Callable[[int, "memoryview | bytes"], object]  # of bytes, with the place of the first


def filled(
    fill: Callable[[int, memoryview], None], start: int, nbytes: int, buffer: memoryview
) -> Iterator[memoryview]:
    """Yield stretches that a function puts into a buffer, each valid until the next."""
    for done in range(0, nbytes, len(buffer) or 1):
        view = buffer[: min(len(buffer), nbytes - done)]
        fill(start + done, view)
        yield view
