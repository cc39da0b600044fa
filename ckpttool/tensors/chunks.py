"""One tensor made of the chunks it was saved in; the values are put together when they are written.

Ranks save the parts of a sharded tensor each for itself; a part is a box within the whole.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add, lt, sub

from .dtypes import DType
from .ref import MAX_BYTES, BadTensor, Computed, Storage, TensorRef, extent
from .strided import blocks
from .values import CHUNK, stream

MAX_CUTS = 8
"""Dimensions along which a tensor may be cut; device meshes have three or four."""

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box within a tensor.

    Attributes:
        begin: the box's first index in each dimension.
        tensor: its values; the shape is the size of the box.
    """

    begin: Index
    tensor: TensorRef


def assembled(name: str, path: str, dtype: DType, shape: Index, parts: Sequence[Part]) -> TensorRef:
    """Return one tensor made of parts; nothing is read yet.

    Args:
        name: the tensor's name, for messages.
        path: the file's name, for messages.
        dtype: the element type of all parts.
        shape: of the whole.
        parts: boxes within the whole, in any order; none is a view that repeats elements.

    Raises:
        BadTensor: the parts leave a gap, overlap or reach outside; or the whole is larger than any file, or
            is cut in more than MAX_CUTS dimensions.
    """
    parts = [part for part in parts if part.tensor.numel]
    if extent(shape) * dtype.itemsize > MAX_BYTES or not _tile(shape, parts):
        raise BadTensor(f"'{name}' of shape {str(list(shape))[:80]} whose chunks are not the whole of it")
    whole = _Whole(name, dtype.itemsize, shape, parts)
    origins = tuple(part.tensor.storage for part in parts)
    data = Computed(path, math.prod(shape) * dtype.itemsize, whole.make)
    storage = Storage(data, dtype.storage or "UntypedStorage", origins=origins)
    return TensorRef.contiguous(storage, dtype, shape)


def _tile(shape: Index, parts: Sequence[Part]) -> bool:
    """Return whether boxes fill a box without gap or overlap.

    They do exactly when their corners, with alternating signs, cancel out to the corners of the whole: the
    corners are the mixed derivative of the area that the boxes cover, and determine it. Dimensions along
    which no box is cut are skipped.
    """
    boxes = [(part.begin, part.tensor.shape) for part in parts]
    if any(len(begin) != len(shape) for begin, _ in boxes):
        return False
    if any(b + s > n for begin, size in boxes for b, s, n in zip(begin, size, shape, strict=True)):
        return False
    cut = [d for d, n in enumerate(shape) if any(size[d] != n for _, size in boxes)]
    if len(cut) > MAX_CUTS or not math.prod(shape):
        return not boxes and not math.prod(shape)
    corners: Counter[Index] = Counter()
    for begin, size in boxes:
        _add_corners(corners, [(begin[d], begin[d] + size[d]) for d in cut], 1)
    _add_corners(corners, [(0, shape[d]) for d in cut], -1)
    return not any(corners.values())


def _add_corners(corners: Counter[Index], sides: Sequence[tuple[int, int]], sign: int) -> None:
    for ends in itertools.product((0, 1), repeat=len(sides)):
        corner = tuple(side[end] for side, end in zip(sides, ends, strict=True))
        corners[corner] += sign * (-1) ** sum(ends)


@dataclass(frozen=True, slots=True)
class _Whole:
    """Make the bytes of the whole, block by block; a block is a row-major stretch of it."""

    name: str
    width: int
    shape: Index
    parts: Sequence[Part]

    def make(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield `nbytes` of the bytes from `start`."""
        stride = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        for first, shape in blocks(self.shape, stride, CHUNK // self.width):
            begin = first * self.width
            end = begin + math.prod(shape) * self.width
            if begin >= start + nbytes:
                return
            if end > start:
                block = memoryview(self.block(first, shape, stride))
                yield block[max(0, start - begin) : start + nbytes - begin]

    def block(self, first: int, shape: Index, stride: Sequence[int]) -> bytearray:
        """Return the elements from number `first` on, as many in the last dimensions as `shape` says."""
        out = bytearray(math.prod(shape) * self.width)
        low = tuple(first // step % n for step, n in zip(stride, self.shape, strict=True))
        size = (1,) * (len(low) - len(shape)) + shape
        for part in self.parts:
            begin = tuple(map(max, low, part.begin))
            end = tuple(map(min, map(add, low, size), map(add, part.begin, part.tensor.shape)))
            if all(map(lt, begin, end)):
                self.scatter(out, size, tuple(map(sub, begin, low)), _cut(part, begin, end))
        return out

    def scatter(self, out: bytearray, size: Index, begin: Index, part: TensorRef) -> None:
        """Copy a part into a block of size `size`, in runs of bytes that lie together in both."""
        data = b"".join(stream(part))
        together = len(size)  # from this dimension on the part is as wide as the block
        while together and part.shape[together - 1] == size[together - 1]:
            together -= 1
        outer = part.shape[: max(together - 1, 0)]
        run = math.prod(part.shape[max(together - 1, 0) :]) * self.width
        stride = [math.prod(size[d + 1 :]) * self.width for d in range(len(size))]
        origin = sum(b * s for b, s in zip(begin, stride, strict=True))
        for number, index in enumerate(itertools.product(*map(range, outer))):
            at = origin + sum(i * s for i, s in zip(index, stride, strict=False))
            out[at : at + run] = data[number * run : (number + 1) * run]


def _cut(part: Part, begin: Index, end: Index) -> TensorRef:
    """Return the box of a part between two corners, which are given within the whole."""
    tensor = part.tensor
    steps = sum((b - o) * s for b, o, s in zip(begin, part.begin, tensor.stride, strict=True))
    shape = tuple(map(sub, end, begin))
    return replace(tensor, shape=shape, offset=tensor.offset + steps)
