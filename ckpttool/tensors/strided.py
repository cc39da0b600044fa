"""The values of a strided view in row-major order, copied by strided slices, whose loops run in C.

Memory holds a block of the result and a window of the file, whatever the layout. A row of a transposed matrix
lies scattered over the whole file, and every mapped page counts as memory. So a block is gathered tile by
tile, each of which needs one window.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from ..errors import Damaged
from .ref import Computed, TensorRef

WINDOW = 4
"""Chunks of the file that are read together."""

BLOCK = 6
"""Chunks that are gathered together: each block of a transposed matrix passes over all of the file."""

LONG_ENOUGH = 32
"""Elements in a run of the result that are worth a loop in C, even where another axis is longer."""

Format = Literal["B", "H", "I", "Q"]
FORMATS: dict[int, Format] = {1: "B", 2: "H", 4: "I", 8: "Q"}
Sizes = tuple[int, ...]


def gathered(tensor: TensorRef, chunk: int) -> Iterator[memoryview]:
    """Yield the row-major values of a strided view as they are stored.

    Args:
        tensor: any layout but a scalar; its lazy bits and byte order are left as they are.
        chunk: bytes of a piece at most. Memory holds about BLOCK + WINDOW times as much.

    Yields:
        Pieces, each valid until the next.

    Raises:
        Damaged: the file became shorter since it was opened.
    """
    width, shape, stride = tensor.dtype.itemsize, tensor.shape, tensor.stride
    offset = tensor.offset
    if width == 16:  # no memoryview format is that wide: such elements go as pairs of 8 bytes
        width, shape, stride, offset = 8, (*shape, 2), (*(2 * s for s in stride), 1), 2 * offset
    shape, stride = _coalesced(shape, stride)
    most = BLOCK * chunk // width
    buffer = memoryview(bytearray(min(most, math.prod(shape)) * width))
    for start, size in blocks(shape, stride, most):
        block = buffer[: math.prod(size) * width]
        steps = stride[len(stride) - len(size) :]
        _fill(block.cast(FORMATS[width]), tensor, offset + start, size, steps, WINDOW * chunk // width)
        for begin in range(0, len(block), chunk):
            yield block[begin : begin + chunk]


def _coalesced(shape: Sizes, stride: Sizes) -> tuple[Sizes, Sizes]:
    """Return a shape and stride of the same elements in the same order, axes that lie together as one."""
    sizes, steps = [shape[0]], [stride[0]]
    for size, step in zip(shape[1:], stride[1:], strict=True):
        if steps[-1] == size * step or sizes[-1] == 1:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        elif size != 1:
            sizes.append(size)
            steps.append(step)
    return tuple(sizes), tuple(steps)


def blocks(shape: Sequence[int], stride: Sequence[int], most: int) -> Iterator[tuple[int, Sizes]]:
    """Cut an array into row-major blocks.

    Args:
        shape, stride: of the array, in elements.
        most: elements of a block at most.

    Yields:
        The number of a block's first element, and its shape in the last dimensions.
    """
    cut = len(shape) - 1  # the dimension that is cut into runs of rows; those after it stay whole
    while cut > 0 and math.prod(shape[cut:]) <= most:
        cut -= 1
    rows = max(1, most // math.prod(shape[cut + 1 :]))
    for index in itertools.product(*map(range, shape[:cut])):
        base = sum(i * s for i, s in zip(index, stride, strict=False))
        for row in range(0, shape[cut], rows):
            block = (min(rows, shape[cut] - row), *shape[cut + 1 :])
            yield base + row * stride[cut], block


def _fill(block: memoryview, tensor: TensorRef, start: int, shape: Sizes, stride: Sizes, most: int) -> None:
    """Fill a block of the result with the elements from number `start` of the storage, `most` at a time."""
    width = block.itemsize
    block_stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    for tile in _tiles(_Tile(start, 0, shape), stride, block_stride, most):
        span = 1 + sum((n - 1) * s for n, s in zip(tile.shape, stride, strict=True))
        target = block[tile.place :]
        with (
            _window(tensor, tile.start * width, (tile.start + span) * width) as window,
            window.cast(FORMATS[width]) as elements,
        ):
            if _is_turned(tile.shape, stride, span):
                staged, staged_stride = _staged(elements, tile.shape, stride)
                _copy(staged, target, tile.shape, staged_stride, block_stride)
            else:
                _copy(elements, target, tile.shape, stride, block_stride)


def _is_turned(shape: Sizes, stride: Sizes, span: int) -> bool:
    """Return whether elements lie closest along another axis than the last, in runs long enough to stage."""
    turned = stride[-1] > min(stride)
    return turned and math.prod(shape) <= span and min(shape) >= LONG_ENOUGH


def _staged(elements: memoryview, shape: Sizes, stride: Sizes) -> tuple[memoryview, Sizes]:
    """Return a compact copy of a tile: rows far apart, often by a power of 2, evict each other from a cache.

    Its axes keep their order in the file, so that whole runs are copied. Runs have an odd length, so that
    those read in turn fall into different cache lines.
    """
    order = sorted(range(len(shape)), key=stride.__getitem__)
    steps, size = [0] * len(shape), 1
    for axis in order:
        steps[axis] = size
        size = size * shape[axis] | 1
    staged = memoryview(bytearray(size * elements.itemsize)).cast(FORMATS[elements.itemsize])
    _copy(elements, staged, shape, stride, tuple(steps), inner=order[0])
    return staged, tuple(steps)


class _Tile(NamedTuple):
    """A part of a block: its first element in the storage and in the block, and its shape."""

    start: int
    place: int
    shape: Sizes


def _tiles(tile: _Tile, stride: Sizes, out_stride: Sizes, most: int) -> Iterator[_Tile]:
    """Cut a block into tiles, each of whose elements lie within `most` elements of the storage."""
    reach = [(n - 1) * s for n, s in zip(tile.shape, stride, strict=True)]
    if sum(reach) < most:
        yield tile
        return
    axis = max(range(len(reach)), key=reach.__getitem__)
    rows = max(1, (most - sum(reach) + reach[axis]) // stride[axis])
    for row in range(0, tile.shape[axis], rows):
        shape = (*tile.shape[:axis], min(rows, tile.shape[axis] - row), *tile.shape[axis + 1 :])
        part = _Tile(tile.start + row * stride[axis], tile.place + row * out_stride[axis], shape)
        yield from _tiles(part, stride, out_stride, most)


@contextmanager
def _window(tensor: TensorRef, begin: int, end: int) -> Iterator[memoryview]:
    """Give the bytes of a tensor's storage from `begin` to `end`: mapped from the file, or computed."""
    where, size = tensor.storage.data, tensor.dtype.itemsize
    if isinstance(where, Computed):  # only whole elements can be made
        whole = memoryview(where.part(begin - begin % size, end + -end % size - begin + begin % size).read())
        yield whole[begin % size :][: end - begin]
        return
    skip = (where.offset + begin) % mmap.ALLOCATIONGRANULARITY
    length, offset = skip + end - begin, where.offset + begin - skip
    try:
        mapped = mmap.mmap(where.source.fd, length, access=mmap.ACCESS_READ, offset=offset)
    except ValueError:
        raise Damaged(where.path, "the file became shorter while it was read") from None
    with mapped, memoryview(mapped) as pages, pages[skip:] as view:
        yield view


