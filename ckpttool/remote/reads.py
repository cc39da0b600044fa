"""What an operation is going to read of remote objects, announced before it does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

from ..tensors.ref import Computed, Storage
from ..tensors.source import ByteRange, Source
from . import ahead


def expect(storages: Iterable[Storage], *, as_they_lie: bool = False) -> None:
    """Announce what an operation will read of remote objects: each storage about once, and in this order.

    Args:
        storages: all that will be read; those in files of this machine are passed over.
        as_they_lie: they are read in the order of their places instead, as copies are, and what is put
            together by stretches.
    """
    seen: set[int] = set()
    jobs = list[list[ByteRange]]()
    for storage in storages:
        data = storage.data
        if as_they_lie and isinstance(data, Computed) and (stretches := data.stretches()):
            if id(storage) not in seen:
                jobs += ([place] for _, place in stretches if not place.source.is_local)
            seen.add(id(storage))
        elif isinstance(data, ByteRange) and data.source.is_local and not storage.origins:
            continue  # nothing to ask for, as for all that is on this machine
        elif places := _places(storage, seen):
            jobs.append(places)
    if as_they_lie:
        jobs.sort(key=lambda places: (places[0].source.place, places[0].offset))
    of_source: dict[Source, list[ahead.Range]] = defaultdict(list)
    for place in chain.from_iterable(jobs):
        of_source[place.source].append((place.offset, place.offset + place.nbytes))
    # What is put together from many objects has a piece of each in use, and two where one tensor ends and the
    # next one begins, and the next ones of some are on their way: the ends of pieces are spread, so that not
    # all are needed at once.
    together = max((len({place.source for place in places}) for places in jobs), default=1)
    at_once = min(3 * together, together + 2 * ahead.UNDER_WAY)
    nbytes = max(ahead.SMALLEST, min(ahead.LARGEST, ahead.HELD // at_once))
    line = ahead.Line()
    waiting = {
        source: source.expect(ranges, nbytes, nbytes * (number % together) // together, line)
        for number, (source, ranges) in enumerate(of_source.items())
    }
    for place in chain.from_iterable(jobs):
        line.add(waiting[place.source], place.offset, place.offset + place.nbytes)


def _places(storage: Storage, seen: set[int]) -> list[ByteRange]:
    """Return where the bytes of a storage are read; a checksum is one of all that a part is taken from."""
    if id(storage) in seen:
        return []
    seen.add(id(storage))
    own = [storage.data] if isinstance(storage.data, ByteRange) else []
    below = [origin for origin in storage.origins if not own or origin.crc32 is not None]
    places = [*own, *(place for origin in below for place in _places(origin, seen))]
    return [place for place in places if not place.source.is_local]
