"""The bytes of a zip's records: as they lie in the file, or inflated from what another tool compressed.

For a stream that is cut short torch returns uninitialised memory. Here a record must have exactly the size
and the checksum that the directory states. Records are inflated into an unnamed temporary file, so that they
are byte ranges again. Sizes are checked before a byte is written: deflate can't make more than 1032 bytes of
one, and all records together may not grow without bound.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ...errors import Damaged, Refused, Unsupported
from ...files.crc32 import crc32_of
from ...files.pieces import BUFFER
from ...files.spool import Spool
from ...tensors.source import ByteRange, Source
from .zip_reader import ZipRecord
from .zip_writer import DEFLATED, STORED

# All inflated records together may be MAX_GROWTH times the size of the file, or SMALL bytes if that is more.
MAX_GROWTH = 100
SMALL = 1 << 30

MAX_RATIO = 1032  # of one record: deflate packs 258 bytes in two bits at best (zlib's technical notes)
MAX_TEXT_GROWTH = 64  # of pickles and lines of text, which are inflated in memory

CHUNK = 1 << 20

UNPACK = "if you trust it, unpack it and zip it again without compression"


class Inflating:
    """The temporary file of a zip, into which its compressed records are inflated."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.spool: Spool | None = None

    def data(self, record: ZipRecord) -> ByteRange:
        """Return where the bytes of a record are, inflated if they were compressed."""
        require_known_method(self.source, record)
        return self._inflate(record) if record.compression == DEFLATED else record.data

    def _inflate(self, record: ZipRecord) -> ByteRange:
        """Inflate a record into the temporary file, and return where its bytes are."""
        if self.spool is None:
            self.spool = Spool(self.source.path)
        start = self.spool.source.size
        if start + record.size > max(SMALL, MAX_GROWTH * self.source.size):
            what = f"would grow from {self.source.size} bytes to more than {start}"
            raise Refused(self.source.path, f"its compressed records {what}", hint=UNPACK)
        for piece in _inflated(self.source, record):
            self.spool.append(piece)
        return ByteRange(self.spool.source, start, record.size)


def require_known_method(source: Source, record: ZipRecord) -> None:
    """Raise Unsupported for a record that is compressed in another way than torch and numpy do."""
    if record.compression not in (STORED, DEFLATED):
        what = f"is compressed in a way that is not read here (method {record.compression})"
        hint = "unpack it and zip it again without compression"
        raise Unsupported(source.path, f"its record '{record.name[:80]}' {what}", hint=hint)


def text_of(source: Source, record: ZipRecord) -> bytes:
    """Return the bytes of a small record, a pickle or a text."""
    require_known_method(source, record)
    if record.compression == DEFLATED:
        if record.size > (1 << 20) + MAX_TEXT_GROWTH * record.data.nbytes:
            what = f"'{record.name}' would grow from {record.data.nbytes} to {record.size} bytes"
            raise Refused(source.path, f"its record {what}", hint=f"no ordinary file does: {UNPACK}")
        return b"".join(_inflated(source, record))
    data = record.data.read()
    if record.crc32 is not None and zlib.crc32(data) != record.crc32:
        raise Damaged(source.path, f"its record '{record.name[:80]}' does not match its checksum")
    return data


def is_intact(source: Source, record: ZipRecord) -> bool | None:
    """Read a record; return whether it matches its checksum, None where the directory states none."""
    if record.crc32 is None:
        return None
    if record.compression == DEFLATED:
        try:
            return sum(map(len, _inflated(source, record))) == record.size
        except Damaged:
            return False
    buffer = memoryview(bytearray(min(BUFFER, record.data.nbytes)))
    return crc32_of(record.data.chunks(buffer)) == record.crc32


def _inflated(source: Source, record: ZipRecord) -> Iterator[bytes]:
    """Yield the contents of a compressed record in pieces of at most CHUNK bytes."""
    name = record.name
    unlike = f"does not inflate to exactly {record.size} bytes: it is cut short or damaged"
    wrong_size = Damaged(source.path, f"its compressed record '{name}' {unlike}")
    if record.size > MAX_RATIO * record.data.nbytes:
        raise Damaged(source.path, f"its record '{name}' states a size that deflate can't reach")
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    size = crc = 0
    try:
        for chunk in record.data.chunks(memoryview(bytearray(min(CHUNK, record.data.nbytes)))):
            piece = stream.decompress(chunk, CHUNK)
            while piece:
                size, crc = size + len(piece), zlib.crc32(piece, crc)
                if size > record.size:
                    raise wrong_size
                yield piece
                piece = stream.decompress(stream.unconsumed_tail, CHUNK)
            if stream.unused_data:
                raise wrong_size
    except zlib.error:
        raise Damaged(source.path, f"its record '{name}' is not a valid deflate stream") from None
    if size != record.size or not stream.eof:
        raise wrong_size
    if record.crc32 is not None and crc != record.crc32:
        raise Damaged(source.path, f"its record '{name}' does not match its checksum")
