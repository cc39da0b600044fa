"""The true values of a tensor as bytes: row-major, little-endian, lazy bits resolved, without torch.

Most tensors are one byte range and are copied as they are (`TensorRef.is_plain`). This is for the others:
transposed and expanded views, channels-last layouts, conjugate and negative views, big-endian files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..errors import Refused
from .ref import Computed, TensorRef
from .strided import gathered

CHUNK = 1 << 20
"""Bytes of a piece of values."""

MAX_EXPANSION = 1 << 30
"""Bytes by which a tensor may outgrow its storage when written out (stride 0 repeats elements for free)."""

MAX_REPEATED = 1 << 36
"""Bytes by which a tensor that is only read may outgrow its storage: more may never finish."""

FLIP_SIGN = bytes(i ^ 0x80 for i in range(256))


def require_bounded(
    name: str, tensor: TensorRef, most: int = MAX_EXPANSION, *, hint: str | None = None
) -> None:
    """Refuse a view whose values outgrow its storage.

    Args:
        name: the tensor's, for the message.
        tensor: any layout.
        most: bytes by which the values may outgrow the storage.
        hint: of the error.

    Raises:
        Refused: they outgrow it by more.
    """
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
    """Yield the values of one tensor.

    Args:
        tensor: any layout, however often it repeats its elements: see `require_bounded`.
        buffer: memory to read contiguous values into, in chunks of its size; new when None.

    Yields:
        Row-major, little-endian values, 1 MiB at a time at most, each chunk valid until the next.

    Raises:
        Damaged: the file ends early.
    """
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
    """Yield the values in pieces of one size, so that tensors of several files can be read in step.

    Args:
        tensor: as for `stream`.
        nbytes: of a piece; whole elements. The last piece has what is left.

    Raises:
        Damaged: the file ends early.
    """
    if tensor.is_plain:
        for start in range(0, tensor.nbytes, nbytes):
            yield tensor.data.part(start, min(nbytes, tensor.nbytes - start)).read()
        return
    held = bytearray()
    for chunk in stream(tensor):
        held += chunk
        whole = len(held) - len(held) % nbytes
        for begin in range(0, whole, nbytes):
            yield held[begin : begin + nbytes]
        del held[:whole]
    if held:
        yield held


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
