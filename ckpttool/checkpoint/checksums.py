"""Compare the bytes that a checkpoint is made of with the checksums and digests that its files state."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

from ..errors import Damaged
from ..files.copying import Progress, map_bytes
from ..files.crc32 import combined, crc32
from ..files.threads import cut
from ..remote import ahead
from ..tensors.ref import ByteRange, Observer, Source, Storage
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    from ..files.digest import Pieces

Named = tuple[str, Storage]

# Bytes read as one piece for their checksum alone; those of a digest have a size of their own.
PIECE = 4 << 20


def each_once(storages: Iterable[Named]) -> Iterator[Named]:
    """Yield storages and those that they come from once, each with the name of a tensor that uses it."""
    seen: set[int] = set()
    for name, used in storages:
        below = [used]
        while below:
            storage = below.pop()
            if id(storage) not in seen:
                seen.add(id(storage))
                below += storage.origins
                yield name, storage


def expect(storages: Iterable[Named]) -> None:
    """Announce that storages will be read, in this order, to those of their sources that are elsewhere."""
    ahead.expect(storage for _, storage in storages)


def reads_of(storages: Iterable[Named]) -> Iterator[ByteRange]:
    """Yield the ranges of files that storages are read from."""
    places = (storage.data for _, storage in each_once(storages))
    return (place for place in places if isinstance(place, ByteRange))


def require_made(storages: Iterable[Named]) -> None:
    """Raise what would keep storages, or those that they come from, from being made; nothing is read."""
    made = (storage.data for _, storage in each_once(storages) if not isinstance(storage.data, ByteRange))
    for require in {id(data.require): data.require for data in made}.values():  # tensors may share one
        if require is not None:
            require()


class Checksums:
    """Sums bytes while they are read for another purpose, and compares the sums. A context manager."""

    def __init__(self, checkpoint: Checkpoint, storages: Iterable[Named], *, every: bool = False) -> None:
        # While the block runs, every stretch of a storage is summed in the thread that reads it. `finish`
        # reads what was not read: the bytes between views, and storages that were mapped. With `every`,
        # storages without a checksum are read too, or those that they are put together from.
        self._checkpoint = checkpoint
        self._sums = [
            _Digest(name, storage) if storage.digest is not None else _Crc32(name, storage)
            for name, storage in each_once(storages)
            if storage.crc32 is not None or storage.digest is not None or (every and not storage.origins)
        ]
        self._sums.sort(key=lambda sums: bool(sums.storage.origins))  # what others are made of tells more
        of_source = defaultdict[Source, list[_Place]](list)
        self._observed: list[tuple[list[Observer], Observer]] = []
        for sums in self._sums:
            if isinstance(data := sums.storage.data, ByteRange):
                of_source[data.source].append((data.offset, data.offset + data.nbytes, sums))
            else:
                self._observed.append((data.observers, sums.see))
        for source, places in of_source.items():
            places.sort(key=itemgetter(0, 1))
            self._observed.append((source.observers, partial(_see, places)))

    @property
    def compares(self) -> bool:
        """Whether any of the files states a checksum."""
        return bool(self._sums)

    @property
    def in_a_row(self) -> int | None:
        """How many bytes of a storage one thread should read in a row, from a multiple of them on."""
        return next((sums.piece for sums in self._sums if isinstance(sums, _Digest)), None)

    def __enter__(self) -> Checksums:
        for observers, see in self._observed:
            observers.append(see)
        return self

    def __exit__(self, *_: object) -> None:
        while self._observed:
            observers, see = self._observed.pop()
            observers.remove(see)

    def finish(self, progress: Progress | None = None) -> None:
        """Compare all sums when everything was read; Damaged names the first that differs."""
        for sums in self._differing(progress):
            raise self._damaged(sums)

    def damaged(self, progress: Progress | None = None) -> list[Named]:
        """Return the storages whose bytes do not match what is stated, when everything was read."""
        return [(sums.name, sums.storage) for sums in self._differing(progress)]

    def _differing(self, progress: Progress | None) -> Iterator[_Sums]:
        self.__exit__()
        unread = [(sums, *gap) for sums in self._sums for gap in sums.unread()]

        def work(number: int, chunks: Iterator[memoryview]) -> None:
            sums, at, _ = unread[number]
            for chunk in chunks:
                sums.see(at, chunk)
                at += len(chunk)

        places = [sums.storage.data.part(start, size) for sums, start, size in unread]
        for _ in map_bytes(work, places, max((size for _, _, size in unread), default=PIECE), progress):
            pass
        yield from (sums for sums in self._sums if not sums.agrees())

    def _damaged(self, sums: _Sums) -> Damaged:
        checkpoint, path = self._checkpoint, sums.storage.data.path
        files = {source.path for source in (checkpoint.source, *checkpoint.shards)}
        whole = checkpoint.path if path in files else path  # the folder, not one of its files
        hint = None if whole == "-" else f"list all that is damaged: ckpttool verify {shlex.quote(whole)}"
        return Damaged(path, f"the bytes of '{sums.name[:80]}' do not match their {sums.kind}", hint=hint)


class _Sums(Protocol):
    """What is known of the bytes of a storage."""

    name: str
    storage: Storage
    kind: str

    def see(self, offset: int, data: memoryview | bytes) -> None:
        """Sum bytes from an offset of the storage. Several threads may call this at once."""

    def unread(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the size of stretches that were not seen, each to be read by one thread."""

    def agrees(self) -> bool:
        """Return whether all bytes, which have been seen, are those that are stated."""


