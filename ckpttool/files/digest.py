"""One SHA-256 for the contents of a state: names, types, shapes and values, whatever the format.

docs/digest.md defines it, so that anyone can recompute it. Values are hashed in pieces, on several cores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from threading import get_ident
from typing import Any, Protocol

from ..tensors.dtypes import DType
from ..tensors.ref import TensorRef
from ..tensors.values import MAX_REPEATED, require_bounded
from .pieces import Progress, map_bytes
from .threads import cut

VERSION = b"ckpttool digest 1\n"
PIECE = 16 << 20  # bytes of values hashed as one piece


Known = dict[object, bytes]  # digests of values, by what tells them: `TensorRef.contents`


def digest(
    tensors: Mapping[str, TensorRef], progress: Progress | None = None, known: Known | None = None
) -> str:
    """Return the digest of tensors by name, as 64 hexadecimal digits; `known` as for `tensor_digests`."""
    return _digest((name, tensors[name], value) for name, value in tensor_digests(tensors, progress, known))


def sha256_of_file(path: str) -> str:
    """Return the SHA-256 of a file's bytes, as 64 hexadecimal digits. OSError as reading raises it."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            sha256.update(piece)
    return sha256.hexdigest()


class Form(Protocol):
    """What a digest covers of a tensor beside its values."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def digest_of(tensors: Mapping[str, Form], values: Mapping[str, str]) -> str:
    """Return the digest of tensors of which those of the values are known, by name."""
    return _digest((name, tensors[name], values[name].encode()) for name in sorted(tensors, key=_utf8))


def _digest(lines: Iterable[tuple[str, Form, bytes]]) -> str:
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


class Pieces:
    """The digest of a tensor whose bytes pass by in any order, but those of a piece in one thread, in theirs.

    What comes otherwise is left out, and has to come again.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._digests: dict[int, bytes] = {}
        self._begun: dict[tuple[int, int], tuple[int, Any]] = {}  # piece, thread -> bytes so far, their hash

    def see(self, offset: int, data: memoryview | bytes) -> None:
        """Hash bytes from an offset. Several threads may call this at once."""
        data = memoryview(data)
        while len(data):
            number, skipped = divmod(offset, PIECE)
            part, data = data[: PIECE - skipped], data[PIECE - skipped :]
            offset += len(part)
            if number not in self._digests:
                self._add(number, skipped, part)

    def _add(self, number: int, skipped: int, part: memoryview | bytes) -> None:
        key = number, get_ident()
        done, value = self._begun.pop(key, (0, None)) if skipped else (0, hashlib.sha256())
        if value is None or done != skipped:
            return
        value.update(part)
        if number * PIECE + done + len(part) == min((number + 1) * PIECE, self._nbytes):
            self._digests[number] = value.digest()
        else:
            self._begun[key] = done + len(part), value

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the size of each piece that has not passed by as a whole."""
        for start, size in cut(self._nbytes, PIECE):
            if start // PIECE not in self._digests:
                yield start, size

    def digest(self) -> str:
        """Return the digest, once nothing is missing."""
        return hashlib.sha256(b"".join(value for _, value in sorted(self._digests.items()))).hexdigest()
