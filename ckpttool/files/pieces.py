"""Bytes in pieces, which several threads read and work on: to sum, hash or compare them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from mmap import mmap
from typing import NamedTuple, TypeVar

from ..tensors.ref import LARGEST, Computed, TensorRef
from ..tensors.source import ByteRange
from ..tensors.values import stream
from .threads import cores, cut, map_pieces

BUFFER = 1 << 20  # bytes moved at a time; whole elements
MOST_THREADS = 8

Progress = Callable[[int], object]
Bytes = ByteRange | Computed | TensorRef
T = TypeVar("T")


class Buffers:
    """Memory for each thread that reads; a buffer that was given back is used again."""

    def __init__(self) -> None:
        self._spare: list[memoryview] = []

    @contextlib.contextmanager
    def one(self, nbytes: int = 0) -> Iterator[memoryview]:
        """Yield a buffer that no other thread uses, of BUFFER bytes, or of others, LARGEST at most."""
        try:
            buffer = self._spare.pop()
        except IndexError:  # not asked first: another thread may take the last one in between
            # It begins with a page, which the kernel copies faster; what is not used of it takes no memory.
            buffer = memoryview(mmap(-1, LARGEST))
        yield buffer[: nbytes or BUFFER]
        self._spare.append(buffer)


class BytesPiece(NamedTuple):
    """A stretch of the bytes with this number, or the whole of a tensor whose values must be made."""

    number: int
    data: Bytes
    nbytes: int
    is_last: bool


def map_bytes(
    work: Callable[[int, Iterator[memoryview]], T],
    items: Iterable[Bytes],
    most: int,
    progress: Progress | None = None,
) -> Iterator[tuple[BytesPiece, T]]:
    """Yield the pieces of each item, in order, with `work(number, chunks)`, which several threads do.

    Bytes of a file are cut into pieces of at most `most` bytes, other items are one piece each.
    """
    buffers = Buffers()

    def done(piece: BytesPiece) -> T:
        with buffers.one() as buffer:
            data = piece.data
            chunks = stream(data, buffer=buffer) if isinstance(data, TensorRef) else data.chunks(buffer)
            return work(piece.number, chunks)

    for piece, result in map_pieces(done, _pieces(items, most), cores(MOST_THREADS)):
        if progress and piece.nbytes:
            progress(piece.nbytes)
        yield piece, result


def _pieces(items: Iterable[Bytes], most: int) -> Iterator[BytesPiece]:
    for number, item in enumerate(items):
        data = item.data if isinstance(item, TensorRef) and item.is_plain else item
        if not isinstance(data, ByteRange) or not data.nbytes:
            yield BytesPiece(number, data, data.nbytes, True)
            continue
        for start, size in cut(data.nbytes, most):
            yield BytesPiece(number, data.part(start, size), size, start + size == data.nbytes)
