"""Compressed streams, unpacked in bounded memory into one temporary file of bounded size; and odd zips.

A stream may end early or be damaged: what came before is kept, as a loader would have used it by then.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

from ..core.files.commit import Spool
from ..core.formats.pytorch.zip_entries import CENTRAL_ENTRY, LOCAL_HEADER, UNREADABLE
from ..core.formats.pytorch.zip_writer import END64, END_OF_ZIP, FULL16, FULL32, LOCATOR64, STORED, Signature
from ..core.tensors.ref import ByteRange, Source
from ..errors import CkptToolError, Damaged, Refused, Unsupported

CHUNK, EXACT_CHUNK = 1 << 16, 1 << 12  # bytes that are read at a time
STEP = 1 << 16  # bytes that are unpacked at a time
MAX_LZMA = 256 << 20  # bytes of memory that a stream of lzma may ask for

# All that is unpacked of one file may be MAX_GROWTH times as large as it, or SMALL if that is more.
# WORK times as much may be read and unpacked: bytes of slow streams count more.
MAX_GROWTH, SMALL, WORK = 100, 256 << 20, 8
SLOW, ALONE = 10, 64

Engine = Callable[[], Any]  # makes a decompressor of one stream

RAW_DEFLATE: Engine = partial(zlib.decompressobj, -zlib.MAX_WBITS)
ZLIB: Engine = zlib.decompressobj
GZIP: Engine = partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)
BZIP2: Engine = bz2.BZ2Decompressor
LZMA: Engine = partial(lzma.LZMADecompressor, memlimit=MAX_LZMA)
LZMA_ALONE: Engine = partial(lzma.LZMADecompressor, lzma.FORMAT_ALONE, MAX_LZMA)

SINGLE = (RAW_DEFLATE, ZLIB)  # loaders unpack one stream of these, and all streams of the others

# Of the methods of zip's records; 0 is stored.
METHODS: dict[int, Engine] = {8: RAW_DEFLATE, 12: BZIP2}

# By how a stream begins: what it is, and what unpacks it.
STREAMS: tuple[tuple[bytes, str, Engine], ...] = (
    (b"\x1f\x8b", "gzip", GZIP),
    (b"BZh", "bzip2", BZIP2),
    (b"\xfd7zXZ\0", "lzma", LZMA),
    (b"LZIP", "lzma", LZMA),
)
# What has no such beginning is tried where its first numbers are valid; these are how usual writers begin.
USUAL = (b"\x5d\0\0", b"x\x01", b"x\x5e", b"x\x9c", b"x\xda")

JOBLIB_ZLIB = b"ZF"  # joblib before 0.10: it, the size in hexadecimal digits, and a stream of zlib
JOBLIB_HEADER = 21

GZIP_UNSURE = 0xE2  # flags of a header that zlib checks, and Python's gzip passes over

LOCAL, CENTRAL, LAST, LOCATOR = (
    struct.pack("<I", signature)
    for signature in (Signature.LOCAL, Signature.CENTRAL, Signature.END, Signature.LOCATOR64)
)
BEGINS = (LOCAL, LAST)  # an empty zip is its end alone

WINDOW = 1 << 20
MAX_PIECES = 10_000  # records of a zip without a sound directory


class PackedStream(NamedTuple):
    """A compressed stream that a loader would open."""

    name: str
    engine: Engine
    is_sure: bool = True  # else other bytes may begin so too
    skipped: int = 0  # bytes before it


def streams_of(head: bytes) -> list[PackedStream]:
    """Return the compressed streams that bytes may begin, by the rules of the loaders that open them."""
    if found := [PackedStream(name, engine) for begin, name, engine in STREAMS if head.startswith(begin)]:
        return found
    if head.startswith(JOBLIB_ZLIB):
        try:
            int(head[len(JOBLIB_ZLIB) : JOBLIB_HEADER], 16)
        except ValueError:
            return []
        return [PackedStream("zlib", ZLIB, skipped=JOBLIB_HEADER + (head[JOBLIB_HEADER:][:1] == b" "))]
    is_usual = head.startswith(USUAL)
    if _begins_zlib(head):
        found.append(PackedStream("zlib", ZLIB, is_usual))
    if _begins_lzma_alone(head):
        found.append(PackedStream("lzma", LZMA_ALONE, is_usual))
    return found


def _begins_zlib(head: bytes) -> bool:
    """Whether zlib takes bytes for the beginning of a stream, of any window, that needs no dictionary."""
    is_deflate = len(head) > 1 and head[0] & 15 == 8 and head[0] >> 4 <= 7
    return is_deflate and not int.from_bytes(head[:2], "big") % 31 and not head[1] & 0x20


def _begins_lzma_alone(head: bytes) -> bool:
    """Whether liblzma takes bytes for a stream of lzma-alone, whether it is told that they are one or not."""
    if len(head) < 14 or head[0] >= 225 or sum(divmod(head[0] % 45, 9)) > 4:
        return False
    dictionary, size = struct.unpack_from("<IQ", head, 1)
    is_round = f"{dictionary:b}".strip("0") in ("", "1", "11") or dictionary == FULL32
    is_told = dictionary <= MAX_LZMA and not head[13]  # else only chance would make a stream of it
    return (size == (1 << 64) - 1 or 0 < size < 1 << 38) and (is_round or is_told)


class Room:
    """The temporary file into which the contents of one file are unpacked, and what that may take."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.most = max(SMALL, MAX_GROWTH * source.size)
        self.work = WORK * self.most
        self._spool: Spool | None = None

    def spend(self, nbytes: int) -> None:
        """Count bytes that are read or unpacked. Raises Refused when they are too many."""
        self.work -= nbytes
        if self.work < 0:
            what = f"takes more than {WORK * self.most} bytes of reading and unpacking"
            raise Refused(self.source.path, f"{what}, so the rest was not looked at")

    def put(self, pieces: Iterable[bytes]) -> tuple[ByteRange, CkptToolError | None]:
        """Write bytes until they end or something is wrong; return where they are, and what was wrong."""
        if self._spool is None:
            self._spool = Spool(self.source.path)
        inside, wrong = self._spool.source, cast("CkptToolError | None", None)
        start = inside.size
        try:
            for piece in pieces:
                if inside.size + len(piece) > self.most:
                    what = f"would grow from {self.source.size} to more than {self.most} bytes when unpacked"
                    raise Refused(self.source.path, what)
                self._spool.append(piece)
        except CkptToolError as fault:
            # Its frames hold a buffer and a decoder, and this one holds it: a command collects no cycles.
            fault.__traceback__ = fault.__context__ = None
            wrong = fault
        return ByteRange(inside, start, inside.size - start), wrong

    def close(self) -> None:
        """Free the space on the disk now: a fault that is kept may keep this object for long."""
        if self._spool is not None:
            self._spool.source.close()


