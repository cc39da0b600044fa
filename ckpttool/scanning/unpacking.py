"""Compressed streams, unpacked in bounded memory into one temporary file of bounded size.

A stream may end early or be damaged: what came before is kept, as a loader would have used it by then.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..errors import Damaged, Refused
from ..files.spool import Spool
from ..tensors.source import ByteRange, Source

CHUNK = 1 << 20
MAX_LZMA = 256 << 20  # bytes of memory that a stream of lzma may ask for

# All that is unpacked of one file may be MAX_GROWTH times as large as it, or SMALL if that is more.
MAX_GROWTH, SMALL = 100, 256 << 20

Engine = Callable[[], Any]  # makes a decompressor of one stream

RAW_DEFLATE: Engine = partial(zlib.decompressobj, -zlib.MAX_WBITS)
ZLIB: Engine = zlib.decompressobj
BZIP2: Engine = bz2.BZ2Decompressor

ALONE = (RAW_DEFLATE, ZLIB)  # of which loaders unpack one stream, and others one after another

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


def stream_of(head: bytes) -> tuple[str, Engine] | None:
    """Return the name and the engine of the compressed stream that begins so; None for anything else."""
    return next(((name, engine) for begins, name, engine in STREAMS if head.startswith(begins)), None)


class Room:
    """The temporary file into which all is unpacked that one file holds."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.most = max(SMALL, MAX_GROWTH * source.size)
        self._spool: Spool | None = None

    def put(self, pieces: Iterator[bytes] | list[bytes]) -> tuple[ByteRange, Damaged | Refused | None]:
        """Write bytes until they end or something is wrong; return where they are, and what was wrong."""
        if self._spool is None:
            self._spool = Spool(self.source.path)
        inside = self._spool.source
        start = inside.size
        try:
            for piece in pieces:
                if inside.size + len(piece) > self.most:
                    what = f"would grow from {self.source.size} to more than {self.most} bytes when unpacked"
                    return ByteRange(inside, start, inside.size - start), Refused(self.source.path, what)
                self._spool.append(piece)
        except Damaged as fault:
            return ByteRange(inside, start, inside.size - start), fault
        return ByteRange(inside, start, inside.size - start), None

    def close(self) -> None:
        """Give the disk its room back: what is left of a fault may keep this for long."""
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
        if not is_whole:  # else something else follows the stream, which no loader unpacks
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
