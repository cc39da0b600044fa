"""One SHA-256 for the contents of a state: names, types, shapes and values, whatever the format.

docs/digest.md defines it, so that anyone can recompute it. It hashes pieces, so that several cores can.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from ..tensors.ref import ByteRange, TensorRef
from ..tensors.values import MAX_REPEATED, require_bounded, stream
from .copying import Progress
from .threads import cores, in_order

VERSION = b"ckpttool digest 1\n"
PIECE = 16 << 20
"""Bytes of values hashed as one piece."""

READ = 1 << 20
"""Bytes read at a time: few enough to be hashed from the processor's cache."""

MANY = 1000
"""Small tensors hashed as one job at most."""

WORKERS = 8


def digest(tensors: Mapping[str, TensorRef], progress: Progress | None = None) -> str:
    """The digest of tensors by name, as 64 hexadecimal digits.

    Args:
        tensors: name -> tensor, in any order and layout.
        progress: called with the number of bytes after each piece.

    Raises:
        Damaged: a file ends early.
        Refused: an expanded tensor that is more than 64 GiB larger than what the file holds of it.
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

    Pieces are hashed on several cores, some tensors ahead of the one that is waited for.
    """
    names = sorted(tensors, key=lambda name: name.encode("utf-8", "surrogatepass"))
    pieces = hashlib.sha256()
    for done in in_order(_jobs({name: tensors[name] for name in names}), cores(WORKERS)):
        for name, digests, nbytes, is_last in done:
            pieces.update(digests)
            if progress and nbytes:
                progress(nbytes)
            if is_last:
                yield name, pieces.hexdigest().encode()
                pieces = hashlib.sha256()


class _Piece(NamedTuple):
    """What was hashed of a tensor: the digests of some of its pieces, one after another."""

    name: str
    digests: bytes
    nbytes: int
    is_last: bool


def _jobs(tensors: Mapping[str, TensorRef]) -> Iterator[Callable[[], list[_Piece]]]:
    """The pieces of large tensors each for itself; small ones together, for a thread costs time too."""
    small: list[tuple[str, ByteRange]] = []
    held = 0
    for name, tensor in tensors.items():
        data = tensor.data if tensor.is_plain else None
        fits = isinstance(data, ByteRange) and data.nbytes <= PIECE
        if small and (not fits or held >= READ or len(small) == MANY):
            yield partial(_hash_all, small)
            small, held = [], 0
        if isinstance(data, ByteRange) and fits:
            small.append((name, data))
            held += data.nbytes
        elif isinstance(data, ByteRange):
            for start in range(0, data.nbytes, PIECE):
                part = data.part(start, min(PIECE, data.nbytes - start))
                yield partial(_hash_part, name, part, start + PIECE >= data.nbytes)
        else:  # computed bytes are made in this thread: making them holds the GIL
            yield partial(list, [_hash_stream(name, tensor)])
    if small:
        yield partial(_hash_all, small)


def _hash_all(small: list[tuple[str, ByteRange]]) -> list[_Piece]:
    return [piece for name, data in small for piece in _hash_part(name, data, is_last=True)]


def _hash_part(name: str, data: ByteRange, is_last: bool) -> list[_Piece]:
    value = hashlib.sha256()
    for chunk in data.chunks(memoryview(bytearray(min(READ, data.nbytes)))):
        value.update(chunk)
    return [_Piece(name, value.digest() if data.nbytes else b"", data.nbytes, is_last)]


def _hash_stream(name: str, tensor: TensorRef) -> _Piece:
    """All pieces of a stream, cut where they end."""
    digests, value, room = b"", hashlib.sha256(), PIECE
    require_bounded(name, tensor, MAX_REPEATED)
    for chunk in stream(tensor):
        rest = chunk
        while rest:
            value.update(rest[:room])
            rest, room = rest[room:], room - min(room, len(rest))
            if not room:
                digests, value, room = digests + value.digest(), hashlib.sha256(), PIECE
    if room < PIECE:
        digests += value.digest()
    return _Piece(name, digests, tensor.nbytes, True)