def _copy(
    elements: memoryview,
    out: memoryview,
    shape: Sizes,
    stride: Sizes,
    out_stride: Sizes,
    inner: int | None = None,
) -> None:
    """Copy a strided array onto another one, run by run along one axis; each run is a loop in C."""
    if len(shape) == 1:
        shape, stride, out_stride = (1, *shape), (0, *stride), (0, *out_stride)
    axes = sorted(range(len(shape)), key=shape.__getitem__)
    if inner is None:  # write contiguous runs, unless another axis is much longer
        inner = len(shape) - 1 if shape[-1] >= LONG_ENOUGH else axes[-1]
    axes.remove(inner)
    *outer, middle = axes
    count, step, out_step = shape[inner], stride[inner], out_stride[inner]
    reach, out_reach = (count - 1) * step + 1, (count - 1) * out_step + 1
    for index in itertools.product(*(range(shape[i]) for i in outer)):
        first = sum(i * stride[d] for i, d in zip(index, outer, strict=True))
        target = sum(i * out_stride[d] for i, d in zip(index, outer, strict=True))
        for _ in range(shape[middle]):
            if step:
                out[target : target + out_reach : out_step] = elements[first : first + reach : step]
            else:
                run = memoryview(bytes(elements[first : first + 1]) * count).cast(FORMATS[out.itemsize])
                out[target : target + out_reach : out_step] = run
            first += stride[middle]
            target += out_stride[middle]
