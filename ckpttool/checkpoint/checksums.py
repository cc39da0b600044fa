"""Compare the bytes that a checkpoint is made of with the checksums that its files state."""

from __future__ import annotations

import shlex
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

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
    for named in storages:
        name, used = named
        if id(used) in seen:
            continue
        seen.add(id(used))
        yield named  # itself: 100,000 tuples take 7 MB
        below = [*used.origins]
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
        self._named = [
            named
            for named in each_once(storages)
            if named[1].crc32 is not None or (every and not named[1].origins)
        ]
        self._sums = _Sums([storage.crc32 for _, storage in self._named])
        of_source = defaultdict[Source, list[tuple[int, int, int]]](list)
        for number, (_, storage) in enumerate(self._named):
            if isinstance(data := storage.data, ByteRange):
                of_source[data.source].append((data.offset, data.offset + data.nbytes, number))
        self._observers: dict[Source, Callable[[int, memoryview | bytes], object]] = {}
        while of_source:
            source, places = of_source.popitem()
            starts, ends, numbers = (array("Q", column) for column in zip(*sorted(places), strict=True))
            self._observers[source] = partial(_see, starts, ends, numbers, self._sums)

    @property
    def compares(self) -> bool:
        """Whether any of the files states a checksum."""
        return bool(self._named)

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
        for number in self._differing(None):
            raise self._damaged(*self._named[number])

    def damaged(self, progress: Progress | None = None) -> list[Named]:
        """Return the storages whose bytes do not match their checksum, when everything was read."""
        return [self._named[number] for number in self._differing(progress)]

    def _differing(self, progress: Progress | None) -> list[int]:
        """Read what was not read, and return the numbers of those that differ, in order."""
        self.__exit__()
        sums = self._sums
        left = [number for number, is_done in enumerate(sums.done) if not is_done]
        sizes = [self._named[number][1].nbytes for number in left]
        unread = [(n, *gap) for n, size in zip(left, sizes, strict=True) for gap in sums.gaps(n, size)]
        places = [self._named[number][1].data.part(start, end - start) for number, start, end in unread]
        crcs = [0] * len(places)
        for piece, crc in map_bytes(lambda _, chunks: crc32_of(chunks), places, PIECE, progress):
            crcs[piece.number] = combined(crcs[piece.number], crc, piece.nbytes)
        for (number, start, end), crc in zip(unread, crcs, strict=True):
            sums.parts[number][start] = end, crc
        for number, size in zip(left, sizes, strict=True):
            if sums.stated[number] not in (None, sums.crc32(number, size)):
                sums.wrong.add(number)
        return sorted(sums.wrong)

    def _damaged(self, name: str, storage: Storage) -> Damaged:
        checkpoint, path = self._checkpoint, storage.data.path
        files = {source.path for source in (checkpoint.source, *checkpoint.shards)}
        whole = checkpoint.path if path in files else path  # the folder, not one of its files
        hint = None if whole == "-" else f"list all that is damaged: ckpttool verify {shlex.quote(whole)}"
        return Damaged(path, f"the bytes of '{name[:80]}' do not match their checksum", hint=hint)


class _Sums:
    """What was read of storages, which have numbers: most at once, and summed then, the others in parts."""

    def __init__(self, stated: list[int | None]) -> None:
        self.stated = stated  # their CRC-32s
        self.done = bytearray(len(stated))  # 1 where all was read
        self.wrong: set[int] = set()  # those whose bytes have another CRC-32
        # Stretches of the others: first byte -> (end, CRC-32).
        self.parts: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)

    def gaps(self, number: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the end of each stretch that is missing between those there are."""
        stretches, at = self.parts[number], 0
        for start in (*sorted(stretches), nbytes):
            if start > at:
                yield at, start
            if start >= at:  # one that begins within another is not used
                at, _ = stretches.get(start, (start, 0))

    def crc32(self, number: int, nbytes: int) -> int:
        """Return the CRC-32 of a storage whose stretches have no gaps."""
        at = crc = 0
        while at < nbytes:
            end, of_stretch = self.parts[number][at]
            crc, at = combined(crc, of_stretch, end - at), end
        return crc


def _see(
    starts: Sequence[int],
    ends: Sequence[int],
    numbers: Sequence[int],
    sums: _Sums,
    offset: int,
    data: memoryview | bytes,
) -> None:
    """Sum bytes that were read from `offset` of a file. Several threads may call this at once."""
    place = bisect_right(starts, offset) - 1
    if place < 0 or not len(data):
        return
    start, end, number = starts[place], ends[place], numbers[place]
    if offset + len(data) > end:
        return
    stated = sums.stated[number]
    crc = 0 if stated is None else crc32(data)
    if len(data) < end - start:
        sums.parts[number][offset - start] = offset + len(data) - start, crc
        return
    sums.done[number] = 1
    if stated not in (None, crc):
        sums.wrong.add(number)
