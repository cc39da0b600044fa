"""Open files, stretches of them, and bytes that are computed when they are asked for.

A transform that changes values (another dtype) describes them as `Computed` bytes, which are made when they
are written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import Damaged, Unreadable

if TYPE_CHECKING:
    from .ref import TensorRef


FILLED = 1 << 20
"""Bytes of a piece of computed values, where the caller gives no buffer; whole elements."""


class Source:
    """A file opened for reading; closed by `close()` or with its last user.

    Attributes:
        path: the name for messages. The descriptor is what is read, whatever happens to the name meanwhile.
        size: bytes of the file when it was opened.
        observers: called with the offset and the bytes of whatever is read by `read` or `ByteRange.chunks`,
            in the thread that reads.
    """

    __slots__ = ("_fd", "observers", "path", "size")

    def __init__(self, path: str, fd: int) -> None:
        """Take over an open descriptor.

        Args:
            path: the file's name, for messages.
            fd: a descriptor of a regular file, closed with this object.
        """
        self.path = path
        self._fd = fd
        self.observers: list[Callable[[int, memoryview | bytes], object]] = []
        self.size = os.fstat(fd).st_size

    @property
    def fd(self) -> int:
        """The descriptor. Raises Unreadable after `close`."""
        if self._fd < 0:
            raise Unreadable(self.path, "is closed", hint="read its tensors inside the `with` block")
        return self._fd

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`.

        Raises:
            Damaged: the file ends before them, or became shorter since it was opened.
            Unreadable: the source is closed.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise Damaged(self.path, f"ends at byte {self.size}, before its stated contents do")
        pieces, start = [], offset
        while nbytes:
            piece = os.pread(self.fd, nbytes, offset)
            if not piece:
                raise Damaged(self.path, "the file became shorter while it was read")
            pieces.append(piece)
            offset += len(piece)
            nbytes -= len(piece)
        data = b"".join(pieces)
        for observer in self.observers:
            observer(start, data)
        return data

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
        """Read all bytes in order through one buffer.

        Args:
            buffer: writable bytes; a chunk has its size, the last one what is left.

        Yields:
            A view of the buffer, valid until the next is asked for.

        Raises:
            Damaged: the file became shorter since it was opened.
        """
        done = 0
        while done < self.nbytes:
            view = buffer[: min(len(buffer), self.nbytes - done)]
            filled = 0
            while filled < len(view):
                moved = os.preadv(self.source.fd, [view[filled:]], self.offset + done + filled)
                if not moved:
                    raise Damaged(self.source.path, "the file became shorter while it was read")
                filled += moved
            for observer in self.source.observers:
                observer(self.offset + done, view)
            done += filled
            yield view


@dataclass(frozen=True, slots=True)
class Computed:
    """`nbytes` bytes that are made when asked for, always the same.

    Attributes:
        path: the file they come from, for messages.
        nbytes: how many there are.
        make: `make(start, nbytes)` yields a stretch of them, in pieces that are valid until the next.
        view: yields the values of a tensor that is a view of them, little-endian, in less memory than all of
            them take; None where that is not possible.
        is_divisible: whether a stretch costs no more than its share, and several threads may make stretches
            at once.
        fill: `fill(start, buffer)` fills a buffer with the bytes from `start`; None where they are not made
            in the caller's memory.
    """

    path: str
    nbytes: int
    make: Callable[[int, int], Iterator[memoryview]]
    view: Callable[[TensorRef], Iterator[memoryview]] | None = None
    is_divisible: bool = False
    fill: Callable[[int, memoryview], None] | None = None

    @classmethod
    def filling(cls, path: str, nbytes: int, fill: Callable[[int, memoryview], None]) -> Computed:
        """Return bytes that a function puts into the caller's memory, any stretch of them in any thread.

        Args:
            path, nbytes, fill: as the attributes.
        """

        def make(start: int, count: int) -> Iterator[memoryview]:
            return _filled(fill, start, count, memoryview(bytearray(min(count, FILLED))))

        return cls(path, nbytes, make, is_divisible=True, fill=fill)

    def read(self) -> bytes:
        """Return all bytes."""
        return b"".join(bytes(piece) for piece in self.make(0, self.nbytes))

    def part(self, start: int, nbytes: int) -> Computed:
        """Return `nbytes` bytes from `start`, which must lie inside and cut no element."""
        fill = self.fill
        if fill is not None:
            return self.filling(self.path, nbytes, lambda at, buffer: fill(start + at, buffer))
        return Computed(
            self.path, nbytes, lambda at, count: self.make(start + at, count), is_divisible=self.is_divisible
        )

    def chunks(self, buffer: memoryview) -> Iterator[memoryview]:
        """Make all bytes in order, through the buffer if they are made in the caller's memory."""
        if self.fill is not None and len(buffer):
            return _filled(self.fill, 0, self.nbytes, buffer)
        return self.make(0, self.nbytes)


def _filled(
    fill: Callable[[int, memoryview], None], start: int, nbytes: int, buffer: memoryview
) -> Iterator[memoryview]:
    for done in range(0, nbytes, len(buffer) or 1):
        view = buffer[: min(len(buffer), nbytes - done)]
        fill(start + done, view)
        yield view
