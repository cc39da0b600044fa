"""Compressed streams, unpacked in bounded memory into one temporary file of bounded size; and odd zips.

A stream may end early or be damaged: what came before is kept, as a loader would have used it by then.
"""

from __future__ import annotations

import bz2
import itertools
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

from ..core.files.commit import Spool
from ..core.formats.pytorch.zip_entries import LOCAL_HEADER
from ..core.formats.pytorch.zip_writer import END64, END_OF_ZIP, FULL16, LOCATOR64, Signature
from ..core.tensors.ref import ByteRange, Source
from ..errors import Damaged, Refused

CHUNK = 1 << 20
MAX_LZMA = 256 << 20  # bytes of memory that a stream of lzma may ask for

# All that is unpacked of one file may be MAX_GROWTH times as large as it, or SMALL if that is more.
MAX_GROWTH, SMALL = 100, 256 << 20

Engine = Callable[[], Any]  # makes a decompressor of one stream

RAW_DEFLATE: Engine = partial(zlib.decompressobj, -zlib.MAX_WBITS)
ZLIB: Engine = zlib.decompressobj
BZIP2: Engine = bz2.BZ2Decompressor

ALONE = (RAW_DEFLATE, ZLIB)  # loaders unpack one stream of these, and all streams of the others

# Of the methods of zip's records; 0 is stored.
METHODS: dict[int, Engine] = {8: RAW_DEFLATE, 12: BZIP2}

JOBLIB_ZLIB = b"ZF0x"  # joblib before 0.10: it, the size in hexadecimal digits, and a stream of zlib
JOBLIB_HEADER = 21

_LZMA: Engine = partial(lzma.LZMADecompressor, memlimit=MAX_LZMA)
# By how a stream begins: what it is, and what unpacks it.
STREAMS: tuple[tuple[tuple[bytes, ...], str, Engine], ...] = (
    ((b"\x1f\x8b",), "gzip", partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)),
    ((b"BZh",), "bzip2", BZIP2),
    ((b"\xfd7zXZ\0", b"\x5d\0\0"), "lzma", _LZMA),
    ((b"x\x01", b"x\x5e", b"x\x9c", b"x\xda", JOBLIB_ZLIB), "zlib", ZLIB),
)

LOCAL, CENTRAL, LAST, LOCATOR = (
    struct.pack("<I", signature)
    for signature in (Signature.LOCAL, Signature.CENTRAL, Signature.END, Signature.LOCATOR64)
)
BEGINS = (LOCAL, LAST)  # an empty zip is its end alone

WINDOW = 1 << 20
MAX_PIECES = 1000  # records of a zip without a sound directory


def stream_of(head: bytes) -> tuple[str, Engine] | None:
    """Return the name and the engine of the compressed stream that begins so; None for anything else."""
    return next(((name, engine) for begins, name, engine in STREAMS if head.startswith(begins)), None)


class Room:
    """The temporary file into which the contents of one file are unpacked."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.most = max(SMALL, MAX_GROWTH * source.size)
        self._spool: Spool | None = None

    def put(self, pieces: Iterator[bytes] | list[bytes]) -> tuple[ByteRange, Damaged | Refused | None]:
        """Write bytes until they end or something is wrong; return where they are, and what was wrong."""
        if self._spool is None:
            self._spool = Spool(self.source.path)
        inside, wrong = self._spool.source, cast("Damaged | Refused | None", None)
        start = inside.size
        try:
            for piece in pieces:
                if inside.size + len(piece) > self.most:
                    what = f"would grow from {self.source.size} to more than {self.most} bytes when unpacked"
                    wrong = Refused(self.source.path, what)
                    break
                self._spool.append(piece)
        except Damaged as fault:
            wrong = fault
        return ByteRange(inside, start, inside.size - start), wrong

    def close(self) -> None:
        """Free the space on the disk now: a fault that is kept may keep this object for long."""
        if self._spool is not None:
            self._spool.source.close()


def unpacked(place: ByteRange, name: str, engine: Engine) -> Iterator[bytes]:
    """Yield what a stream unpacks to, and the streams behind it. Raises Damaged where it is damaged."""
    if place.part(0, min(4, place.nbytes)).read() == JOBLIB_ZLIB:
        skipped = min(JOBLIB_HEADER, place.nbytes)
        place = place.part(skipped, place.nbytes - skipped)
    stream, is_whole = engine(), False
    try:
        for chunk in place.chunks(memoryview(bytearray(min(CHUNK, place.nbytes)))):
            rest = bytes(chunk)
            while rest or not getattr(stream, "needs_input", True):
                yield from _pieces(stream, rest)
                is_whole, rest = stream.eof, b""
                if stream.eof and engine in ALONE:
                    return
                if stream.eof:
                    rest, stream = stream.unused_data.lstrip(b"\0"), engine()
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, MemoryError):
        if not is_whole:  # else other bytes follow the stream, and no loader unpacks them
            raise Damaged(place.path, f"has a damaged stream of {name}") from None
    if not is_whole:
        raise Damaged(place.path, f"has a stream of {name} that is cut short")


def _pieces(stream: Any, rest: bytes) -> Iterator[bytes]:
    """Yield what some bytes unpack to, in pieces of bounded size."""
    while True:
        piece = stream.decompress(rest, CHUNK)
        if piece:
            yield piece
        rest = getattr(stream, "unconsumed_tail", b"")
        if stream.eof or not (rest or len(piece) == CHUNK):
            return


# ---- Several zips in a row, and zips that no strict reader opens


class LooseRecord(NamedTuple):
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
    size = min(place.nbytes, END_OF_ZIP.size + FULL16)
    tail = place.part(place.nbytes - size, size).read()
    at = tail.rfind(LAST)
    return 0 <= at <= len(tail) - END_OF_ZIP.size


def pieces(place: ByteRange) -> Iterator[LooseRecord]:
    """Yield the records whose headers are found anywhere, MAX_PIECES at most; nothing in them is believed."""
    places = [at for at, _ in zip(_found(place, 0, (LOCAL, CENTRAL)), range(2 * MAX_PIECES), strict=False)]
    for at, end in itertools.pairwise([*places, place.nbytes]):
        raw = place.part(at, min(LOCAL_HEADER.size, place.nbytes - at)).read()
        if len(raw) < LOCAL_HEADER.size or raw[:4] != LOCAL:
            continue
        *_, method, _, _, _, named, extra = LOCAL_HEADER.unpack(raw)
        begin = at + LOCAL_HEADER.size + named + extra
        if begin < end:
            name = place.part(at + LOCAL_HEADER.size, named).read().decode("utf-8", "replace")
            yield LooseRecord(name, method, place.part(begin, end - begin))


def _ends(place: ByteRange, start: int) -> Iterator[int]:
    """Yield where a zip ends that begins at `start`, by a directory that lies right before; 0 for no such."""
    for at in _found(place, start, (LAST,)):
        if at + END_OF_ZIP.size > place.nbytes:
            return
        *_, size, offset, comment = END_OF_ZIP.unpack(place.part(at, END_OF_ZIP.size).read())
        wide = at - LOCATOR64.size
        if wide >= start and place.part(wide, 4).read() == LOCATOR:
            _, _, position, _ = LOCATOR64.unpack(place.part(wide, LOCATOR64.size).read())
            is_end = start + position + END64.size == wide
        else:
            is_end = start + offset + size == at
        end = at + END_OF_ZIP.size + comment
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
