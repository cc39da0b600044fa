"""One SHA-256 for the contents of a state: names, types, shapes and values, whatever the format.

docs/digest.md defines it, so that anyone can recompute it. Values are hashed in pieces, on several cores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..tensors.ref import TensorRef
from ..tensors.values import MAX_REPEATED, require_bounded
from .copying import Progress, map_bytes

VERSION = b"ckpttool digest 1\n"
PIECE = 16 << 20  # bytes of values hashed as one piece


Known = dict[object, bytes]  # digests of values, by what tells them: `TensorRef.contents`


def digest(
    tensors: Mapping[str, TensorRef], progress: Progress | None = None, known: Known | None = None
) -> str:
    """Return the digest of tensors by name, as 64 hexadecimal digits; `known` as for `tensor_digests`."""
    return _digest((name, tensors[name], value) for name, value in tensor_digests(tensors, progress, known))


def digests(groups: Sequence[Mapping[str, TensorRef]], progress: Progress | None = None) -> list[str]:
    """Return the digest of each of several groups; what several have, under any names, is read once."""
    once = {tensor.view: tensor for group in groups for tensor in group.values()}
    numbered = {view: str(number) for number, view in enumerate(once)}
    values = dict(tensor_digests({numbered[view]: tensor for view, tensor in once.items()}, progress))
    return [
        _digest((name, group[name], values[numbered[group[name].view]]) for name in sorted(group, key=_utf8))
        for group in groups
    ]


def _digest(lines: Iterable[tuple[str, TensorRef, bytes]]) -> str:
    contents = hashlib.sha256(VERSION)
    for name, tensor, value in lines:
        raw = _utf8(name)
        kind = f" {tensor.dtype.name} [{','.join(map(str, tensor.shape))}] ".encode()
        contents.update(b"%d:%s%s%s\n" % (len(raw), raw, kind, value))
    return contents.hexdigest()


def _utf8(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def tensor_digests(
    tensors: Mapping[str, TensorRef], progress: Progress | None = None, known: Known | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield each name and the digest of its tensor's values, as hexadecimal digits, in the order of names.

    `known` holds digests of tensors in files whose hash a server tells, which are not read again, and gets
    those of others.
    """
    names = sorted(tensors, key=_utf8)
    known = {} if known is None else known
    told = {name: tensors[name].contents or name for name in names}
    unread = {key: name for name, key in reversed(told.items()) if key not in known}  # the first of each
    order = [name for name in names if unread.get(told[name]) == name]

    def work(number: int, chunks: Iterator[memoryview]) -> bytes:
        tensor = tensors[order[number]]
        if not tensor.is_plain:
            require_bounded(order[number], tensor, MAX_REPEATED)
        return _hash(chunks)

    made = map_bytes(work, [tensors[name] for name in order], PIECE, progress)
    for name in names:
        if (value := known.get(key := told[name])) is None:
            pieces = hashlib.sha256()
            for piece, part in made:
                pieces.update(part)
                if piece.is_last:
                    break
            value = pieces.hexdigest().encode()
            if key is not name:
                known[key] = value
        yield name, value


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
