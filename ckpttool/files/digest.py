"""One SHA-256 for the contents of a state: names, types, shapes and values, whatever the format.

docs/digest.md defines it, so that anyone can recompute it. Values are hashed in pieces, on several cores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..tensors.ref import ByteRange, TensorRef
from ..tensors.values import MAX_REPEATED, require_bounded, stream
from .copying import Progress
from .threads import cores, cut, map_pieces

VERSION = b"ckpttool digest 1\n"
PIECE = 16 << 20  # bytes of values hashed as one piece
READ = 1 << 20  # bytes read at a time: few enough to be hashed from the processor's cache
WORKERS = 8


def digest(tensors: Mapping[str, TensorRef], progress: Progress | None = None) -> str:
    """Return the digest of tensors by name, as 64 hexadecimal digits."""
    contents = hashlib.sha256(VERSION)
    for name, value in tensor_digests(tensors, progress):
        tensor, raw = tensors[name], name.encode("utf-8", "surrogatepass")
        shape = ",".join(map(str, tensor.shape))
        contents.update(
            b"%d:%s %s [%s] %s\n" % (len(raw), raw, tensor.dtype.name.encode(), shape.encode(), value)
        )
    return contents.hexdigest()


def tensor_digests(
    tensors: Mapping[str, TensorRef], progress: Progress | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield each name and the digest of its tensor's values, as hexadecimal digits, in the order of names."""
    names = sorted(tensors, key=lambda name: name.encode("utf-8", "surrogatepass"))
    pieces = hashlib.sha256()
    for piece, value in map_pieces(_hash, _pieces({name: tensors[name] for name in names}), cores(WORKERS)):
        pieces.update(value)
        if progress and piece.nbytes:
            progress(piece.nbytes)
        if piece.is_last:
            yield piece.name, pieces.hexdigest().encode()
            pieces = hashlib.sha256()


class _Piece(NamedTuple):
    """A stretch of a tensor's bytes, or the whole of a tensor whose values must be computed."""

    name: str
    data: ByteRange | TensorRef
    nbytes: int
    is_last: bool


def _pieces(tensors: Mapping[str, TensorRef]) -> Iterator[_Piece]:
    """Cut tensors that are plain bytes into pieces; other tensors are one piece each."""
    for name, tensor in tensors.items():
        data = tensor.data if tensor.is_plain else None
        if not isinstance(data, ByteRange):
            yield _Piece(name, tensor, tensor.nbytes, True)
            continue
        for start, size in cut(data.nbytes, PIECE) if data.nbytes else [(0, 0)]:
            yield _Piece(name, data.part(start, size), size, start + size == data.nbytes)


def _hash(piece: _Piece) -> tuple[_Piece, bytes]:
    """Return the SHA-256 of a piece; of a whole tensor, those of its pieces one after another."""
    data = piece.data
    if isinstance(data, ByteRange):
        chunks = data.chunks(memoryview(bytearray(min(READ, data.nbytes))))
    else:
        require_bounded(piece.name, data, MAX_REPEATED)
        chunks = stream(data)
    digests, value, left = b"", hashlib.sha256(), PIECE
    for chunk in chunks:
        rest = chunk
        while rest:
            value.update(rest[:left])
            rest, left = rest[left:], left - min(left, len(rest))
            if not left:
                digests, value, left = digests + value.digest(), hashlib.sha256(), PIECE
    return piece, digests if left == PIECE else digests + value.digest()
