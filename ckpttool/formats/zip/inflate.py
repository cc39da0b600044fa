"""Inflate compressed records of a zip file into an unnamed temporary file, so that they are byte ranges
again.

torch writes uncompressed records, and reads compressed ones too, as `zip -r` makes them; for a stream that
is cut short it returns uninitialised memory. Here a record must have exactly the size and the checksum that
the directory states. Sizes are checked before a byte is written: deflate can't make more than 1032 bytes of
one, and all records together may not grow without bound.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import IO

from ...errors import Damaged, Refused
from ...files.copying import no_room_named
from ...tensors.ref import ByteRange, Source
from .reader import Record

# The highest ratio of deflate: 258 bytes in two bits (zlib's technical notes).
MAX_RATIO = 1032

MAX_GROWTH = 100
# All inflated records together may be MAX_GROWTH times the size of the file, or SMALL bytes if that is more.
SMALL = 1 << 30

# A pickle, which is inflated in memory, may be this many times its compressed size, and 1 MiB more.
MAX_TEXT_GROWTH = 64

CHUNK = 1 << 20


def inflated_bytes(source: Source, record: Record) -> bytes:
    """Return the bytes of a compressed record, a pickle or a line of text, inflated in memory."""
    if record.size > (1 << 20) + MAX_TEXT_GROWTH * record.data.nbytes:
        raise Refused(
            source.path,
            f"its record '{record.name}' would grow from {record.data.nbytes} to {record.size} bytes",
            hint="no ordinary file does: if you trust it, unpack it and zip it again without compression",
        )
    return b"".join(inflated(source, record))


class Inflated:
    """The temporary file with the inflated records of one archive; it is made for the first one."""

    def __init__(self, source: Source) -> None:
        self.archive = source
        self.target: Source | None = None
        self.folder = ""

    def add(self, record: Record) -> ByteRange:
        """Inflate a record, and return where its bytes are."""
        target = self.target or self._create()
        start = target.size
        if start + record.size > max(SMALL, MAX_GROWTH * self.archive.size):
            raise Refused(
                self.archive.path,
                f"its compressed records would grow from {self.archive.size} bytes to more than {start}",
                hint="if you trust it, unpack it and zip it again without compression",
            )
        for piece in inflated(self.archive, record):
            with no_room_named(self.folder):
                target.size += _write(target.fd, piece, target.size)
        return ByteRange(target, start, record.size)

    def _create(self) -> Source:
        import tempfile

        self.folder = tempfile.gettempdir()
        file: IO[bytes]
        with tempfile.TemporaryFile() as file:
            self.target = Source(self.archive.path, os.dup(file.fileno()))
        return self.target


def _write(fd: int, data: bytes, position: int) -> int:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, position)
        position, view = position + done, view[done:]
    return len(data)


def inflated(source: Source, record: Record) -> Iterator[bytes]:
    """Yield the contents of a compressed record in pieces of at most CHUNK bytes."""
    if record.size > MAX_RATIO * record.data.nbytes:
        raise Damaged(source.path, f"its record '{record.name}' states a size that deflate can't reach")
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    size = crc = 0
    try:
        for chunk in record.data.chunks(memoryview(bytearray(min(CHUNK, record.data.nbytes)))):
            piece = stream.decompress(chunk, CHUNK)
            while piece:
                size, crc = size + len(piece), zlib.crc32(piece, crc)
                if size > record.size:
                    raise _wrong_size(source, record)
                yield piece
                piece = stream.decompress(stream.unconsumed_tail, CHUNK)
            if stream.unused_data:
                raise _wrong_size(source, record)
    except zlib.error:
        raise Damaged(source.path, f"its record '{record.name}' is not a valid deflate stream") from None
    if size != record.size or not stream.eof:
        raise _wrong_size(source, record)
    if record.crc32 is not None and crc != record.crc32:
        raise Damaged(source.path, f"its record '{record.name}' does not match its checksum")


def _wrong_size(source: Source, record: Record) -> Damaged:
    return Damaged(
        source.path,
        f"its compressed record '{record.name}' does not inflate to exactly {record.size} bytes: it is cut "
        "short or damaged",
    )
