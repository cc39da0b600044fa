"""The zip container that torch uses: its directory read strictly, and written.

torch stores records uncompressed, so a record's bytes are a range of the file; those that another tool
compressed are the business of `inflate`. Everything that two readers of one zip could understand differently
is refused: duplicate names, a local header that disagrees with the central directory, records that overlap.
Format: PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..errors import Damaged, Unsupported
from ..tensor import ByteRange, Computed, Source
from ..transfer import Output

LOCAL = struct.Struct("<IHHHHHIIIHH")
CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
END = struct.Struct("<IHHHHIIH")
END64 = struct.Struct("<IQHHIIQQQQ")
LOCATOR64 = struct.Struct("<IIQI")
SIGNATURES = LOCAL_SIGNATURE, CENTRAL_SIGNATURE, END_SIGNATURE, END64_SIGNATURE, LOCATOR64_SIGNATURE = (
    0x04034B50,
    0x02014B50,
    0x06054B50,
    0x06064B50,
    0x07064B50,
)
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
ZIP64_EXTRA = 1
PADDING_EXTRA = 0x4246  # "FB": what torch pads a local header with
STORED, DEFLATED = 0, 8
ENCRYPTED, DESCRIPTOR, UTF8 = 1, 8, 0x800
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Attributes:
        header: where its local header begins.
        data: its bytes as they stand in the file.
        size: how many they are once inflated.
        crc32: of the bytes once inflated; None where the writer left it out (0, torch's
            `set_crc32_options(False)`).
        compression: STORED, DEFLATED, or another number of the format's.
    """

    name: str
    header: int
    data: ByteRange
    size: int
    crc32: int | None
    compression: int


def read_directory(source: Source) -> dict[str, Record]:
    """Every record of the archive by name.

    Raises:
        Damaged: truncated, inconsistent or ambiguous.
        Unsupported: encrypted, or split into volumes.
    """
    count, size, offset = _find_directory(source)
    raw = source.read(offset, size)
    records: dict[str, Record] = {}
    seen: set[str] = set()
    position = 0
    for _ in range(count):
        if position + CENTRAL.size > size:
            raise Damaged(source.path, "its zip directory ends early")
        record, position = _entry(source, raw, position, offset)
        folded = record.name.lower()  # torch finds records without regard to case
        if folded in seen:
            raise Damaged(source.path, f"holds the record '{record.name}' twice")
        seen.add(folded)
        records[record.name] = record
    if position != size:
        raise Damaged(source.path, "its zip directory is longer than its entries")
    _check_overlaps(source, records)
    return records


def _find_directory(source: Source) -> tuple[int, int, int]:
    """(entries, bytes, offset) of the central directory; the records must have ended before it."""
    tail_size = min(source.size, END.size + FULL16)
    tail = source.read(source.size - tail_size, tail_size)
    at = tail.rfind(struct.pack("<I", END_SIGNATURE))
    if at < 0 or at + END.size > len(tail):
        raise Damaged(source.path, "is cut short: the zip directory at its end is missing")
    _, disk, start_disk, here, count, size, offset, comment = END.unpack_from(tail, at)
    end = source.size - tail_size + at
    if end + END.size + comment != source.size:
        raise Damaged(source.path, "its zip directory does not stand at its end")
    if disk or start_disk or here != count:
        raise Unsupported(source.path, "is one volume of a split zip archive")
    count, size, offset, end = _end64(source, end, (count, size, offset))
    if offset + size != end:
        raise Damaged(source.path, "its zip directory is not where the end of the file says")
    return count, size, offset


