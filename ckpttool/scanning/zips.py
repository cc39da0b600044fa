"""Zips where they are not one whole archive: several in a row, and such as no strict reader opens."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..formats.pytorch.zip_headers import LOCAL_HEADER
from ..formats.pytorch.zip_writer import END, END64, FULL16, LOCATOR64, Signature
from ..tensors.source import ByteRange

LOCAL, CENTRAL, LAST, LOCATOR = (
    struct.pack("<I", signature)
    for signature in (Signature.LOCAL, Signature.CENTRAL, Signature.END, Signature.LOCATOR64)
)
BEGINS = (LOCAL, LAST)  # an empty zip is its end alone

WINDOW = 1 << 20
MAX_PIECES = 1000  # records of a zip without a sound directory


class Piece(NamedTuple):
    """A record as its own header says it is."""

    name: str
    method: int
    data: ByteRange  # up to the next header, so perhaps more than the record's bytes


def in_a_row(place: ByteRange) -> Iterator[ByteRange]:
    """Yield each of the zips with which a place begins, one after another, as DCP writes them."""
    start = 0
    while place.part(start, min(4, place.nbytes - start)).read() in BEGINS:
        end = next((end for end in _ends(place, start) if end), None)
        if end is None:
            return
        yield place.part(start, end - start)
        start = end


def ends_as_zip(place: ByteRange) -> bool:
    """Return whether Python's zipfile finds a zip at the end of what begins as something else."""
    size = min(place.nbytes, END.size + FULL16)
    tail = place.part(place.nbytes - size, size).read()
    at = tail.rfind(LAST)
    return 0 <= at <= len(tail) - END.size


def pieces(place: ByteRange) -> Iterator[Piece]:
    """Yield the records whose headers are found anywhere, MAX_PIECES at most; nothing in them is believed."""
    places = [at for at, _ in zip(_found(place, 0, (LOCAL, CENTRAL)), range(2 * MAX_PIECES), strict=False)]
    for at, end in zip(places, [*places[1:], place.nbytes], strict=True):
        raw = place.part(at, min(LOCAL_HEADER.size, place.nbytes - at)).read()
        if len(raw) < LOCAL_HEADER.size or raw[:4] != LOCAL:
            continue
        *_, method, _, _, _, named, extra = LOCAL_HEADER.unpack(raw)
        begin = at + LOCAL_HEADER.size + named + extra
        if begin < end:
            name = place.part(at + LOCAL_HEADER.size, named).read().decode("utf-8", "replace")
            yield Piece(name, method, place.part(begin, end - begin))


def _ends(place: ByteRange, start: int) -> Iterator[int]:
    """Yield where a zip ends that begins at `start`, by a directory that lies right before; 0 for no such."""
    for at in _found(place, start, (LAST,)):
        if at + END.size > place.nbytes:
            return
        *_, size, offset, comment = END.unpack(place.part(at, END.size).read())
        wide = at - LOCATOR64.size
        if wide >= start and place.part(wide, 4).read() == LOCATOR:
            _, _, position, _ = LOCATOR64.unpack(place.part(wide, LOCATOR64.size).read())
            is_end = start + position + END64.size == wide
        else:
            is_end = start + offset + size == at
        end = at + END.size + comment
        yield end if is_end and end <= place.nbytes else 0


def _found(place: ByteRange, start: int, signatures: tuple[bytes, ...]) -> Iterator[int]:
    """Yield where one of several signatures of four bytes stands."""
    while start < place.nbytes:
        raw = place.part(start, min(WINDOW + 3, place.nbytes - start)).read()
        at = raw.find(b"PK")
        while 0 <= at < WINDOW:
            if raw[at : at + 4] in signatures:
                yield start + at
            at = raw.find(b"PK", at + 1)
        start += WINDOW