class _Broken(Exception):
    """A stream is damaged; `is_whole`: another before it was not."""

    def __init__(self, is_whole: bool) -> None:
        self.is_whole = is_whole


def unpacked(place: ByteRange, stream: PackedStream, spend: Callable[[int], None]) -> Iterator[bytes]:
    """Yield what a stream unpacks to, and the streams behind it.

    Raises Damaged where it is damaged, Unsupported where loaders may go on, and what `spend` raises.
    """
    made = 0
    try:
        for piece in _pieces(place, stream, spend, None):
            made += len(piece)
            yield piece
    except _Broken:
        pass
    else:
        return
    # An engine that fails gives nothing of what it made by then: again, and the end of it byte by byte.
    try:
        for piece in _pieces(place, stream, spend, made):
            if made <= 0:
                yield piece
            made -= len(piece)
    except _Broken as broken:
        if not broken.is_whole:  # else other bytes follow the stream, and no loader unpacks them
            raise Damaged(place.path, f"has a damaged stream of {stream.name}") from None


def _pieces(
    place: ByteRange, stream: PackedStream, spend: Callable[[int], None], exact_from: int | None
) -> Iterator[bytes]:
    """Yield what streams unpack to, from some byte on one by one. Raises _Broken, Damaged, Unsupported."""
    place = place.part(min(stream.skipped, place.nbytes), max(0, place.nbytes - stream.skipped))
    buffer = memoryview(bytearray(min(CHUNK if exact_from is None else EXACT_CHUNK, place.nbytes)))
    decoder, rest, is_whole, done = None, b"", False, 0
    cost = 1 if stream.engine in (*SINGLE, GZIP) else SLOW
    try:
        for chunk in place.chunks(buffer):
            spend(len(chunk) * cost)
            rest += bytes(chunk)
            while rest or (decoder and not getattr(decoder, "needs_input", True)):
                if decoder is None:
                    if stream.engine is GZIP and len(rest) < 4:
                        break
                    decoder, is_gzip = stream.engine(), stream.engine is GZIP and rest[:3] == b"\x1f\x8b\x08"
                    if is_gzip and rest[3] & GZIP_UNSURE:
                        raise Unsupported(place.path, "has a gzip header that readers take differently")
                size = STEP if exact_from is None else min(STEP, max(1, exact_from - done))
                piece = decoder.decompress(rest, size)
                spend(len(piece) if size > 1 else ALONE)
                if piece:
                    yield piece
                done += len(piece)
                rest = getattr(decoder, "unconsumed_tail", b"")
                if decoder.eof:
                    is_whole, rest, decoder = True, decoder.unused_data, None
                    if stream.engine in SINGLE:
                        return
                    rest = rest.lstrip(b"\0")
                elif not rest and len(piece) < size:
                    break
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, MemoryError) as fault:
        if isinstance(fault, MemoryError) or "Memory usage limit" in str(fault):
            what = f"has a stream of {stream.name} that takes more memory than {MAX_LZMA >> 20} MiB"
            raise Unsupported(place.path, what) from None
        raise _Broken(is_whole) from None
    if decoder is not None or not is_whole:
        raise Damaged(place.path, f"has a stream of {stream.name} that is cut short")