def _end64(source: Source, end: int, narrow: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """The wide form of the end record, which torch always writes: its numbers, and where it begins."""
    at = end - LOCATOR64.size
    signature, _, position, _ = LOCATOR64.unpack(source.read(at, LOCATOR64.size)) if at >= 0 else (0, 0, 0, 0)
    if signature != LOCATOR64_SIGNATURE:
        return (*narrow, end)
    fields = END64.unpack(source.read(position, END64.size))
    if fields[0] != END64_SIGNATURE or position + 12 + fields[1] != at:
        raise Damaged(source.path, "its ZIP64 directory is malformed")
    _, _, _, _, disk, start_disk, here, count, size, offset = fields
    if disk or start_disk or here != count:
        raise Unsupported(source.path, "is one volume of a split zip archive")
    for wide, short, full in zip((count, size, offset), narrow, (FULL16, FULL32, FULL32), strict=True):
        if short not in (full, wide):
            raise Damaged(source.path, "its two zip directories disagree")
    return count, size, offset, position


def _entry(source: Source, raw: bytes, position: int, limit: int) -> tuple[Record, int]:
    """One entry of the central directory, checked against its local header."""
    fields = CENTRAL.unpack_from(raw, position)
    signature, _, _, flags, compression, _, _, crc, packed, size = fields[:10]
    name_size, extra_size, comment_size, _, _, attributes, header = fields[10:]
    if signature != CENTRAL_SIGNATURE:
        raise Damaged(source.path, "its zip directory is malformed")
    begin = position + CENTRAL.size
    end = begin + name_size + extra_size + comment_size
    raw_name, extra = raw[begin : begin + name_size], raw[begin + name_size : begin + name_size + extra_size]
    if end > len(raw):
        raise Damaged(source.path, "its zip directory ends early")
    name = _name(source, raw_name, attributes)
    size, packed, header = _widen(source, name, extra, size, packed, header)
    if flags & ENCRYPTED:
        raise Unsupported(source.path, f"its record '{name}' is encrypted")
    if compression == STORED and packed != size:
        raise Damaged(source.path, f"its record '{name}' has two sizes")
    start = _payload(source, name, raw_name, header, limit, (flags, compression, crc, packed, size))
    if start + packed > limit:
        raise Damaged(source.path, f"its record '{name}' runs past the end of the records")
    return Record(name, header, ByteRange(source, start, packed), size, crc or None, compression), end


def _name(source: Source, raw: bytes, attributes: int) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Damaged(source.path, f"has a record whose name is not UTF-8: {raw[:40]!r}") from None
    if name.startswith("/") or "\0" in name or "\\" in name or ".." in name.split("/"):
        raise Damaged(source.path, f"has a record whose name leaves the archive: {name[:80]!r}")
    if (attributes >> 16) & 0o170000 == 0o120000:
        raise Damaged(source.path, f"its record '{name}' is a symbolic link")
    return name


def _widen(
    source: Source, name: str, extra: bytes, size: int, packed: int, header: int
) -> tuple[int, int, int]:
    """Replaces the fields that are too narrow by those of the ZIP64 extra field, in its fixed order."""
    if FULL32 not in (size, packed, header):
        return size, packed, header
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == ZIP64_EXTRA:
            wide = iter(struct.iter_unpack("<Q", extra[position + 4 : position + 4 + length // 8 * 8]))
            try:
                size, packed, header = (next(wide)[0] if v == FULL32 else v for v in (size, packed, header))
            except (StopIteration, RuntimeError):
                break
            return size, packed, header
        position += 4 + length
    raise Damaged(source.path, f"its record '{name}' lacks its ZIP64 sizes")


def _payload(
    source: Source, name: str, raw_name: bytes, header: int, limit: int, central: tuple[int, ...]
) -> int:
    """Where a record's bytes begin, by its local header, which must tell the same as the directory."""
    if header + LOCAL.size > limit:
        raise Damaged(source.path, f"its record '{name}' lies outside the file")
    local = source.read(header, min(LOCAL.size + len(raw_name), limit - header))
    signature, _, flags, compression, _, _, crc, packed, size, name_size, extra_size = LOCAL.unpack_from(
        local
    )
    if signature != LOCAL_SIGNATURE or local[LOCAL.size :] != raw_name or name_size != len(raw_name):
        raise Damaged(source.path, f"its record '{name}' has another name in its local header")
    same = (flags ^ central[0]) & (ENCRYPTED | DESCRIPTOR) == 0 and compression == central[1]
    for mine, theirs in zip((crc, packed, size), central[2:], strict=True):
        # With a descriptor the three stand behind the record, and may be 0 here; FULL32 refers to ZIP64.
        same = same and (mine in (theirs, FULL32) or (mine == 0 and flags & DESCRIPTOR != 0))
    if not same:
        raise Damaged(source.path, f"its record '{name}' has two headers that disagree")
    return header + LOCAL.size + int(name_size) + int(extra_size)


def _check_overlaps(source: Source, records: dict[str, Record]) -> None:
    end, before = 0, ""
    for record in sorted(records.values(), key=lambda r: r.header):
        if record.header < end:
            raise Damaged(source.path, f"its records '{before}' and '{record.name}' overlap")
        end, before = record.data.offset + record.data.nbytes, record.name


class ZipWriter:
    """Writes records one after another, each payload on a 64-byte boundary, and the directory at the end.

    The layout is torch's: stored, the local header padded by an extra field `FB`, ZIP64 fields only where a
    number needs them.
    """

    def __init__(self, out: Output, root: str) -> None:
        self.out = out
        self.root = root
        self.directory = bytearray()
        self.count = 0

    def write(self, name: str, data: bytes) -> None:
        """A record of bytes in memory."""
        header = self._reserve(name, len(data))
        crc = self.out.write_all([memoryview(data)])
        self._finish(name, header, len(data), crc)

    def copy(self, name: str, data: ByteRange | Computed, crc32: int | None) -> None:
        """A record of bytes from elsewhere; those of a file are looked at only for a missing CRC."""
        header = self._reserve(name, data.nbytes)
        if isinstance(data, ByteRange) and crc32 is not None:
            self.out.copy(data)
        else:
            crc32 = self.out.copy_with_crc(data)
        self._finish(name, header, data.nbytes, crc32)

    def close(self) -> None:
        """The central directory and the end records."""
        offset, size = self.out.position, len(self.directory)
        end = bytearray()
        if self.count >= FULL16 or offset >= FULL32 or size >= FULL32:
            end += END64.pack(END64_SIGNATURE, 44, 45, 45, 0, 0, self.count, self.count, size, offset)
            end += LOCATOR64.pack(LOCATOR64_SIGNATURE, 0, offset + size, 1)
        count = min(self.count, FULL16)
        end += END.pack(END_SIGNATURE, 0, 0, count, count, min(size, FULL32), min(offset, FULL32), 0)
        self.out.write(bytes(self.directory + end))

    def _reserve(self, name: str, size: int) -> int:
        """Leaves room for the local header, so that the payload starts on the boundary."""
        header = self.out.position
        self.out.position += LOCAL.size + len(self._path(name)) + len(self._local_extra(name, header, size))
        return header

    def _local_extra(self, name: str, header: int, size: int) -> bytes:
        wide = struct.pack("<HHQQ", ZIP64_EXTRA, 16, size, size) if size >= FULL32 else b""
        start = header + LOCAL.size + len(self._path(name)) + len(wide) + 4
        padding = -start % ALIGNMENT
        return wide + struct.pack("<HH", PADDING_EXTRA, padding) + b"Z" * padding

    def _finish(self, name: str, header: int, size: int, crc: int) -> None:
        path, extra, narrow = self._path(name), self._local_extra(name, header, size), min(size, FULL32)
        version = 45 if size >= FULL32 or header >= FULL32 else 0
        self.out.write_at(
            header,
            LOCAL.pack(
                LOCAL_SIGNATURE, version, UTF8, STORED, 0, 0, crc, narrow, narrow, len(path), len(extra)
            )
            + path
            + extra,
        )
        wide = [size, size] if size >= FULL32 else []
        wide += [header] if header >= FULL32 else []
        more = struct.pack(f"<HH{len(wide)}Q", ZIP64_EXTRA, 8 * len(wide), *wide) if wide else b""
        self.directory += CENTRAL.pack(
            CENTRAL_SIGNATURE, version, version, UTF8, STORED, 0, 0, crc, narrow, narrow,
            len(path), len(more), 0, 0, 0, 0, min(header, FULL32),
        )  # fmt: skip
        self.directory += path + more
        self.count += 1

    def _path(self, name: str) -> bytes:
        return f"{self.root}/{name}".encode()
