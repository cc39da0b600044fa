"""Chains of JSON lines, and the SHA-256 of a state's contents."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

from ...errors import Damaged, Unreadable
from ..lazy import hashlib
from ..tensors.ref import DType, TensorRef
from ..tensors.values import MAX_REPEATED, require_bounded
from .commit import append_line, reason
from .findings import Findings, Told, shared
from .threads import BytesPiece, Progress, cut, map_bytes

# ---- Chains: files of JSON objects, one per line, each with the SHA-256 of the line before it
#
# A changed, removed or inserted line breaks the chain there, unless all later lines are rewritten. The hash
# of the last line stands for the whole file; kept elsewhere, it reveals even that.


NAME = "run.jsonl"  # in the folder of a training run
FIRST = "0" * 64  # in the first line, in place of the hash of a line before it


@dataclass(frozen=True)
class Link:
    """One line of a chain."""

    number: int  # of the line, from 1
    entry: Mapping[str, Any]
    hash: str  # of the line's bytes


@dataclass(frozen=True)
class Break:
    """A place where the chain does not hold."""

    number: int
    message: str


def append(path: str, before: Link | None, entry: Mapping[str, Any], *, durably: bool = False) -> Link:
    """Append a line after `before`; raise ValueError for a NaN. After an OSError nothing of it is there."""
    number = before.number + 1 if before else 1
    entry = {"n": number, "prev": before.hash if before else FIRST, **entry}
    line = json.dumps(entry, allow_nan=False).encode()
    append_line(path, line, durably=durably)
    return Link(number, entry, hashlib.sha256(line).hexdigest())


def read(path: str) -> tuple[list[Link], list[Break]]:
    """Return the lines of a chain, and where it is broken. A last line that was cut off is left out."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a named pipe would wait, and a device never end
            raise Unreadable(path, "is not a regular file")
        with open(path, "rb") as file:
            raw_lines = file.read().split(b"\n")
    except FileNotFoundError as error:
        hint = "a run has a record if it is trained with --prove-every K"
        raise Unreadable(path, "no such file: there is no record of a run", hint=hint) from error
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    links, breaks, expected, shift = list[Link](), list[Break](), FIRST, 0
    for number, line in enumerate(raw_lines[:-1], start=1):  # nothing after the last line break is finished
        entry, before, expected = None, expected, hashlib.sha256(line).hexdigest()
        with suppress(ValueError, RecursionError):
            entry = json.loads(line)
        if not isinstance(entry, dict) or not isinstance(entry.get("n"), int):
            breaks.append(Break(number, "is no entry of a chain"))
            continue
        if entry.get("prev") != before or entry["n"] != number + shift:
            breaks.append(_break(number, entry["n"] - number - shift))
            shift = entry["n"] - number
        links.append(Link(number, entry, expected))
    if not links:
        raise Damaged(path, "holds no entries of a chain")
    return links, breaks


def _break(number: int, jump: int) -> Break:
    if jump > 0:
        return Break(number, f"{jump} line{'s' * (jump > 1)} before it {'are' if jump > 1 else 'is'} missing")
    if jump < 0:
        return Break(number, "was inserted or moved: its number is not that of its place")
    return Break(max(1, number - 1), "was changed: the next line holds another hash of it")


def cut_off(path: str) -> None:
    """Remove what a crash left after the last line break."""
    with open(path, "rb+") as file:
        text = file.read()
        if not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)


# ---- One SHA-256 for the contents of a state: names, types, shapes and values, whatever the format
#
# docs/digest.md defines it, so that anyone can recompute it. Values are hashed in pieces, on several cores.


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

    `known` holds digests of tensors in files whose hash a server tells: they are not read again. It gets the
    digests of others.
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

    def of(findings: Findings, piece: BytesPiece) -> Told:
        return findings.piece(piece.data, order[piece.number])

    sharing = shared("digest", of, b"", bytes.hex, bytes.fromhex)
    made = map_bytes(work, [tensors[name] for name in order], PIECE, progress, sharing)
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
    """The digest of a tensor whose pieces pass by in any order, the bytes of each in order, in one thread.

    Bytes that come otherwise are left out, and have to come again.
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
        return (place for place in cut(self._nbytes, PIECE) if place[0] // PIECE not in self._digests)

    def done(self) -> dict[int, str]:
        """Return the digests of the pieces that have passed by as a whole."""
        return {number: value.hex() for number, value in [*self._digests.items()]}

    def take(self, done: Mapping[str, str]) -> None:
        """Take the digests of pieces that passed by elsewhere."""
        self._digests.update({int(number): bytes.fromhex(value) for number, value in done.items()})

    def digest(self) -> str:
        """Return the digest, once nothing is missing."""
        return hashlib.sha256(b"".join(value for _, value in sorted(self._digests.items()))).hexdigest()
