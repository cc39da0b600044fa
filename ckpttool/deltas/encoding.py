"""Each tensor of a newer checkpoint in the smallest form that a delta has for it. Imports numpy.

Blocks of a tensor are compared on several cores, and beside them its pieces are hashed. The packed XORs, and
the places and values that changed, grow in temporary files at the same time; at the end of the tensor one of
the two stays.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.files.commit import Spool
from ..core.files.crc import combined, crc32
from ..core.files.digest import PIECE
from ..core.files.threads import MOST_THREADS, Buffers, Progress, cores, cut, map_pieces
from ..core.lazy import np
from ..core.tensors.ref import ALL_DTYPES, ByteRange, TensorRef
from ..core.tensors.values import require_bounded
from . import differences
from .differences import UNSIGNED, few_places, packable
from .header import BLOCK, NEW, SAME, SPARSE, XOR, DeltaEntry
from .reading import fill_values

INT32 = 1 << 31  # elements that places of four bytes can name
PLACES = {4: "int32", 8: "int64"}

# Bytes of packed XORs after which places and values are given up if they are larger: they seldom catch up.
TRIED = 1 << 14

AHEAD = 12  # results that wait for an earlier one, 1 MiB each: to hash a piece takes as long as some blocks

_of_thread = threading.local()


@dataclass(frozen=True, slots=True)
class DeltaPair:
    """A tensor, and the one of the base that it is compared with, of the same type and size."""

    name: str
    new: TensorRef
    base: TensorRef | None = None
    base_name: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of each."""
        return self.new.nbytes


@dataclass(slots=True)
class Encoded:
    """The tensors of a delta, whose bytes lie in temporary files or in the newer checkpoint."""

    tensors: dict[str, TensorRef] = field(default_factory=dict)
    entries: dict[str, DeltaEntry] = field(default_factory=dict)


@dataclass(slots=True)
class _Task:
    """A pair at work. Blocks that several threads compare may still make what is no longer wanted."""

    pair: DeltaPair
    wants_xor: bool
    wants_sparse: bool
    place: int  # bytes of a place
    changed: int = 0
    crc32: int = 0
    base_crc32: int = 0
    digests: list[bytes] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)


class _Piece(NamedTuple):
    """A block to be compared, or several to be hashed."""

    task: _Task
    start: int
    nbytes: int
    is_last: bool = False
    is_hashed: bool = False


class _Block(NamedTuple):
    """What was found in a block; without a base only its checksum."""

    crc32: int
    base_crc32: int = 0
    changed: int = 0
    frame: bytes = b""
    places: bytes = b""
    values: bytes = b""


