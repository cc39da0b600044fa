"""The true values of a tensor as bytes: row-major, little-endian, lazy bits resolved, without torch.

Most tensors are one byte range and are copied as they are (`TensorRef.is_plain`). This is for the others:
transposed and expanded views, channels-last layouts, conjugate and negative views, big-endian files.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from .. import system
from ..errors import Damaged, Refused
from ..lazy import NDArray, np
from .ref import Computed, TensorRef

Sizes = tuple[int, ...]

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
        reason = f"'{name}' is a view that expands {tensor.storage.nbytes} bytes to {tensor.nbytes}"
        raise Refused(tensor.storage.data.path, reason, hint=hint)


def without_repeats(tensor: TensorRef) -> tuple[TensorRef, int]:
    """Return the tensor without the repeats of strides of 0, and how often each of its elements was there."""
    if 0 not in tensor.stride:
        return tensor, 1
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
    yield from map(partial(_resolve, tensor), pieces)


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


def same_values(one: TensorRef, other: TensorRef) -> bool:
    """Return whether two tensors have the same type, shape and bytes. Reads them, unless they are tied."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(in_pieces(one, CHUNK), in_pieces(other, CHUNK), strict=True)
    return one.view == other.view or all(a == b for a, b in pairs)


def read_into(out: memoryview, tensor: TensorRef) -> None:
    """Fill a buffer with the values of a tensor."""
    done = 0
    for piece in stream(tensor, buffer=out):
        if not tensor.is_plain:
            out[done : done + len(piece)] = piece
        done += len(piece)


def stretches(tensor: TensorRef, first: int, count: int) -> Iterator[TensorRef]:
    """Yield views of `count` elements from number `first`, in row-major order, of whole rows if possible."""
    for begin, size in boxes_of(tensor.shape, first, count) if count else ():
        yield boxed(tensor, begin, size)


