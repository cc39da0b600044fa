"""The values of two files' tensors, read in step: first as bytes, as numbers only where the bytes differ.

Tensors that are plain bytes in both files are compared in pieces, on several cores; memory holds a few
pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ..files.copying import Progress
from ..files.threads import cores, in_order
from ..tensors.ref import ByteRange, TensorRef
from ..tensors.values import MAX_REPEATED, in_pieces, require_bounded
from .distances import Distance, Measure, measurer
from .equality import Tolerance

READ = 1 << 17
"""Bytes read of each file at a time; both pieces stay in the processor's cache while they are compared."""

ELEMENTS = 1 << 16
"""Elements compared at a time when values must be computed."""

PIECE = 16 << 20
"""Bytes compared as one job."""

MANY = 500
"""The most small tensors compared as one job."""

WORKERS = 4


class Pair(NamedTuple):
    """A tensor of each file, of one shape; types may differ only when there is a tolerance."""

    name: str
    a: TensorRef
    b: TensorRef


def distances(
    pairs: Iterable[Pair], tolerance: Tolerance | None = None, progress: Progress | None = None
) -> Iterator[tuple[Pair, Distance]]:
    """Yield the pairs that differ, with their distance, in the order given.

    Without a tolerance two elements are the same when their bits are: -0.0 differs from 0.0, and two NaNs may
    differ, at a distance of nothing.

    Args:
        pairs: the pairs.
        tolerance: the distance within which elements are the same; None for the same bits.
        progress: called with the number of bytes of `a` after each piece.

    Raises:
        Damaged: a file ends early.
        Refused: an expanded tensor, in only one of the files, more than 64 GiB larger than its bytes.
    """
    so_far = Distance(0)
    for done in in_order(_jobs(pairs, tolerance), cores(WORKERS)):
        for piece in done:
            so_far += piece.found
            if progress and piece.nbytes:
                progress(piece.nbytes)
            if piece.of is not None:
                if so_far.differ:
                    yield piece.pair, replace(so_far, of=piece.of)
                so_far = Distance(0)


class _Done(NamedTuple):
    """The outcome of a piece. `of` is the number of elements of the tensor, only in its last piece."""

    pair: Pair
    found: Distance
    nbytes: int
    of: int | None


class _Plain(NamedTuple):
    """Two byte ranges that hold the same elements of one type."""

    pair: Pair
    a: ByteRange
    b: ByteRange
    first: int
    itemsize: int
    measure: Measure
    of: int | None


def _jobs(pairs: Iterable[Pair], tolerance: Tolerance | None) -> Iterator[Callable[[], list[_Done]]]:
    """Yield pieces of large tensors one by one, and small tensors together, as a thread costs time too."""
    small: list[_Plain] = []
    held = 0
    for pair in pairs:
        measure = measurer(pair.a.dtype, pair.b.dtype, tolerance)
        plain = list(_pieces(pair, measure))
        if small and (held >= PIECE or len(small) >= MANY or len(plain) != 1):
            yield partial(_compare_all, small)
            small, held = [], 0
        if not plain:  # computed values are read in this thread: computing them holds the GIL
            yield partial(list, [_in_step(pair, measure)])
        elif len(plain) > 1:
            yield from (partial(_compare_all, [piece]) for piece in plain)
        else:
            small += plain
            held += pair.a.nbytes
    if small:
        yield partial(_compare_all, small)


def _pieces(pair: Pair, measure: Measure) -> Iterator[_Plain]:
    """Yield the pieces of two tensors that are plain bytes of one type; nothing for other tensors."""
    _, a, b = pair
    if a.dtype is not b.dtype or not (a.is_plain and b.is_plain):
        return
    mine, theirs = a.data, b.data
    if not (isinstance(mine, ByteRange) and isinstance(theirs, ByteRange)):
        return
    for start in range(0, max(mine.nbytes, 1), PIECE):
        size = min(PIECE, mine.nbytes - start)
        both = mine.part(start, size), theirs.part(start, size)
        of = a.numel if start + size == mine.nbytes else None
        yield _Plain(pair, *both, start // a.dtype.itemsize, a.dtype.itemsize, measure, of)


def _compare_all(pieces: list[_Plain]) -> list[_Done]:
    return [_compare(piece) for piece in pieces]


def _compare(piece: _Plain) -> _Done:
    """Compare a piece.

    Full chunks are compared as bytearrays, by memcmp; memoryviews are compared element by element, 20 times
    as slowly.
    """
    found, first = Distance(0), piece.first
    size = min(READ, piece.a.nbytes)
    mine, theirs = bytearray(size), bytearray(size)
    for a, b in zip(piece.a.chunks(memoryview(mine)), piece.b.chunks(memoryview(theirs)), strict=True):
        same = mine == theirs if len(a) == size else bytes(a) == bytes(b)
        if not same:
            found += piece.measure(a, b, first)
        first += len(a) // piece.itemsize
    return _Done(piece.pair, found, piece.a.nbytes, piece.of)


def _in_step(pair: Pair, measure: Measure) -> _Done:
    """Compare values of any layout and type; what both repeat by a stride of 0 is compared once."""
    name, a, b = pair
    shape = tuple(
        n if one or other else min(n, 1) for n, one, other in zip(a.shape, a.stride, b.stride, strict=True)
    )
    once, other = replace(a, shape=shape), replace(b, shape=shape)
    found, first = Distance(0), 0
    for side in (once, other):
        require_bounded(name, side, MAX_REPEATED)
    sides = (in_pieces(side, ELEMENTS * side.dtype.itemsize) for side in (once, other))
    for x, y in zip(*sides, strict=True):
        if a.dtype is not b.dtype or x != y:
            found += measure(memoryview(x), memoryview(y), first)
        first += len(x) // a.dtype.itemsize
    if found.where is not None and shape != a.shape:
        found = replace(found, where=_place(found.where, shape, a.shape)).times(a.numel // once.numel)
    return _Done(pair, found, a.nbytes, a.numel)


def _place(where: int, within: Sequence[int], shape: Sequence[int]) -> int:
    """Return an element's number in a tensor, from its number in a corner of that tensor."""
    return sum(i * math.prod(shape[axis + 1 :]) for axis, i in enumerate(unravelled(where, within)))


def unravelled(where: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return an element's index along each axis, from its number in row-major order."""
    index = []
    for size in reversed(shape):
        where, i = divmod(where, size)
        index.append(i)
    return tuple(reversed(index))
