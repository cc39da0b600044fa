"""Compare the bytes that a checkpoint is made of with the checksums and digests that its files state."""

from __future__ import annotations

import shlex
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from ...errors import Damaged, RanksDiffer, Refused
from ..files import digest
from ..files.crc import combined, crc32, crc32_of
from ..files.crc import joined as in_one
from ..files.findings import Findings, Told, current, shared
from ..files.threads import Progress, map_bytes
from ..inert_pickle.values import TooDeep
from ..lazy import hashlib
from ..remote import urls
from ..tensors.ref import DTYPES, ByteRange, Computed, Observer, Source, Storage, TensorRef
from ..tensors.values import stream
from .checkpoint import Checkpoint
from .dotted_names import TooManyNames
from .full import Unholdable, encode
from .special_tensors import SpecialTensor, require_plain
from .state import State

Named = tuple[str, Storage]

# Bytes read as one piece for their checksum alone; those of a digest have a size of their own.
PIECE = 4 << 20


def each_once(storages: Iterable[Named]) -> list[Named]:
    """Return storages and those that they come from once, each with the name of a tensor that uses it."""
    listed = [*storages]
    used = [*map(itemgetter(1), listed)]
    if len({*map(id, used)}) == len(used) and not any(map(attrgetter("origins"), used)):
        return listed  # as nearly always; a loop takes ten times as long
    return [*_each_once(listed)]


def _each_once(storages: Iterable[Named]) -> Iterator[Named]:
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
    now = current.get()
    urls.expect((storage for _, storage in storages) if now is None else _that_fall_here(storages, now))


