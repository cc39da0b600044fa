"""The true values of a tensor as bytes: row-major, little-endian, lazy bits resolved, without torch.

Most tensors are one byte range and are copied as they are (`TensorRef.is_plain`). This is for the others:
transposed and expanded views, channels-last layouts, conjugate and negative views, big-endian files.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, NamedTuple

from ..errors import Damaged, Refused
from .ref import Computed, TensorRef

CHUNK = 1 << 20  # bytes of a piece of values

# Bytes by which a tensor may outgrow its storage when it is written: stride 0 repeats elements for free.
MAX_EXPANSION = 1 << 30
# The same where it is only read: more may never finish.
MAX_REPEATED = 1 << 36

FLIP_SIGN = bytes(i ^ 0x80 for i in range(256))


def require_bounded(
    name: str, tensor: TensorRef, most: int = MAX_EXPANSION, *, hint: str | None = None
) -> None:
    """Raise Refused for a view whose values outgrow its storage by more than `most` bytes."""
    if tensor.nbytes > tensor.storage.nbytes + most:
        raise Refused(
            tensor.storage.data.path,
            f"'{name}' is a view that expands {tensor.storage.nbytes} bytes to {tensor.nbytes}",
            hint=hint,
        )


def without_repeats(tensor: TensorRef) -> tuple[TensorRef, int]:
    """Return the tensor without the repeats of strides of 0, and how often each of its elements was there."""
    shape = tuple(n if step else min(n, 1) for n, step in zip(tensor.shape, tensor.stride, strict=True))
    once = replace(tensor, shape=shape)
    return once, tensor.numel // once.numel if once.numel else 1


def stream(tensor: TensorRef, *, buffer: memoryview | None = None) -> Iterator[memoryview]:
    """Yield the values in chunks, each valid until the next, however often elements are repeated."""
    where = tensor.storage.data
    if tensor.is_contiguous:
        buffer = memoryview(bytearray(min(CHUNK, tensor.nbytes))) if buffer is None else buffer
        pieces: Iterator[memoryview] = tensor.data.chunks(buffer)
    elif isinstance(where, Computed) and where.view is not None:
        yield from where.view(tensor)
        return
    else:
        pieces = gathered(tensor, CHUNK)
    for piece in pieces:
        yield _resolve(tensor, piece)


def in_pieces(tensor: TensorRef, nbytes: int) -> Iterator[bytes | bytearray]:
    """Yield the values in pieces of one size, so that tensors of several files can be read in step."""
    if tensor.is_plain:
        for start in range(0, tensor.nbytes, nbytes):
            yield tensor.data.part(start, min(nbytes, tensor.nbytes - start)).read()
        return
    pending = bytearray()
    for chunk in stream(tensor):
        pending += chunk
        end = len(pending) - len(pending) % nbytes
        for begin in range(0, end, nbytes):
            yield pending[begin : begin + nbytes]
        del pending[:end]
    if pending:
        yield pending


def stretches(tensor: TensorRef, first: int, count: int) -> Iterator[TensorRef]:
    """Yield views of `count` elements from number `first`, in row-major order, of whole rows if possible."""
    if count == tensor.numel:
        yield tensor
        return
    if not count:
        return
    step, inner = tensor.stride[0], replace(tensor, shape=tensor.shape[1:], stride=tensor.stride[1:])
    row = inner.numel
    i, skipped = divmod(first, row)
    if skipped:
        head = min(row - skipped, count)
        yield from stretches(replace(inner, offset=tensor.offset + i * step), skipped, head)
        i, count = i + 1, count - head
    if rows := count // row:
        yield replace(tensor, shape=(rows, *inner.shape), offset=tensor.offset + i * step)
    yield from stretches(replace(inner, offset=tensor.offset + (i + rows) * step), 0, count % row)


def _resolve(tensor: TensorRef, piece: memoryview) -> memoryview:
    """Apply the byte order first, then the signs of the lazy conjugate and negative."""
    part = tensor.dtype.part
    if not (tensor.is_swapped or tensor.neg or tensor.conj):
        return piece
    data = bytearray(piece)
    if tensor.is_swapped:
        swap(data, part)
    if tensor.neg:
        data[part - 1 :: part] = data[part - 1 :: part].translate(FLIP_SIGN)
    if tensor.conj:
        top = 2 * part - 1
        data[top :: 2 * part] = data[top :: 2 * part].translate(FLIP_SIGN)
    return memoryview(data)


def swap(data: bytearray, part: int) -> None:
    """Reverse the bytes of each element part of `part` bytes, in place."""
    for i in range(part // 2):
        data[i::part], data[part - 1 - i :: part] = data[part - 1 - i :: part], data[i::part]


# A strided view is copied by strided slices, whose loops run in C. A row of a transposed matrix lies
# scattered over the whole file, and every mapped page counts as memory, so a block of the result is gathered
# tile by tile, each of which needs one window of the file.

WINDOW = 4  # chunks of the file that are mapped together
BLOCK = 6  # chunks of the result: each block of a transposed matrix passes over all of the file
LONG_ENOUGH = 32  # elements in a run that are worth a loop in C, even where another axis is longer

Format = Literal["B", "H", "I", "Q"]
FORMATS: dict[int, Format] = {1: "B", 2: "H", 4: "I", 8: "Q"}
Sizes = tuple[int, ...]


def gathered(tensor: TensorRef, chunk: int) -> Iterator[memoryview]:
    """Yield the row-major values of a strided view as they are stored."""
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
    """Cut an array into row-major blocks."""
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
    """Return a compact copy of a tile."""
    # Rows that lie a power of 2 apart evict each other from the cache. Runs get an odd length, so that those
    # read in turn fall into different cache lines; the order of axes stays, so that whole runs are copied.
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
        first = begin - begin % size
        elements = memoryview(where.part(first, end + -end % size - first).read())
        yield elements[begin - first :][: end - begin]
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
