"""Small pieces of a file, read in a few large reads and written in a few large writes.

A system call for each of 100,000 tensors costs more than its bytes do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from ..tensors.source import ByteRange, Source

TINY = 1 << 12  # bytes from which a piece is worth system calls of its own: it may share a block
MOST_BYTES, MOST_PIECES = 1 << 20, 2000  # that are gathered before they are written


def is_tiny(data: ByteRange) -> bool:
    """Return whether a range is worth no system call of its own, and lies in a file of this machine."""
    return data.nbytes < TINY and data.source.is_local


def read_together(ranges: Sequence[ByteRange]) -> list[bytes]:
    """Return the bytes of small ranges; neighbours are read together. Damaged where a file ends."""
    found: list[bytes] = [b""] * len(ranges)
    of_source = defaultdict[Source, list[tuple[int, int, int]]](list)
    for number, (source, offset, nbytes) in enumerate(ranges):
        of_source[source].append((offset, nbytes, number))
    for source, wanted in of_source.items():
        wanted.sort()
        near = source.read_near([(offset, nbytes) for offset, nbytes, _ in wanted])
        for (_, _, number), data in zip(wanted, near, strict=True):
            found[number] = data
    return found


def in_rows(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield pieces and their places, which ascend, with those that follow without a gap in one."""
    parts, begin, end = list[bytes](), 0, 0
    for position, piece in pieces:
        if position != end and parts:
            yield begin, b"".join(parts)
            parts = []
        begin = begin if parts else position
        parts.append(piece)
        end = position + len(piece)
    if parts:
        yield begin, b"".join(parts)


class Gathered:
    """Pieces for places of a file that wait to be written."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, bytes]] = []
        self._nbytes = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to write."""
        return self._nbytes >= MOST_BYTES or len(self._pieces) >= MOST_PIECES

    def add(self, position: int, data: bytes) -> None:
        """Take a piece."""
        self._pieces.append((position, data))
        self._nbytes += len(data)

    def taken(self) -> Iterator[tuple[int, bytes]]:
        """Return the pieces, those without a gap between them in one, and begin again."""
        pieces, self._pieces, self._nbytes = self._pieces, [], 0
        return in_rows(sorted(pieces, key=itemgetter(0)))
