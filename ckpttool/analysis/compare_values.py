"""The values of two files' tensors, read in step: first as bytes, as numbers only where the bytes differ.

Tensors that are plain bytes in both files are compared in pieces, on several cores; memory holds a few
pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..files.copying import Progress
from ..files.threads import cores, cut, map_pieces
from ..tensors.ref import ByteRange, TensorRef
from ..tensors.values import MAX_REPEATED, in_pieces, require_bounded
from .distances import Distance, Measure, measurer
from .equality import Tolerance

READ = 1 << 17
"""Bytes read of each file at a time; both pieces stay in the processor's cache while they are compared."""

ELEMENTS = 1 << 16
"""Elements compared at a time when values must be computed."""

PIECE = 16 << 20
"""Bytes of a tensor compared by one thread; values that must be computed are all compared by one."""

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
    for piece, found in map_pieces(_compare, _pieces(pairs, tolerance), cores(WORKERS)):
        so_far += found
        if progress and piece.nbytes:
            progress(piece.nbytes)
        if piece.is_last:
            if so_far.differ:
                yield piece.pair, replace(so_far, of=piece.pair.a.numel)
            so_far = Distance(0)


class _Piece(NamedTuple):
    """A stretch of two tensors.

    Attributes:
        plain: the byte ranges that hold the same elements of one type; None for the whole of two tensors
            whose values must be computed.
        first: the number of the first element.
        nbytes: of the first tensor's values.
        is_last: whether nothing of the tensors comes after it.
    """

    pair: Pair
    measure: Measure
    plain: tuple[ByteRange, ByteRange] | None
    first: int
    nbytes: int
    is_last: bool


def _pieces(pairs: Iterable[Pair], tolerance: Tolerance | None) -> Iterator[_Piece]:
    """Cut pairs that are plain bytes of one type into pieces; other pairs are one piece each."""
    for pair in pairs:
        _, a, b = pair
        measure = measurer(a.dtype, b.dtype, tolerance)
        mine, theirs = (each.data if each.is_plain else None for each in (a, b))
        if a.dtype is not b.dtype or not (isinstance(mine, ByteRange) and isinstance(theirs, ByteRange)):
            yield _Piece(pair, measure, None, 0, a.nbytes, True)
            continue
        for start, size in cut(a.nbytes, PIECE) if a.nbytes else [(0, 0)]:
            both, first = (mine.part(start, size), theirs.part(start, size)), start // a.dtype.itemsize
            yield _Piece(pair, measure, both, first, size, start + size == a.nbytes)


def _compare(piece: _Piece) -> tuple[_Piece, Distance]:
    """Compare a piece.

    Full chunks are compared as bytearrays, by memcmp; memoryviews are compared element by element, 20 times
    as slowly.
    """
    if piece.plain is None:
        return piece, _in_step(piece.pair, piece.measure)
    found, first = Distance(0), piece.first
    size = min(READ, piece.nbytes)
    mine, theirs = bytearray(size), bytearray(size)
    chunks = (data.chunks(memoryview(to)) for data, to in zip(piece.plain, (mine, theirs), strict=True))
    for a, b in zip(*chunks, strict=True):
        same = mine == theirs if len(a) == size else bytes(a) == bytes(b)
        if not same:
            found += piece.measure(a, b, first)
        first += len(a) // piece.pair.a.dtype.itemsize
    return piece, found


def _in_step(pair: Pair, measure: Measure) -> Distance:
    """Compare values of any layout and type; what both repeat by a stride of 0 is compared once."""
    name, a, b = pair
    once, other = repeated_once(a, b)
    found, first = Distance(0), 0
    for side in (once, other):
        require_bounded(name, side, MAX_REPEATED)
    sides = (in_pieces(side, ELEMENTS * side.dtype.itemsize) for side in (once, other))
    for x, y in zip(*sides, strict=True):
        if a.dtype is not b.dtype or x != y:
            found += measure(memoryview(x), memoryview(y), first)
        first += len(x) // a.dtype.itemsize
    if found.where is not None and once.shape != a.shape:
        found = replace(found, where=_place(found.where, once.shape, a.shape)).times(a.numel // once.numel)
    return found


def repeated_once(a: TensorRef, b: TensorRef) -> tuple[TensorRef, TensorRef]:
    """Return two tensors of one shape with what both repeat by a stride of 0 there once."""
    shape = tuple(
        n if one or other else min(n, 1) for n, one, other in zip(a.shape, a.stride, b.stride, strict=True)
    )
    return replace(a, shape=shape), replace(b, shape=shape)


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
