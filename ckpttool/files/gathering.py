"""Small pieces of a file, read in a few large reads and written in a few large writes.

A system call for each of 100,000 tensors costs more than its bytes do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from operator import itemgetter

from ..tensors.source import ByteRange, Source
from .crc32 import crc32

TINY = 1 << 12  # bytes from which a piece is worth system calls of its own: it may share a block
MOST_BYTES, MOST_PIECES = 1 << 20, 2000  # that are gathered before they are written

Then = Callable[[int], object]  # gets the CRC-32 of a piece
Bytes = bytes | memoryview


class Gathered:
    """Pieces for places of a file, of memory or of files of this machine, that wait to be written."""

    def __init__(self) -> None:
        self._begin_again()

    def _begin_again(self) -> None:
        self._ready: list[tuple[int, Bytes]] = []
        self._unread: dict[Source, list[tuple[int, int, int, Then | None]]] = defaultdict(list)
        self._nbytes = self._count = 0
        self._is_taken = False

    @property
    def is_full(self) -> bool:
        """Whether it is time to write; not while that is done, when headers may still be added."""
        return not self._is_taken and (self._nbytes >= MOST_BYTES or self._count >= MOST_PIECES)

    def add(self, position: int, data: bytes) -> None:
        """Take bytes that are there already."""
        self._ready.append((position, data))
        self._grow(len(data))

    def copy(self, position: int, data: ByteRange, then: Then | None) -> None:
        """Take bytes that are still to be read; `then` may add others."""
        self._unread[data.source].append((data.offset, data.nbytes, position, then))
        self._grow(data.nbytes)

    def _grow(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._count += 1

    def taken(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, int]]]:
        """Return stretches as long as they are in one piece, and places and sizes of what was copied."""
        self._is_taken, copied = True, []
        for source, wanted in self._unread.items():
            wanted.sort(key=itemgetter(0, 1))
            found = source.read_near([place[:2] for place in wanted])
            for (_, nbytes, position, then), data in zip(wanted, found, strict=True):
                self._ready.append((position, data))
                copied.append((position, nbytes))
                if then is not None:
                    then(crc32(data))
        if not self._ready:
            self._is_taken = False
            return [], []
        self._ready.sort(key=itemgetter(0))
        stretches, parts, begin, end = list[tuple[int, bytes]](), list[Bytes](), 0, 0
        for position, piece in self._ready:
            if position != end and parts:
                stretches.append((begin, b"".join(parts)))
                parts = []
            begin = begin if parts else position
            parts.append(piece)
            end = position + len(piece)
        stretches.append((begin, b"".join(parts)))
        self._begin_again()
        return stretches, copied