# ---- Several zips in a row, and zips that no strict reader opens


class LooseRecord(NamedTuple):
    """A record as its own header says it is, or an entry of a directory that it is in."""

    name: str
    is_closed: bool  # encrypted, or compressed in a way that is not unpacked here
    data: ByteRange  # from the record's first byte on: only its contents say where they end


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
    """Return whether Python's zipfile finds a directory before an end of a zip, whatever comes before it."""
    size = min(place.nbytes, END_OF_ZIP.size + FULL16)
    start = place.nbytes - size
    tail = place.part(start, size).read()
    at = tail.rfind(LAST)
    while at >= 0:
        if at + END_OF_ZIP.size <= size:
            *_, nbytes, _, _ = END_OF_ZIP.unpack_from(tail, at)
            wide = start + at - LOCATOR64.size
            if _stands_at(place, start + at - nbytes, CENTRAL) or _stands_at(place, wide, LOCATOR):
                return True
        at = tail.rfind(LAST, 0, at)
    return False


def _stands_at(place: ByteRange, at: int, signature: bytes) -> bool:
    return 0 <= at <= place.nbytes - 4 and place.part(at, 4).read() == signature


def leads_elsewhere(place: ByteRange) -> bool:
    """Return whether readers that count from the first of several zips find a directory for the last one."""
    size = min(place.nbytes, END_OF_ZIP.size + FULL16)
    tail = place.part(place.nbytes - size, size).read()
    at = place.nbytes - size + tail.rfind(LAST)
    *_, offset, _ = END_OF_ZIP.unpack(place.part(at, END_OF_ZIP.size).read())
    _, _, wide, _ = LOCATOR64.unpack(place.part(at - LOCATOR64.size, LOCATOR64.size).read())
    end64 = struct.pack("<I", Signature.END64)
    return _stands_at(place, offset, CENTRAL) or _stands_at(place, wide, end64)


def pieces(place: ByteRange) -> Iterator[LooseRecord]:
    """Yield the records whose headers are found anywhere: all that any reader of zips opens is behind one.

    Nothing in them is believed but where their bytes begin. Raises Unsupported after MAX_PIECES of them.
    """
    for count, (at, signature) in enumerate(_found(place, 0, (LOCAL, CENTRAL))):
        form = LOCAL_HEADER if signature == LOCAL else CENTRAL_ENTRY
        if count == 2 * MAX_PIECES:
            raise Unsupported(place.path, f"has more than {MAX_PIECES} records without a sound directory")
        raw = place.part(at, min(form.size, place.nbytes - at)).read()
        if len(raw) < form.size:
            continue
        _, flags, method, *_ = form.unpack(raw)
        named, extra = struct.unpack_from("<HH", raw, LOCAL_HEADER.size - 4 if signature == LOCAL else 28)
        begin = min(at + form.size + named + (extra if signature == LOCAL else 0), place.nbytes)
        name = (
            place.part(at + form.size, min(named, begin - at - form.size)).read().decode("utf-8", "replace")
        )
        is_closed = bool(flags & UNREADABLE) or method not in (STORED, *METHODS)
        size = place.nbytes - begin if signature == LOCAL else 0
        yield LooseRecord(name, is_closed, place.part(begin, size))


def _ends(place: ByteRange, start: int) -> Iterator[int]:
    """Yield where a zip ends that begins at `start`, by a directory that lies right before; 0 for no such."""
    for at, _ in _found(place, start, (LAST,)):
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


def not_zero(place: ByteRange, start: int) -> int:
    """Return where the next block of a tar begins that is not all zeros; the end where there is none."""
    for at in range(start, place.nbytes, WINDOW):
        raw = place.part(at, min(WINDOW, place.nbytes - at)).read()
        if rest := raw.lstrip(b"\0"):
            return at + (len(raw) - len(rest)) // 512 * 512
    return place.nbytes


def _found(place: ByteRange, start: int, signatures: tuple[bytes, ...]) -> Iterator[tuple[int, bytes]]:
    """Yield where one of several signatures of four bytes stands, and which."""
    while start < place.nbytes:
        raw = place.part(start, min(WINDOW + 3, place.nbytes - start)).read()
        at = raw.find(b"PK")
        while 0 <= at < WINDOW:
            if raw[at : at + 4] in signatures:
                yield start + at, raw[at : at + 4]
            at = raw.find(b"PK", at + 1)
        start += WINDOW