def in_row_major(tensor: TensorRef) -> TensorRef:
    """Return a tensor of the same values in row-major order, little-endian, put there when they are read."""
    width = tensor.dtype.itemsize

    def make(start: int, nbytes: int) -> Iterator[memoryview]:
        for part in stretches(tensor, start // width, nbytes // width):
            yield from stream(part)

    return made_from(tensor, make)


def made_from(tensor: TensorRef, make: Callable[[int, int], Iterator[memoryview]]) -> TensorRef:
    """Return a tensor of this type and shape in row-major order, any stretch of which can be made."""
    dtype, old = tensor.dtype, tensor.storage
    data = Computed(old.data.path, tensor.nbytes, make, is_divisible=True)
    return TensorRef.of_bytes(data, dtype, tensor.shape, old, location=old.location)


def boxed(tensor: TensorRef, begin: Iterable[int], shape: Sizes) -> TensorRef:
    """Return the view of a box within a tensor."""
    steps = sum(i * step for i, step in zip(begin, tensor.stride, strict=True))
    return replace(tensor, shape=shape, offset=tensor.offset + steps)


def boxes_of(shape: Sizes, first: int, count: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Cut a row-major stretch of an array into boxes: where each begins, and its shape."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    i, skipped = divmod(first, row)
    if skipped:
        head = min(row - skipped, count)
        yield from (((i, *begin), (1, *size)) for begin, size in boxes_of(shape[1:], skipped, head))
        i, count = i + 1, count - head
    rows, left = divmod(count, row)
    if rows:
        yield (i, *(0 for _ in shape[1:])), (rows, *shape[1:])
    if left:
        yield from (((i + rows, *begin), (1, *size)) for begin, size in boxes_of(shape[1:], 0, left))


def _resolve(tensor: TensorRef, piece: memoryview) -> memoryview:
    """Apply the byte order first, then the signs of the lazy conjugate and negative."""
    part = tensor.dtype.part
    if not (tensor.is_swapped or tensor.neg or tensor.conj):
        return piece
    data = bytearray(piece)
    if tensor.is_swapped:
        swap(data, part)
    for is_set, step in ((tensor.neg, part), (tensor.conj, 2 * part)):
        if is_set:
            data[step - 1 :: step] = data[step - 1 :: step].translate(FLIP_SIGN)
    return memoryview(data)


def swap(data: bytearray, part: int) -> None:
    """Reverse the bytes of each element part of `part` bytes, in place."""
    for i in range(part // 2):
        data[i::part], data[part - 1 - i :: part] = data[part - 1 - i :: part], data[i::part]


# A row of a transposed matrix lies scattered over the whole file, and every mapped page counts as memory, so
# a block of the result is gathered tile by tile, each of which needs one window of the file.

WINDOW = 4  # chunks of the file that are mapped together
BLOCK = 6  # chunks of the result: each block of a transposed matrix passes over all of the file

FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def gathered(tensor: TensorRef, chunk: int) -> Iterator[memoryview]:
    """Yield the row-major values of a strided view as they are stored."""
    width, shape, stride = tensor.dtype.itemsize, tensor.shape, tensor.stride
    offset = tensor.offset
    if width == 16:  # numpy has no integers of 16 bytes: such elements go as pairs of 8
        width, shape, stride, offset = 8, (*shape, 2), (*(2 * s for s in stride), 1), 2 * offset
    shape, stride = _coalesced(shape, stride)
    most = BLOCK * chunk // width
    buffer = np.empty(min(most, math.prod(shape)), f"u{width}")
    for start, size in blocks(shape, stride, most):
        elements = buffer[: math.prod(size)]
        steps = stride[len(stride) - len(size) :]
        _fill(elements.reshape(size), tensor, offset + start, steps, WINDOW * chunk // width)
        raw = memoryview(elements.view("u1"))  # type: ignore[arg-type]
        for begin in range(0, len(raw), chunk):
            yield raw[begin : begin + chunk]


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
            yield base + row * stride[cut], (min(rows, shape[cut] - row), *shape[cut + 1 :])


def _fill(block: NDArray[Any], tensor: TensorRef, start: int, stride: Sizes, most: int) -> None:
    """Fill a block of the result with the elements from number `start` on, `most` of the file at a time."""
    width = block.itemsize
    reach = [(n - 1) * s for n, s in zip(block.shape, stride, strict=True)]
    if sum(reach) < most:
        raw = _window(tensor, start * width, (start + sum(reach) + 1) * width)
        steps = [step * width for step in stride]
        block[...] = np.lib.stride_tricks.as_strided(np.frombuffer(raw, block.dtype), block.shape, steps)
        return
    axis = max(range(len(reach)), key=reach.__getitem__)
    rows = max(1, (most - sum(reach) + reach[axis]) // stride[axis])
    turned = block.swapaxes(0, axis)
    for row in range(0, len(turned), rows):
        _fill(turned[row : row + rows].swapaxes(0, axis), tensor, start + row * stride[axis], stride, most)


def _window(tensor: TensorRef, begin: int, end: int) -> memoryview:
    """Return the bytes of a tensor's storage from `begin` to `end`: mapped from the file, or computed."""
    where, size = tensor.storage.data, tensor.dtype.itemsize
    if isinstance(where, Computed):  # only whole elements can be made
        first = begin - begin % size
        elements = memoryview(where.part(first, end + -end % size - first).read())
        return elements[begin - first :][: end - begin]
    if not (where.source.is_local and system.REPLACES_MAPPED):
        return memoryview(where.part(begin, end - begin).read())
    skip = (where.offset + begin) % mmap.ALLOCATIONGRANULARITY
    length, offset = skip + end - begin, where.offset + begin - skip
    try:
        mapped = mmap.mmap(where.source.fd, length, access=mmap.ACCESS_READ, offset=offset)
    except ValueError:
        raise Damaged(where.path, "the file became shorter while it was read") from None
    return memoryview(mapped)[skip:]  # the mapping ends with its last user
