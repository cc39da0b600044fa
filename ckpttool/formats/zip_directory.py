"""The directory of a zip, read strictly.

Everything that two readers of one zip could understand differently is refused: duplicate names, a local
header that disagrees with the central directory, records that overlap. A record is a range of the file; those
that another tool than torch compressed are the business of `inflate`. Format: PKWARE APPNOTE 6.3.

A checkpoint may hold 100,000 records. Their headers are read in the order of the file, a window at a time,
and the two loops below are written out for speed.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, NoReturn

from ..errors import Damaged, Unsupported
from ..tensor import ByteRange, Source
from .zip_archive import (
    CENTRAL,
    CENTRAL_SIGNATURE,
    DESCRIPTOR,
    ENCRYPTED,
    END,
    END64,
    END64_SIGNATURE,
    END_SIGNATURE,
    FULL16,
    FULL32,
    LOCAL,
    LOCAL_SIGNATURE,
    LOCATOR64,
    LOCATOR64_SIGNATURE,
    STORED,
    ZIP64_EXTRA,
)

WINDOW = 1 << 15
"""Bytes read at a time for local headers: more than one, where records are small."""


class Record(NamedTuple):
    """One record.

    Attributes:
        data: its bytes as they stand in the file.
        size: how many they are once inflated.
        crc32: of the bytes once inflated; None where the writer left it out (0, torch's
            `set_crc32_options(False)`).
        compression: STORED, DEFLATED, or another number of the format's.
    """

    name: str
    data: ByteRange
    size: int
    crc32: int | None
    compression: int


class _Entry(NamedTuple):
    """What the central directory says of a record; sorts by where its local header begins."""

    header: int
    raw_name: bytes
    name: str
    flags: int
    compression: int
    crc: int
    packed: int
    size: int


def read_directory(source: Source, place: ByteRange | None = None) -> dict[str, Record]:
    """Every record of a zip by name.

    Args:
        place: the stretch of the file that is the zip; all of it when None.

    Raises:
        Damaged: truncated, inconsistent or ambiguous.
        Unsupported: encrypted, or split into volumes.
    """
    place = place or ByteRange(source, 0, source.size)
    count, size, offset = _find_directory(place)
    entries = _central(place, count, place.part(offset, size).read())
    return _local(place, sorted(entries), offset)


def _find_directory(place: ByteRange) -> tuple[int, int, int]:
    """(entries, bytes, offset) of the central directory; the records must have ended before it."""
    tail_size = min(place.nbytes, END.size + FULL16)
    tail = place.part(place.nbytes - tail_size, tail_size).read()
    at = tail.rfind(struct.pack("<I", END_SIGNATURE))
    if at < 0 or at + END.size > len(tail):
        raise Damaged(place.path, "is cut short: the zip directory at its end is missing")
    _, disk, start_disk, here, count, size, offset, comment = END.unpack_from(tail, at)
    end = place.nbytes - tail_size + at
    if end + END.size + comment != place.nbytes:
        raise Damaged(place.path, "its zip directory does not stand at its end")
    if disk or start_disk or here != count:
        raise Unsupported(place.path, "is one volume of a split zip archive")
    count, size, offset, end = _end64(place, end, (count, size, offset))
    if offset + size != end:
        raise Damaged(place.path, "its zip directory is not where the end of the file says")
    return count, size, offset


def _end64(place: ByteRange, end: int, narrow: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """The wide form of the end record, which torch always writes: its numbers, and where it begins."""
    at = end - LOCATOR64.size
    if at < 0:
        return (*narrow, end)
    signature, _, position, _ = LOCATOR64.unpack(place.part(at, LOCATOR64.size).read())
    if signature != LOCATOR64_SIGNATURE:
        return (*narrow, end)
    if position + END64.size > at:
        raise Damaged(place.path, "its ZIP64 directory is malformed")
    fields = END64.unpack(place.part(position, END64.size).read())
    if fields[0] != END64_SIGNATURE or position + 12 + fields[1] != at:
        raise Damaged(place.path, "its ZIP64 directory is malformed")
    _, _, _, _, disk, start_disk, here, count, size, offset = fields
    if disk or start_disk or here != count:
        raise Unsupported(place.path, "is one volume of a split zip archive")
    for wide, short, full in zip((count, size, offset), narrow, (FULL16, FULL32, FULL32), strict=True):
        if short not in (full, wide):
            raise Damaged(place.path, "its two zip directories disagree")
    return count, size, offset, position


def _central(place: ByteRange, count: int, raw: bytes) -> list[_Entry]:
    """The entries of the central directory, which is `raw`: as many as were promised, each name once."""
    entries: list[_Entry] = []
    seen: set[str] = set()
    end = 0
    for _ in range(count):
        begin = end + CENTRAL.size
        if begin > len(raw):
            raise Damaged(place.path, "its zip directory ends early")
        fields = CENTRAL.unpack_from(raw, end)
        signature, _, _, flags, compression, _, _, crc, packed, size, name_size = fields[:11]
        extra_size, comment_size, _, _, attributes, header = fields[11:]
        raw_name = raw[begin : begin + name_size]
        end = begin + name_size + extra_size + comment_size
        if signature != CENTRAL_SIGNATURE or end > len(raw):
            raise Damaged(place.path, "its zip directory is malformed")
        name = _name(place, raw_name, attributes)
        if packed == FULL32 or size == FULL32 or header == FULL32:
            extra = raw[begin + name_size : begin + name_size + extra_size]
            size, packed, header = _widen(place, name, extra, size, packed, header)
        if flags & ENCRYPTED:
            raise Unsupported(place.path, f"its record '{name}' is encrypted")
        if compression == STORED and packed != size:
            raise Damaged(place.path, f"its record '{name}' has two sizes")
        folded = name.lower()  # torch finds records without regard to case
        if folded in seen:
            raise Damaged(place.path, f"holds the record '{name}' twice")
        seen.add(folded)
        entries.append(_Entry(header, raw_name, name, flags, compression, crc, packed, size))
    if end != len(raw):
        raise Damaged(place.path, "its zip directory is longer than its entries")
    return entries


def _name(place: ByteRange, raw: bytes, attributes: int) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise Damaged(place.path, f"has a record whose name is not UTF-8: {raw[:40]!r}") from None
    if "\\" in name or "\0" in name or name[:1] == "/" or (".." in name and ".." in name.split("/")):
        raise Damaged(place.path, f"has a record whose name leaves the archive: {name[:80]!r}")
    if attributes and (attributes >> 16) & 0o170000 == 0o120000:
        raise Damaged(place.path, f"its record '{name}' is a symbolic link")
    return name


def _widen(
    place: ByteRange, name: str, extra: bytes, size: int, packed: int, header: int
) -> tuple[int, int, int]:
    """Replaces the fields that are too narrow by those of the ZIP64 extra field, in its fixed order."""
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
    raise Damaged(place.path, f"its record '{name}' lacks its ZIP64 sizes")


def _local(place: ByteRange, entries: list[_Entry], limit: int) -> dict[str, Record]:
    """Where each record's bytes begin, by its local header, which must tell the same as the directory.

    Args:
        entries: in the order of the file.
        limit: where the directory begins, and all records must have ended.
    """
    records: dict[str, Record] = {}
    window, start, end, before = b"", 0, 0, ""
    source, base = place.source, place.offset
    for entry in entries:
        header, raw_name, name, flags, compression, crc, packed, size = entry
        if header < end:
            raise Damaged(place.path, f"its records '{before}' and '{name}' overlap")
        begin, named = header - start + LOCAL.size, header - start + LOCAL.size + len(raw_name)
        if named > len(window):
            window, start = source.read(base + header, max(0, min(WINDOW, limit - header))), header
            begin, named = LOCAL.size, LOCAL.size + len(raw_name)
            if named > len(window):
                _outside(place, name)
        fields = LOCAL.unpack_from(window, begin - LOCAL.size)
        signature, _, my_flags, my_compression, _, _, my_crc, my_packed, my_size, name_size, extra = fields
        if signature != LOCAL_SIGNATURE or name_size != len(raw_name) or window[begin:named] != raw_name:
            raise Damaged(place.path, f"its record '{name}' has another name in its local header")
        if (
            my_compression != compression
            or (my_flags ^ flags) & (ENCRYPTED | DESCRIPTOR)
            or not _agree(my_flags, (my_crc, my_packed, my_size), (crc, packed, size))
        ):
            raise Damaged(place.path, f"its record '{name}' has two headers that disagree")
        data = header + LOCAL.size + name_size + extra
        end, before = data + packed, name
        if end > limit:
            raise Damaged(place.path, f"its record '{name}' runs past the end of the records")
        records[name] = Record(name, ByteRange(source, base + data, packed), size, crc or None, compression)
    return records


def _outside(place: ByteRange, name: str) -> NoReturn:
    raise Damaged(place.path, f"its record '{name}' lies outside the file")


def _agree(flags: int, mine: tuple[int, int, int], theirs: tuple[int, int, int]) -> bool:
    """Whether a local header's checksum and sizes are those of the directory."""
    if mine == theirs:
        return True
    # With a descriptor the three stand behind the record, and may be 0 here; FULL32 refers to ZIP64.
    behind = flags & DESCRIPTOR
    return all(m in (t, FULL32) or (m == 0 and behind) for m, t in zip(mine, theirs, strict=True))
