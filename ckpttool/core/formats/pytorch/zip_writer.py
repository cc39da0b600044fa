"""Write the zip container that torch uses; the constants of the format. `zip_reader` reads it.

Format: PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from ...files.copying import MOST_PIECES, Bytes, Output, is_tiny
from ...files.crc import crc32
from ...files.reflink import BLOCK, LARGE, NEVER, NotShared
from ...tensors.ref import ByteRange, Storage

LOCAL = struct.Struct("<IHHHHHIIIHH")
CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
END_OF_ZIP = struct.Struct("<IHHHHIIH")
END64 = struct.Struct("<IQHHIIQQQQ")
LOCATOR64 = struct.Struct("<IIQI")
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
ZIP64_EXTRA = 1
PADDING_EXTRA = 0x4246  # "FB": what torch pads a local header with
STORED, DEFLATED = 0, 8
DESCRIPTOR, UTF8 = 8, 0x800  # sizes and checksum follow the bytes; names are UTF-8
ALIGNMENT = 64

# What all local headers, and all entries, of records below 4 GiB begin with; checksum, the size twice and the
# length of the name; what stands between these and the place of the local header; the padding by its length.
LOCAL_START = struct.pack("<IHHHHH", 0x04034B50, 0, UTF8, STORED, 0, 0)
CENTRAL_START = struct.pack("<IHHHHHH", 0x02014B50, 0, 0, UTF8, STORED, 0, 0)
ALIKE, NO_MORE, PLACE = struct.Struct("<IIIH"), bytes(12), struct.Struct("<I")
PADDED = [struct.pack("<HH", PADDING_EXTRA, length) + b"Z" * length for length in range(ALIGNMENT)]

# Bytes of a payload for which a place of its own within a block is worth up to a block of padding.
SHARED = 1 << 20


class Signature:
    """The numbers with which the parts of a zip file begin."""

    LOCAL, CENTRAL = 0x04034B50, 0x02014B50
    END, END64, LOCATOR64 = 0x06054B50, 0x06064B50, 0x07064B50


class ZipWriter:
    """Writes records one after another, and the directory at the end."""

    # The layout is torch's: stored, each payload on a 64-byte boundary by an extra field `FB` in its local
    # header, ZIP64 fields only where a number needs them.

    def __init__(self, out: Output, root: str) -> None:
        self.out = out
        self.root = root
        self._entries: list[bytes] = []
        # Small records that wait to be written: their entry, path, place, padding, checksum and bytes.
        self._planned: list[tuple[int, bytes, int, bytes, int | None, ByteRange]] = []

    def write(self, name: str, data: bytes) -> None:
        """Write a record of bytes in memory."""
        finish = self._reserve(name, len(data))
        self.out.write(data)
        finish(zlib.crc32(data))

    def copy_all(self, storages: Sequence[Storage]) -> None:
        """Write a record `data/<number>` of each storage's bytes."""
        for number, storage in enumerate(storages):
            data = storage.data
            if isinstance(data, ByteRange) and is_tiny(data):
                self._plan(f"{self.root}/data/{number}".encode(), storage, data)
            else:
                self.copy(f"data/{number}", storage)
        self._write_planned()

    def copy(self, name: str, storage: Storage) -> None:
        """Write a record of a storage's bytes."""
        data = storage.data
        if isinstance(data, ByteRange) and storage.crc32 is not None:
            finish = self._reserve(name, data.nbytes, data)
            self.out.copy(data)
            finish(storage.crc32)
        else:
            self.out.copy(data, self._reserve(name, data.nbytes, data), storage.place)

    def _plan(self, path: bytes, storage: Storage, data: ByteRange) -> None:
        """Leave room for a small record, which is read and written with others."""
        header = self.out.position
        start = header + LOCAL.size + len(path) + 4
        padding = -start % ALIGNMENT
        self._planned.append((len(self._entries), path, header, PADDED[padding], storage.crc32, data))
        self._entries.append(b"")
        self.out.position = start + padding + data.nbytes
        if len(self._planned) == MOST_PIECES:
            self._write_planned()

    def _write_planned(self) -> None:
        planned, self._planned = self._planned, []
        found = self.out.taken([data for *_, data in planned])
        pieces: list[tuple[int, bytes]] = []
        for (number, path, header, extra, stated, data), raw in zip(planned, found, strict=True):
            size, crc = data.nbytes, crc32(raw) if stated is None else stated
            if header < FULL32:
                alike = ALIKE.pack(crc, size, size, len(path))
                local = b"%b%b%b\0%b%b" % (LOCAL_START, alike, bytes((len(extra),)), path, extra)
                entry = b"%b%b%b%b%b" % (CENTRAL_START, alike, NO_MORE, PLACE.pack(header), path)
            else:
                local, entry = _headers(path, header, extra, size, crc)
            pieces.append((header, b"".join((local, raw))))
            self._entries[number] = entry
        self.out.write_pieces(pieces)

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
            end += END64.pack(Signature.END64, 44, 45, 45, 0, 0, count, count, size, offset)
            end += LOCATOR64.pack(Signature.LOCATOR64, 0, offset + size, 1)
        count = min(count, FULL16)
        end += END_OF_ZIP.pack(Signature.END, 0, 0, count, count, min(size, FULL32), min(offset, FULL32), 0)
        self.out.write(directory + bytes(end))

    def _reserve(self, name: str, size: int, data: Bytes | None = None) -> Callable[[int], None]:
        """Skip a local header, so that the payload starts on the boundary; return what writes it."""
        header, path = self.out.position, f"{self.root}/{name}".encode()
        extra = struct.pack("<HHQQ", ZIP64_EXTRA, 16, size, size) if size >= FULL32 else b""
        start = header + LOCAL.size + len(path) + len(extra) + 4
        place, block = self._place(size, data)
        padding = (place - start) % block
        if len(extra) + 4 + padding > FULL16:
            what = f"'{name}' needs more room before it than a zip has, to share blocks of {block} bytes"
            raise NotShared(self.root, what, hint="leave out --reflink always")
        extra += struct.pack("<HH", PADDING_EXTRA, padding) + b"Z" * padding
        self._entries.append(b"")
        self.out.position = start + padding
        return partial(self._finish, len(self._entries) - 1, path, header, extra, size)

    def _place(self, size: int, data: Bytes | None) -> tuple[int, int]:
        """Return the place within a block that a payload is put to, and the bytes of that block."""
        reflink = self.out.reflink
        if size < (LARGE if reflink.is_always else SHARED):
            return 0, ALIGNMENT
        block, step = (reflink.block, 1) if reflink.is_always else (BLOCK, ALIGNMENT)
        if isinstance(data, ByteRange) and not data.offset % step and reflink.mode != NEVER:
            return data.offset, block
        return 0, block

    def _finish(self, number: int, path: bytes, header: int, extra: bytes, size: int, crc: int) -> None:
        """Write the local header at its offset, and enter the record into the directory."""
        local, self._entries[number] = _headers(path, header, extra, size, crc)
        self.out.write_at(header, local)


def _headers(path: bytes, header: int, extra: bytes, size: int, crc: int) -> tuple[bytes, bytes]:
    """Return a record's local header, which begins at `header`, and its entry in the directory."""
    narrow = min(size, FULL32)
    version = 45 if size >= FULL32 or header >= FULL32 else 0
    alike = (UTF8, STORED, 0, 0, crc, narrow, narrow, len(path))
    local = LOCAL.pack(Signature.LOCAL, version, *alike, len(extra)) + path + extra
    wide = [size, size] * (size >= FULL32) + [header] * (header >= FULL32)
    more = struct.pack(f"<HH{len(wide)}Q", ZIP64_EXTRA, 8 * len(wide), *wide) if wide else b""
    rest = (len(more), 0, 0, 0, 0, min(header, FULL32))
    return local, CENTRAL.pack(Signature.CENTRAL, version, version, *alike, *rest) + path + more
