"""The true values of a tensor as bytes: row-major, little-endian, lazy bits resolved, without torch.

Most tensors are one byte range and are copied unseen (`TensorRef.is_plain`). This is for the others:
transposed and expanded views, channels-last layouts, conjugate and negative views, big-endian files. The
copying is done by strided slices of memoryviews, so the inner loop runs in C.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from .errors import Refused
from .tensor import Computed, TensorRef

CHUNK = 4 << 20
MAX_EXPANSION = 1 << 30
"""Bytes by which a tensor may outgrow its storage when written out (stride 0 repeats elements for free)."""

Format = Literal["B", "H", "I", "Q"]
FORMATS: dict[int, Format] = {1: "B", 2: "H", 4: "I", 8: "Q"}
FLIP_SIGN = bytes(i ^ 0x80 for i in range(256))


def stream(name: str, tensor: TensorRef) -> Iterator[memoryview]:
    """The values of one tensor, in chunks of at most some 4 MiB.

    Args:
        name: for the message.
        tensor: any layout.

    Raises:
        Refused: an expanded tensor that would be more than 1 GiB larger than what the file holds.
        Damaged: the file ends early.
    """
    if tensor.nbytes > tensor.storage.nbytes + MAX_EXPANSION:
        raise Refused(
            tensor.storage.data.path,
            f"'{name}' repeats {tensor.storage.nbytes} bytes into {tensor.nbytes} by a stride of 0",
            hint="keep it a view by writing a .pt file",
        )
    where = tensor.storage.data
    if tensor.is_contiguous:
        pieces: Iterator[memoryview] = tensor.data.chunks(memoryview(bytearray(min(CHUNK, tensor.nbytes))))
    elif isinstance(where, Computed) and where.view is not None:
        yield from where.view(tensor)
        return
    else:
        pieces = _gather(tensor)
    for piece in pieces:
        yield _resolve(tensor, piece)


def _gather(tensor: TensorRef) -> Iterator[memoryview]:
    """Row-major values of a strided view, from a mapping of the file, a chunk at a time."""
    width, shape, stride = tensor.dtype.itemsize, tensor.shape, tensor.stride
    if width == 16:  # no memoryview format is that wide: such elements go as pairs of 8 bytes
        width, shape, stride = 8, (*shape, 2), (*(2 * s for s in stride), 1)
    with _looked_at(tensor) as view, view.cast(FORMATS[width]) as elements:
        for start, block in blocks(shape, stride, CHUNK // width):
            yield _copy_block(elements, start, block, stride[len(stride) - len(block) :], width)


@contextmanager
def _looked_at(tensor: TensorRef) -> Iterator[memoryview]:
    """The stretch of the storage that a view looks at: a mapping of the file, or the bytes once made."""
    begin, end = tensor.span
    where = tensor.storage.data.part(begin, end - begin)
    if isinstance(where, Computed):
        yield memoryview(where.read())
        return
    skip = where.offset % mmap.ALLOCATIONGRANULARITY
    with (
        mmap.mmap(
            where.source.fd, skip + where.nbytes, access=mmap.ACCESS_READ, offset=where.offset - skip
        ) as mapped,
        memoryview(mapped) as whole,
        whole[skip:] as view,
    ):
        yield view


def blocks(shape: Sequence[int], stride: Sequence[int], most: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Cuts an array into row-major blocks of at most `most` elements: (first element, shape)."""
    cut = len(shape) - 1  # the dimension that is cut into runs of rows; those after it stay whole
    while cut > 0 and math.prod(shape[cut:]) <= most:
        cut -= 1
    rows = max(1, most // math.prod(shape[cut + 1 :]))
    for index in itertools.product(*map(range, shape[:cut])):
        base = sum(i * s for i, s in zip(index, stride, strict=False))
        for row in range(0, shape[cut], rows):
            block = (min(rows, shape[cut] - row), *shape[cut + 1 :])
            yield base + row * stride[cut], block


def _copy_block(
    elements: memoryview, start: int, shape: tuple[int, ...], stride: Sequence[int], width: int
) -> memoryview:
    out = memoryview(bytearray(math.prod(shape) * width)).cast(FORMATS[width])
    out_stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    inner = max(range(len(shape)), key=shape.__getitem__)  # the longest loop is the one that runs in C
    count, step, out_step = shape[inner], stride[inner], out_stride[inner]
    outer = [i for i in range(len(shape)) if i != inner]
    for index in itertools.product(*(range(shape[i]) for i in outer)):
        first = start + sum(i * stride[d] for i, d in zip(index, outer, strict=True))
        target = sum(i * out_stride[d] for i, d in zip(index, outer, strict=True))
        if step:
            run = elements[first : first + (count - 1) * step + 1 : step]
        else:
            run = memoryview(bytes(elements[first : first + 1]) * count).cast(FORMATS[width])
        out[target : target + (count - 1) * out_step + 1 : out_step] = run
    return out.cast("B")


def _resolve(tensor: TensorRef, piece: memoryview) -> memoryview:
    """Byte order first, then the sign bits that the lazy conjugate and negative stand for."""
    part = tensor.dtype.part
    if not (tensor.is_swapped or tensor.neg or tensor.conj):
        return piece
    data = bytearray(piece)
    if tensor.is_swapped:
        for i in range(part // 2):
            data[i::part], data[part - 1 - i :: part] = data[part - 1 - i :: part], data[i::part]
    if tensor.neg:
        data[part - 1 :: part] = data[part - 1 :: part].translate(FLIP_SIGN)
    if tensor.conj:
        top = 2 * part - 1
        data[top :: 2 * part] = data[top :: 2 * part].translate(FLIP_SIGN)
    return memoryview(data)
