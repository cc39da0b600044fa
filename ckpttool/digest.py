"""One SHA-256 for the contents of a state: names, types, shapes and values, whatever the format.

The definition stands in docs/digest.md, so that anybody can compute it again. It hashes pieces, so that
several cores can.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from .elements import stream
from .tensor import ByteRange, TensorRef
from .transfer import Progress

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

VERSION = b"ckpttool digest 1\n"
PIECE = 16 << 20
"""Bytes of values hashed as one piece."""

READ = 1 << 20
"""Bytes read at a time: few enough to be hashed from the processor's cache."""


def digest(tensors: Mapping[str, TensorRef], progress: Progress | None = None) -> str:
    """The digest of tensors by name, as 64 hexadecimal digits.

    Args:
        tensors: name -> tensor, in any order and layout.
        progress: called with the number of bytes after each tensor.

    Raises:
        Damaged: a file ends early.
    """
    whole = hashlib.sha256(VERSION)
    for name, value in tensor_digests(tensors, progress):
        tensor, raw = tensors[name], name.encode("utf-8", "surrogatepass")
        shape = ",".join(map(str, tensor.shape))
        whole.update(
            b"%d:%s %s [%s] %s\n" % (len(raw), raw, tensor.dtype.name.encode(), shape.encode(), value)
        )
    return whole.hexdigest()


def tensor_digests(
    tensors: Mapping[str, TensorRef], progress: Progress | None = None
) -> Iterator[tuple[str, bytes]]:
    """The digest of each tensor's values, as hexadecimal digits, in the order of names.

    Pieces are hashed on all cores, some tensors ahead of the one that is waited for.
    """
    from concurrent.futures import ThreadPoolExecutor  # 10 ms that no other command should pay

    ahead: deque[tuple[str, list[Future[bytes]]]] = deque()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name in sorted(tensors, key=lambda name: name.encode("utf-8", "surrogatepass")):
            ahead.append((name, list(_pieces(pool, name, tensors[name]))))
            while sum(len(pieces) for _, pieces in ahead) > 16:
                yield _finished(*ahead.popleft(), tensors, progress)
        while ahead:
            yield _finished(*ahead.popleft(), tensors, progress)


def _finished(
    name: str, pieces: list[Future[bytes]], tensors: Mapping[str, TensorRef], progress: Progress | None
) -> tuple[str, bytes]:
    value = hashlib.sha256(b"".join(piece.result() for piece in pieces)).hexdigest().encode()
    if progress:
        progress(tensors[name].nbytes)
    return name, value


def _pieces(pool: ThreadPoolExecutor, name: str, tensor: TensorRef) -> Iterator[Future[bytes]]:
    """The hash of each piece of a tensor's values, under way."""
    data = tensor.data if tensor.is_plain else None
    if isinstance(data, ByteRange):
        for start in range(0, data.nbytes, PIECE):
            yield pool.submit(_hash, data.part(start, min(PIECE, data.nbytes - start)))
    else:
        yield from _computed_pieces(name, tensor)


def _hash(data: ByteRange) -> bytes:
    value = hashlib.sha256()
    for chunk in data.chunks(memoryview(bytearray(min(READ, data.nbytes)))):
        value.update(chunk)
    return value.digest()


def _computed_pieces(name: str, tensor: TensorRef) -> Iterator[Future[bytes]]:
    """The same of values that must be made: one stream, cut where the pieces end."""
    value, room = hashlib.sha256(), PIECE
    for chunk in stream(name, tensor):
        rest = chunk
        while rest:
            value.update(rest[:room])
            rest, room = rest[room:], room - min(room, len(rest))
            if not room:
                yield _done(value.digest())
                value, room = hashlib.sha256(), PIECE
    if room < PIECE:
        yield _done(value.digest())


def _done(value: bytes) -> Future[bytes]:
    from concurrent.futures import Future

    future: Future[bytes] = Future()
    future.set_result(value)
    return future