class _Crc32:
    """The CRC-32 of a storage, put together from those of stretches: first byte -> (end, CRC-32)."""

    kind = "checksum"

    def __init__(self, name: str, storage: Storage) -> None:
        self.name, self.storage = name, storage
        self.stretches: dict[int, tuple[int, int]] = {}

    def see(self, offset: int, data: memoryview | bytes) -> None:
        """Sum a stretch."""
        crc = 0 if self.storage.crc32 is None else crc32(data)
        self.stretches[offset] = offset + len(data), crc

    def unread(self) -> Iterator[tuple[int, int]]:
        """Yield what is missing between the stretches."""
        at = 0
        for start in (*sorted(self.stretches), self.storage.nbytes):
            yield from ((at + begin, size) for begin, size in cut(start - at, PIECE))
            if start >= at:  # one that begins within another is not used
                at, _ = self.stretches.get(start, (start, 0))

    def agrees(self) -> bool:
        """Join the stretches, which have no gaps, and compare."""
        at = crc = 0
        while at < self.storage.nbytes:
            end, of_stretch = self.stretches[at]
            crc, at = combined(crc, of_stretch, end - at), end
        return self.storage.crc32 in (None, crc)


class _Digest:
    """The digest of a storage, put together from those of its pieces."""

    kind = "digest"

    def __init__(self, name: str, storage: Storage) -> None:
        from ..files.digest import PIECE, Pieces  # whose hashlib loads OpenSSL

        self.name, self.storage, self.piece = name, storage, PIECE
        self._pieces: Pieces = Pieces(storage.nbytes)
        self.see, self.unread = self._pieces.see, self._pieces.missing

    def agrees(self) -> bool:
        """Compare."""
        return self._pieces.digest() == self.storage.digest


_Place = tuple[int, int, _Sums]  # where a storage begins and ends in its file


def _see(places: list[_Place], offset: int, data: memoryview | bytes) -> None:
    """Sum bytes that were read from `offset` of a file. Several threads may call this at once."""
    number = bisect_right(places, offset, key=itemgetter(0)) - 1
    if number < 0:
        return
    start, end, sums = places[number]
    if offset + len(data) <= end and len(data):
        sums.see(offset - start, data)