def _that_fall_here(storages: Iterable[Named], now: Findings) -> Iterator[Storage]:
    """Yield what is read of storages by this part."""
    for name, storage in () if now.joins else storages:
        data = storage.data
        for start, size in now.stretches(data, None if isinstance(data, ByteRange) else name):
            yield storage if size == data.nbytes else Storage(data.part(start, size), storage.kind)


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

    def __init__(
        self, checkpoint: Checkpoint | None, storages: Iterable[Named], *, every: bool = False
    ) -> None:
        # While the block runs, every stretch of a storage is summed in the thread that reads it. `finish`
        # reads what was not read: the bytes between views, and storages that were mapped. With `every`,
        # storages without a checksum are read too, or those that they are put together from.
        self._checkpoint = checkpoint
        once = each_once(storages)
        stating = [named for named in once if _is_summed(named[1], every)]
        self._named = [named for named in stating if named[1].digest is None]
        self._sums = _Sums([storage.crc32 for _, storage in self._named])
        self._digests = [_Digest(name, storage) for name, storage in stating if storage.digest is not None]
        self._observed: list[tuple[list[Observer], Observer]] = []
        of_source = defaultdict[Source, list[tuple[int, int, int]]](list)
        for number, (_, storage) in enumerate(self._named):
            if isinstance(data := storage.data, ByteRange):
                of_source[data.source].append((data.offset, data.offset + data.nbytes, number))
            elif storage.nbytes:  # made of others: seen once, as making it again costs all below it
                see = partial(_see, (0,), (storage.nbytes,), (number,), self._sums)
                self._observed.append((data.observers, see))
        while of_source:
            source, places = of_source.popitem()
            starts, ends, numbers = (array("Q", column) for column in zip(*sorted(places), strict=True))
            self._observed.append((source.observers, partial(_see, starts, ends, numbers, self._sums)))
        hashed = defaultdict[Source, list[_Place]](list)
        for sums in self._digests:
            if isinstance(data := sums.storage.data, ByteRange):
                hashed[data.source].append((data.offset, data.offset + data.nbytes, sums))
            else:
                self._observed.append((data.observers, sums.see))
        for source, of_digests in hashed.items():
            of_digests.sort(key=itemgetter(0, 1))
            self._observed.append((source.observers, partial(_hash, of_digests)))
        self._shared = current.get()
        if self._shared is not None:
            # What others are made of is read where these are made.
            self._below = {id(each) for _, storage in once for each in storage.origins}
            told = (self._shared.told(storage.data, name)[1] for name, storage in stating)
            self._shared.add_sums("\n".join(told), self)

    @property
    def compares(self) -> bool:
        """Whether any of the files states a checksum."""
        return bool(self._named or self._digests)

    @property
    def in_a_row(self) -> int | None:
        """How many bytes of a storage one thread should read in a row, from a multiple of them on."""
        return self._digests[0].piece if self._digests else None

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
        self.__exit__()
        # Checksums first: they are of what others, which have digests, are made of.
        for number in self._differing(progress):
            raise unmatched(self._checkpoint, *self._named[number])
        for sums in self._unequal(progress):
            raise unmatched(self._checkpoint, sums.name, sums.storage, "digest")

    def seen(self) -> dict[str, object]:
        """Return what was summed so far, as JSON: `take` in another process goes on with it.

        Raises Damaged if a storage that was read as a whole has another checksum.
        """
        for number in sorted(self._sums.wrong):
            raise unmatched(self._checkpoint, *self._named[number])
        return self.found()

    def found(self, *, joined: bool = False) -> dict[str, object]:
        """Return the same, whatever is wrong; `joined` with stretches that follow each other in one."""
        sums, rows = self._sums, dict[int, list[list[int]]]()
        for number, found in [*sums.parts.items()]:
            each = [(at, end - at, crc) for at, (end, crc) in [*found.items()]]
            rows[number] = [[at, at + size, crc] for at, size, crc in (in_one(each) if joined else each)]
        done = [number for number, is_done in enumerate(sums.done) if is_done]
        pieces = [each.pieces() for each in self._digests]
        return {"done": done, "wrong": sorted(sums.wrong), "rows": rows, "pieces": pieces}

    def take(self, seen: Mapping[str, Any]) -> None:
        """Take what an earlier process, or that of another part, has summed of the same checkpoint."""
        for number in seen.get("done", ()):
            self._sums.done[number] = 1
        self._sums.wrong.update(seen.get("wrong", ()))
        for number, rows in seen.get("rows", {}).items():
            self._sums.parts[int(number)].update({at: (end, crc) for at, end, crc in rows})
        for sums, pieces in zip(self._digests, seen.get("pieces", ()), strict=False):
            sums.take(pieces)

    def damaged(self, progress: Progress | None = None) -> list[Named]:
        """Return the storages whose bytes do not match what is stated, when everything was read."""
        self.__exit__()
        of_checksums = [self._named[number] for number in self._differing(progress)]
        return of_checksums + [(sums.name, sums.storage) for sums in self._unequal(progress)]

    def digests(self, progress: Progress | None = None) -> list[str]:
        """Return the digest of each storage that states one, whatever it states, when everything was read."""
        self.__exit__()
        self._unequal(progress)
        return [sums.digest() for sums in self._digests]

    def _differing(self, progress: Progress | None) -> list[int]:
        """Read what was not read, and return the numbers of those with another checksum, in order."""
        sums = self._sums
        left = [number for number, is_done in enumerate(sums.done) if not is_done]
        sizes = [self._named[number][1].nbytes for number in left]
        unread = [(n, *gap) for n, size in zip(left, sizes, strict=True) for gap in self._gaps(n, size)]
        places = [self._named[number][1].data.part(start, end - start) for number, start, end in unread]
        crcs = [0] * len(places)
        read = map_bytes(lambda _, chunks: crc32_of(chunks), places, PIECE, progress) if places else ()
        for piece, crc in read:  # without places: a pool of threads takes as long as a small tensor
            crcs[piece.number] = combined(crcs[piece.number], crc, piece.nbytes)
        for (number, start, end), crc in zip(unread, crcs, strict=True):
            sums.parts[number][start] = end, crc
        for number, size in zip(left, sizes, strict=True):
            is_whole = self._shared is None or not any(sums.gaps(number, size))  # else others have the rest
            if is_whole and sums.stated[number] not in (None, sums.crc32(number, size)):
                sums.wrong.add(number)
        return sorted(sums.wrong)

    def _gaps(self, number: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the end of each stretch that was not read, and that falls to this part."""
        now, (name, storage) = self._shared, self._named[number]
        by_name = name if now and (id(storage) in self._below or isinstance(storage.data, Computed)) else None
        for start, end in self._sums.gaps(number, nbytes):
            if now is None:
                yield start, end
                continue
            for first, size in now.stretches(storage.data.part(start, end - start), by_name):
                yield start + first, start + first + size

    def _unequal(self, progress: Progress | None) -> list[_Digest]:
        """Read what was not read, and return those with another digest."""
        unread = [(each, *gap) for each in self._digests for gap in each.unread() if self._reads(each, *gap)]

        def work(number: int, chunks: Iterator[memoryview]) -> None:
            sums, at, _ = unread[number]
            for chunk in chunks:
                sums.see(at, chunk)
                at += len(chunk)

        places = [sums.storage.data.part(start, size) for sums, start, size in unread]
        if places:
            for _ in map_bytes(work, places, max(size for _, _, size in unread), progress):
                pass
        whole = (each for each in self._digests if self._shared is None or not any(each.unread()))
        return [sums for sums in whole if not sums.agrees()]

    def _reads(self, sums: _Digest, start: int, size: int) -> bool:
        """Return whether a piece that was not seen is to be read by this part."""
        place = sums.storage.data.part(start, size)
        return self._shared is None or self._shared.falls_here(self._shared.told(place, sums.name)[0])


@contextmanager
def compared(
    storages: Iterable[Named], checkpoint: Checkpoint | None = None, progress: Progress | None = None
) -> Iterator[None]:
    """Compare storages whose values the block reads with what their files state of them, each only once."""
    new = [named for named in each_once(storages) if not named[1].is_compared]
    with Checksums(checkpoint, new) as checksums:
        yield
        checksums.finish(progress)
    for _, storage in new:
        storage.is_compared = True


def unmatched(checkpoint: Checkpoint | None, name: str, storage: Storage, kind: str = "checksum") -> Damaged:
    """Return the error for a storage whose bytes do not match what is stated of them."""
    path, whole = storage.data.path, storage.data.path
    if checkpoint is not None and path in {source.path for source in checkpoint.sources}:
        whole = checkpoint.path  # the folder, not one of its files
    hint = None if whole == "-" else f"list all that is damaged: ckpttool verify {shlex.quote(whole)}"
    return Damaged(path, f"the bytes of '{name[:80]}' do not match their {kind}", hint=hint)


def _is_summed(storage: Storage, every: bool) -> bool:
    stated = storage.crc32 is not None or storage.digest is not None
    return stated or (every and not storage.origins)


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


class _Digest:
    """The digest of a storage, put together from those of its pieces."""

    def __init__(self, name: str, storage: Storage) -> None:
        self.name, self.storage, self.piece = name, storage, digest.PIECE
        self._pieces = digest.Pieces(storage.nbytes)
        self.see, self.unread = self._pieces.see, self._pieces.missing
        self.pieces, self.take, self.digest = self._pieces.done, self._pieces.take, self._pieces.digest

    def agrees(self) -> bool:
        """Return whether all bytes, which have been seen, are those that are stated."""
        return self.digest() == self.storage.digest


_Place = tuple[int, int, _Digest]  # where a storage begins and ends in its file


def _hash(places: list[_Place], offset: int, data: memoryview | bytes) -> None:
    """Hash bytes that were read from `offset` of a file. Several threads may call this at once."""
    stop, number = offset + len(data), max(0, bisect_right(places, offset, key=itemgetter(0)) - 1)
    while number < len(places) and places[number][0] < stop:
        start, end, sums = places[number]
        begin = max(offset, start)
        if begin < end:
            sums.see(begin - start, data[begin - offset : end - offset])
        number += 1


def tensors_that_differ(checkpoint: Checkpoint, *, verify: bool = True) -> dict[str, RanksDiffer]:
    """Return the error of each tensor in which the files of ranks differ, by dotted name."""
    replicated = {*checkpoint.ranks.replicated} if checkpoint.ranks else set[str]()
    found: dict[str, RanksDiffer] = {}

    def is_same(named: tuple[str, TensorRef]) -> bool:
        name, tensor = named
        try:
            for _ in stream(tensor):
                pass
        except RanksDiffer as fault:
            if verify:
                with Checksums(checkpoint, [(name, tensor.storage)]) as checksums:
                    checksums.finish()
            found[name] = fault
        return name not in found

    def read_again(same: bool) -> bool:
        if not same:
            raise ValueError("the error of a tensor that differs is made where it is told")
        return same

    def told(now: Findings, named: tuple[str, TensorRef]) -> Told:
        return now.told(named[1], named[0])

    is_shared = shared("same", told, True, bool, read_again)(is_same)
    for named in checkpoint.tensors():
        if named[0] in replicated:
            is_shared(named)
    return found


# ---- Digests of a state's contents.


def with_parts(path: str, state: State) -> dict[str, TensorRef]:
    """Return the tensors of a state by name, with the parts that docs/digest.md names.

    Raises:
        Refused: the file does not hold all values of a tensor, or two would have one name.
    """
    unsure = {name: like for name, like in state.likes.items() if like.is_piece or not like.known}
    require_plain(path, unsure, "have no digest: this file does not hold or show all their values")
    tensors = dict(state.tensors)
    for name, like in state.likes.items():
        for part, tensor in _parts(path, like):
            if f"{name}:{part}" in tensors:
                raise Refused(path, f"'{name}:{part}' is both a tensor and a part of one")
            tensors[f"{name}:{part}"] = tensor
    return tensors


def digest_of_value(value: object) -> str | None:
    """Return the digest of any value, such as a number; None where `--full` could not hold it."""
    try:
        flat = encode(value)
    except (TooDeep, TooManyNames, Unholdable):
        return None
    return hashlib.sha256(f"{digest.digest(flat.tensors)}{flat.text}".encode()).hexdigest()


def _parts(path: str, like: SpecialTensor) -> Iterator[tuple[str, TensorRef]]:
    """Yield the parts of a tensor by name, and under an empty name its description as UTF-8."""
    text = str(like).encode()
    yield "", TensorRef.of_bytes(Computed.in_memory(path, text), DTYPES["uint8"], (len(text),))
    yield from like.parts.items()
