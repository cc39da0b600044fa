"""One SHA-256 for the contents of a state: names, types, shapes and values, whatever the format.

docs/digest.md defines it, so that anyone can recompute it. Values are hashed in pieces, on several cores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from ..tensors.ref import TensorRef
from ..tensors.values import MAX_REPEATED, require_bounded
from .copying import Progress, map_bytes

VERSION = b"ckpttool digest 1\n"
PIECE = 16 << 20  # bytes of values hashed as one piece


def digest(tensors: Mapping[str, TensorRef], progress: Progress | None = None) -> str:
    """Return the digest of tensors by name, as 64 hexadecimal digits."""
    contents = hashlib.sha256(VERSION)
    for name, value in tensor_digests(tensors, progress):
        tensor, raw = tensors[name], name.encode("utf-8", "surrogatepass")
        kind = f" {tensor.dtype.name} [{','.join(map(str, tensor.shape))}] ".encode()
        contents.update(b"%d:%s%s%s\n" % (len(raw), raw, kind, value))
    return contents.hexdigest()


def tensor_digests(
    tensors: Mapping[str, TensorRef], progress: Progress | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield each name and the digest of its tensor's values, as hexadecimal digits, in the order of names."""
    names = sorted(tensors, key=lambda name: name.encode("utf-8", "surrogatepass"))
    keys = {name: tensors[name].contents for name in names}
    unread = [name for name in names if keys[name] not in _known]

    def work(number: int, chunks: Iterator[memoryview]) -> bytes:
        tensor = tensors[unread[number]]
        if not tensor.is_plain:
            require_bounded(unread[number], tensor, MAX_REPEATED)
        return _hash(chunks)

    made = map_bytes(work, [tensors[name] for name in unread], PIECE, progress)
    for name in names:
        key = keys[name]
        if (value := _known.get(key)) is None:
            pieces = hashlib.sha256()
            for piece, part in made:
                pieces.update(part)
                if piece.is_last:
                    break
            value = pieces.hexdigest().encode()
            if key is not None and len(_known) < MOST_KNOWN:
                _known[key] = value
        yield name, value


# Digests of tensors in files whose hash a server tells: another revision may hold the same file.
_known: dict[tuple[object, ...] | None, bytes] = {}
MOST_KNOWN = 100_000


def _hash(chunks: Iterator[memoryview]) -> bytes:
    """Return the SHA-256 of a piece; of a whole tensor, those of its pieces one after another."""
    digests, value, left = b"", hashlib.sha256(), PIECE
    for chunk in chunks:
        rest = chunk
        while rest:
            value.update(rest[:left])
            rest, left = rest[left:], left - min(left, len(rest))
            if not left:
                digests, value, left = digests + value.digest(), hashlib.sha256(), PIECE
    return digests if left == PIECE else digests + value.digest()
