"""Compare the bytes that a checkpoint is made of with the checksums that its files state."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from ..errors import Damaged
from ..files.copying import Progress, map_bytes
from ..files.crc32 import combined, crc32, crc32_of
from ..remote import ahead
from ..tensors.ref import ByteRange, Source, Storage
from .checkpoint import Checkpoint

Named = tuple[str, Storage]

# Bytes summed as one piece where they are read for their checksum alone.
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
            _Sums(name, storage, {})
            for name, storage in each_once(storages)
            if storage.crc32 is not None or (every and not storage.origins)
        ]
        of_source = defaultdict[Source, list[_Place]](list)
        for sums in self._sums:
            if isinstance(data := sums.storage.data, ByteRange):
                of_source[data.source].append((data.offset, data.offset + data.nbytes, sums))
        for places in of_source.values():
            places.sort(key=itemgetter(0, 1))
        self._observers = {source: partial(_see, places) for source, places in of_source.items()}

    @property
    def compares(self) -> bool:
        """Whether any of the files states a checksum."""
        return bool(self._sums)

    def __enter__(self) -> Checksums:
        for source, see in self._observers.items():
            source.observers.append(see)
        return self

    def __exit__(self, *_: object) -> None:
        while self._observers:
            source, see = self._observers.popitem()
            source.observers.remove(see)

    def finish(self) -> None:
        """Compare all checksums when everything was read; Damaged names the first that differs."""
        for sums in self._differing(None):
            raise self._damaged(sums)

    def damaged(self, progress: Progress | None = None) -> list[Named]:
        """Return the storages whose bytes do not match their checksum, when everything was read."""
        return [(sums.name, sums.storage) for sums in self._differing(progress)]

    def _differing(self, progress: Progress | None) -> Iterator[_Sums]:
        self.__exit__()
        unread = [(sums, *gap) for sums in self._sums for gap in sums.gaps()]
        places = [sums.storage.data.part(start, end - start) for sums, start, end in unread]
        crcs = [0] * len(places)
        for piece, crc in map_bytes(lambda _, chunks: crc32_of(chunks), places, PIECE, progress):
            crcs[piece.number] = combined(crcs[piece.number], crc, piece.nbytes)
        for (sums, start, end), crc in zip(unread, crcs, strict=True):
            sums.stretches[start] = end, crc
        for sums in self._sums:
            stated = sums.storage.crc32
            if stated is not None and sums.crc32() != stated:
                yield sums

    def _damaged(self, sums: _Sums) -> Damaged:
        checkpoint, path = self._checkpoint, sums.storage.data.path
        files = {source.path for source in (checkpoint.source, *checkpoint.shards)}
        whole = checkpoint.path if path in files else path  # the folder, not one of its files
        hint = None if whole == "-" else f"list all that is damaged: ckpttool verify {shlex.quote(whole)}"
        return Damaged(path, f"the bytes of '{sums.name[:80]}' do not match their checksum", hint=hint)


class _Sums(NamedTuple):
    """A storage, and the CRC-32 of stretches of it: first byte -> (end, CRC-32)."""

    name: str
    storage: Storage
    stretches: dict[int, tuple[int, int]]

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the end of each stretch that is missing between those there are."""
        at = 0
        for start in (*sorted(self.stretches), self.storage.nbytes):
            if start > at:
                yield at, start
            if start >= at:  # one that begins within another is not used
                at, _ = self.stretches.get(start, (start, 0))

    def crc32(self) -> int:
        """Return the CRC-32 of the storage, whose stretches have no gaps."""
        at = crc = 0
        while at < self.storage.nbytes:
            end, of_stretch = self.stretches[at]
            crc, at = combined(crc, of_stretch, end - at), end
        return crc


_Place = tuple[int, int, _Sums]  # where a storage begins and ends in its file


def _see(places: list[_Place], offset: int, data: memoryview | bytes) -> None:
    """Sum bytes that were read from `offset` of a file. Several threads may call this at once."""
    number = bisect_right(places, offset, key=itemgetter(0)) - 1
    if number < 0:
        return
    start, end, sums = places[number]
    if offset + len(data) <= end and len(data):
        crc = 0 if sums.storage.crc32 is None else crc32(data)
        sums.stretches[offset - start] = offset + len(data) - start, crc