class Encoder:
    """Encodes pairs one after another."""

    def __init__(self, path: str, *, ways: frozenset[str]) -> None:
        """Prepare for some of SAME, SPARSE, XOR and NEW; errors about temporary files name `path`."""
        self.ways = ways
        self.made = Encoded()
        self._taken: set[str] = set()
        self._frames, self._places, self._values = (_Growing(path) for _ in range(3))
        self._buffers = Buffers()

    def encode(self, pairs: Mapping[str, DeltaPair], progress: Progress) -> Encoded:
        """Return all of them in their smallest forms, in the given order."""
        self._taken.update(pairs)
        for piece, found in map_pieces(self._work, self._pieces(pairs), cores(MOST_THREADS), AHEAD):
            if isinstance(found, bytes):
                piece.task.digests.append(found)
                continue
            self._take(piece, found)
            progress(piece.nbytes)
            if piece.is_last:
                self._choose(piece.task)
        return self.made

    def _pieces(self, pairs: Mapping[str, DeltaPair]) -> Iterator[_Piece]:
        for pair in pairs.values():
            require_bounded(pair.name, pair.new)
            has_base, width = pair.base is not None, 4 if pair.new.numel <= INT32 else 8
            task = _Task(pair, has_base and XOR in self.ways, has_base and SPARSE in self.ways, width)
            if not pair.new.nbytes:
                yield _Piece(task, 0, 0, is_last=True)
            for start, size in cut(pair.new.nbytes, PIECE):
                yield _Piece(task, start, size, is_hashed=True)
                for at, nbytes in cut(size, BLOCK):
                    yield _Piece(task, start + at, nbytes, start + at + nbytes == pair.new.nbytes)

    def _work(self, piece: _Piece) -> _Block | bytes:
        """Compare a block with the base's, or hash a piece."""
        pair = piece.task.pair
        with self._buffers.one() as first:
            if piece.is_hashed:
                return self._hashed(piece, first)
            new = first[: piece.nbytes]
            fill_values(pair.new, piece.start, new)
            if pair.base is None or not piece.nbytes:
                return _Block(crc32(new))
            with self._buffers.one() as second:
                base = second[: piece.nbytes]
                fill_values(pair.base, piece.start, base)
                return self._differing(piece, new, base)

    def _hashed(self, piece: _Piece, buffer: memoryview) -> bytes:
        value = hashlib.sha256()
        for start, size in cut(piece.nbytes, BLOCK):
            fill_values(piece.task.pair.new, piece.start + start, buffer[:size])
            value.update(buffer[:size])
        return value.digest()

    def _differing(self, piece: _Piece, new: memoryview, base: memoryview) -> _Block:
        task, crc = piece.task, crc32(base)
        values, before = (np.frombuffer(each, UNSIGNED[task.pair.new.dtype.itemsize]) for each in (new, base))
        before ^= values
        where = few_places(before)
        changed = int(np.count_nonzero(before)) if where is None else len(where)
        if not changed:
            return _Block(crc, crc)
        frame = places = told = b""
        if task.wants_xor:
            if not hasattr(_of_thread, "compress"):
                _of_thread.compress = differences.compressor()
            frame = _of_thread.compress(packable(before, where))
        packed = changed * (task.place + values.itemsize)
        if task.wants_sparse and (packed <= len(new) or NEW not in self.ways):
            where = np.flatnonzero(before) if where is None else where
            told = values[where].tobytes()
            places = (where + piece.start // values.itemsize).astype(f"<i{task.place}").tobytes()
        return _Block(crc32(new), crc, changed, frame, places, told)

    def _take(self, piece: _Piece, block: _Block) -> None:
        """Let what a block gives grow at the ends of the files, while it may still be the smallest."""
        task, nbytes = piece.task, piece.task.pair.new.nbytes
        task.crc32 = combined(task.crc32, block.crc32, piece.nbytes)
        task.base_crc32 = combined(task.base_crc32, block.base_crc32, piece.nbytes)
        task.changed += block.changed
        if block.changed and not block.places:
            task.wants_sparse = False
        if task.wants_xor:
            task.frames.append(len(block.frame))
            self._frames.append(block.frame)
            task.wants_xor = self._frames.grown < nbytes
        if task.wants_sparse:
            self._places.append(block.places)
            self._values.append(block.values)
            grown = self._places.grown + self._values.grown
            is_behind = task.wants_xor and TRIED < self._frames.grown < grown
            task.wants_sparse = (grown < nbytes and not is_behind) or NEW not in self.ways

    def _choose(self, task: _Task) -> None:
        """Keep a tensor in the smallest form."""
        pair, sizes = task.pair, {NEW: task.pair.new.nbytes} if NEW in self.ways else {}
        if pair.base is not None and not task.changed:
            sizes = {SAME: 0}
        else:
            if task.wants_xor:
                sizes[XOR] = self._frames.grown + 4 * len(task.frames)
            if task.wants_sparse:
                sizes[SPARSE] = self._places.grown + self._values.grown
        kind = min(sizes, key=sizes.__getitem__)
        parts = dict(self._parts(task, kind))
        self.made.tensors |= {name: tensor for name, (tensor, _) in parts.items()}
        base, crc = (None, 0) if kind == NEW else (pair.base_name, task.base_crc32)
        sums = {name: crc32 for name, (_, crc32) in parts.items()}
        digest, new = hashlib.sha256(b"".join(task.digests)).hexdigest(), pair.new
        entry = DeltaEntry(kind, new.dtype, new.shape, task.crc32, digest, sums, base, crc)
        self.made.entries[pair.name] = entry
        for growing in (self._frames, self._places, self._values):
            growing.begin()

    def _parts(self, task: _Task, kind: str) -> Iterator[tuple[str, tuple[TensorRef, int]]]:
        """Yield the tensors of the delta that hold one of the newer checkpoint, each with its CRC-32."""
        pair = task.pair
        if kind == NEW:
            yield pair.name, (pair.new, task.crc32)
        elif kind == XOR:
            self._frames.append(struct.pack(f"<{len(task.frames)}I", *task.frames))
            yield self._name(pair.name, "xor"), self._frames.taken("uint8")
        elif kind == SPARSE:
            yield self._name(pair.name, "indices"), self._places.taken(PLACES[task.place])
            yield self._name(pair.name, "values"), self._values.taken(pair.new.dtype.name)

    def _name(self, name: str, suffix: str) -> str:
        """Return a name that no tensor of the newer checkpoint has, nor a part of another."""
        number, free = 1, f"{name}.{suffix}"
        while free in self._taken:
            number += 1
            free = f"{name}.{suffix}~{number}"
        self._taken.add(free)
        return free


class _Growing:
    """A temporary file in which a tensor grows at the end; what is not taken is written over."""

    def __init__(self, path: str) -> None:
        self.spool = Spool(path)
        self.start = self.crc32 = 0

    @property
    def grown(self) -> int:
        return self.spool.source.size - self.start

    def append(self, raw: bytes) -> None:
        if raw:
            self.spool.append(raw)
            self.crc32 = crc32(raw, self.crc32)

    def taken(self, dtype: str) -> tuple[TensorRef, int]:
        """Keep what grew; return it as a flat tensor, with its CRC-32."""
        kind, data = ALL_DTYPES[dtype], ByteRange(self.spool.source, self.start, self.grown)
        self.start = self.spool.source.size
        return TensorRef.of_bytes(data, kind, (data.nbytes // kind.itemsize,)), self.crc32

    def begin(self) -> None:
        """Forget what grew since the last tensor that was taken."""
        self.spool.source.size, self.crc32 = self.start, 0
