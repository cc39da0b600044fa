"""Write the zip container that torch uses; the constants of the format. `zip_reader` reads it.

Format: PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import struct
import zlib
from functools import partial
from typing import NamedTuple

from ...files.copying import BLOCK, Output
from ...tensors.ref import ByteRange, Computed

LOCAL = struct.Struct("<IHHHHHIIIHH")
CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
END = struct.Struct("<IHHHHIIH")
END64 = struct.Struct("<IQHHIIQQQQ")
LOCATOR64 = struct.Struct("<IIQI")
LOCAL_SIGNATURE, CENTRAL_SIGNATURE = 0x04034B50, 0x02014B50
END_SIGNATURE, END64_SIGNATURE, LOCATOR64_SIGNATURE = 0x06054B50, 0x06064B50, 0x07064B50
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
ZIP64_EXTRA = 1
PADDING_EXTRA = 0x4246  # "FB": what torch pads a local header with
STORED, DEFLATED = 0, 8
DESCRIPTOR, UTF8 = 8, 0x800
UNREADABLE = 0x1 | 0x20 | 0x40 | 0x2000  # encrypted, a patch, strongly encrypted, headers masked
ALIGNMENT = 64

# Bytes of a payload for which a place in a block of its own choice is worth up to a block of padding.
SHARED = 1 << 20


class _Record(NamedTuple):
    """A record whose payload has its place, and whose header waits for the checksum."""

    number: int
    path: bytes
    header: int
    extra: bytes
    size: int


class ZipWriter:
    """Writes records one after another, and the directory at the end."""

    # The layout is torch's: stored, each payload on a 64-byte boundary by an extra field `FB` in its local
    # header, ZIP64 fields only where a number needs them.

    def __init__(self, out: Output, root: str) -> None:
        self.out = out
        self.root = root
        self._entries: list[bytes] = []

    def write(self, name: str, data: bytes) -> None:
        """Write a record of bytes in memory."""
        record = self._reserve(name, len(data))
        self.out.write(data)
        self._finish(record, zlib.crc32(data))

    def copy(self, name: str, data: ByteRange | Computed, crc32: int | None) -> None:
        """Write a record of bytes from elsewhere."""
        if isinstance(data, ByteRange) and crc32 is not None:
            record = self._reserve(name, data.nbytes, data.offset)
            self.out.copy(data)
            self._finish(record, crc32)
        else:
            record = self._reserve(name, data.nbytes)
            self.out.copy(data, partial(self._finish, record))

    def directory(self) -> bytes:
        """Return the entries of all records, once all are written."""
        if not all(self._entries):  # some wait for their checksum
            self.out.settle()
        return b"".join(self._entries)

    def close(self) -> None:
        """Write the central directory and the end records."""
        directory = self.directory()
        offset, size, count = self.out.position, len(directory), len(self._entries)
        end = bytearray()
        if count >= FULL16 or offset >= FULL32 or size >= FULL32:
            end += END64.pack(END64_SIGNATURE, 44, 45, 45, 0, 0, count, count, size, offset)
            end += LOCATOR64.pack(LOCATOR64_SIGNATURE, 0, offset + size, 1)
        count = min(count, FULL16)
        end += END.pack(END_SIGNATURE, 0, 0, count, count, min(size, FULL32), min(offset, FULL32), 0)
        self.out.write(directory + bytes(end))

    def _reserve(self, name: str, size: int, source: int = 1) -> _Record:
        """Skip a local header, so that the payload starts on the boundary."""
        header, path = self.out.position, f"{self.root}/{name}".encode()
        extra = struct.pack("<HHQQ", ZIP64_EXTRA, 16, size, size) if size >= FULL32 else b""
        start = header + LOCAL.size + len(path) + len(extra) + 4
        is_shared = size >= SHARED and source % ALIGNMENT == 0
        padding = (source - start) % BLOCK if is_shared else -start % ALIGNMENT
        extra += struct.pack("<HH", PADDING_EXTRA, padding) + b"Z" * padding
        self._entries.append(b"")
        self.out.position = start + padding
        return _Record(len(self._entries) - 1, path, header, extra, size)

    def _finish(self, record: _Record, crc: int) -> None:
        """Write the local header at its offset, and enter the record into the directory."""
        number, path, header, extra, size = record
        narrow = min(size, FULL32)
        version = 45 if size >= FULL32 or header >= FULL32 else 0
        alike = (UTF8, STORED, 0, 0, crc, narrow, narrow, len(path))
        local = LOCAL.pack(LOCAL_SIGNATURE, version, *alike, len(extra))
        self.out.write_at(header, local + path + extra)
        wide = [size, size] * (size >= FULL32) + [header] * (header >= FULL32)
        more = struct.pack(f"<HH{len(wide)}Q", ZIP64_EXTRA, 8 * len(wide), *wide) if wide else b""
        rest = (len(more), 0, 0, 0, 0, min(header, FULL32))
        entry = CENTRAL.pack(CENTRAL_SIGNATURE, version, version, *alike, *rest)
        self._entries[number] = entry + path + more
