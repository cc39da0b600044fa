"""The true values of a tensor as bytes: row-major, little-endian, lazy bits resolved, without torch.

Most tensors are one byte range and are copied unseen (`TensorRef.is_plain`). This is for the others:
transposed and expanded views, channels-last layouts, conjugate and negative views, big-endian files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..errors import Refused
from .ref import Computed, TensorRef
from .strided import gathered

CHUNK = 1 << 20
"""Bytes handed out at a time."""

MAX_EXPANSION = 1 << 30
"""Bytes by which a tensor may outgrow its storage when written out (stride 0 repeats elements for free)."""

MAX_REPEATED = 1 << 36
"""The same for values that are read and not written: a file may promise more than anyone can wait for."""

FLIP_SIGN = bytes(i ^ 0x80 for i in range(256))


def require_bounded(
    name: str, tensor: TensorRef, most: int = MAX_EXPANSION, *, hint: str | None = None
) -> None:
    """Raises Refused, with this hint, where a view's values outgrow its storage by more than `most` bytes."""
    if tensor.nbytes > tensor.storage.nbytes + most:
        raise Refused(
            tensor.storage.data.path,
            f"'{name}' is a view that expands {tensor.storage.nbytes} bytes to {tensor.nbytes}",
            hint=hint,
        )


def without_repeats(tensor: TensorRef) -> tuple[TensorRef, int]:
    """The tensor with what a stride of 0 repeats there once, and how often each element was there."""
    shape = tuple(n if step else min(n, 1) for n, step in zip(tensor.shape, tensor.stride, strict=True))
    once = replace(tensor, shape=shape)
    return once, tensor.numel // once.numel if once.numel else 1


def stream(tensor: TensorRef, *, buffer: memoryview | None = None) -> Iterator[memoryview]:
    """The values of one tensor, in chunks of at most 1 MiB, each valid until the next.

    Args:
        tensor: any layout, however often it repeats its elements: see `require_bounded`.
        buffer: what to read to, in chunks of its size, where that is all there is to do; new when None.

    Raises:
        Damaged: the file ends early.
    """
    where = tensor.storage.data
    if tensor.is_contiguous:
        room = memoryview(bytearray(min(CHUNK, tensor.nbytes))) if buffer is None else buffer
        pieces: Iterator[memoryview] = tensor.data.chunks(room)
    elif isinstance(where, Computed) and where.view is not None:
        yield from where.view(tensor)
        return
    else:
        pieces = gathered(tensor, CHUNK)
    for piece in pieces:
        yield _resolve(tensor, piece)


def in_pieces(tensor: TensorRef, nbytes: int) -> Iterator[bytes | bytearray]:
    """The values in pieces of so many bytes, the last of what is left, whatever the chunks of `stream` are.

    So that tensors of several files, and of several types, can be looked at in step.

    Args:
        tensor: as for `stream`.
        nbytes: of a piece; whole elements.

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
    """`count` elements from `first` on, in row-major order, as views; whole rows where possible."""
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
    """Byte order first, then the sign bits that the lazy conjugate and negative mean."""
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
    """Turns the bytes of each part of an element the other way round."""
    for i in range(part // 2):
        data[i::part], data[part - 1 - i :: part] = data[part - 1 - i :: part], data[i::part]
