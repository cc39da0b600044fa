"""The entries of a zip's central directory, each checked by itself; the records that they tell of.

A checkpoint may hold 100,000 records, whose entries differ in name, checksum, sizes and place alone. Such are
read a few hundred at a time, and each rule is checked for all of them in one C loop; what differs in anything
else is read entry by entry.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ...errors import Damaged, Unsupported
from ...tensors.source import ByteRange
from .zip_writer import FULL32, STORED, ZIP64_EXTRA, Signature

# The fields that are read; versions, times and internal attributes between them are skipped.
CENTRAL_ENTRY = struct.Struct("<I4xHH4xIIIHHHH2xII")

# Flags: encrypted, a patch, strongly encrypted, headers masked.
UNREADABLE = 0x1 | 0x20 | 0x40 | 0x2000

# External attributes: a folder's bit in MS-DOS and torch; a symbolic link among the kinds of Unix; their
# mask.
FOLDER, LINK, KIND = 0x10, 0o120000 << 16, 0o170000 << 16

# The bits that tell either from a regular file.
NOT_A_FILE = FOLDER | LINK & ~(0o100000 << 16)

MANY = 512  # entries that are read together

WIDE_PLACE = struct.pack("<HH", ZIP64_EXTRA, 8)  # the beginning of an extra field that holds a place alone


class ZipRecord(NamedTuple):
    """One record."""

    name: str
    data: ByteRange  # its bytes as they are in the file
    # bytes once inflated. crc32: CRC-32 of the inflated bytes; None where the writer left it out (0, torch's
    # `set_crc32_options(False)`).
    size: int
    crc32: int | None
    compression: int  # STORED, DEFLATED, or another number of the format's


class Entries(NamedTuple):
    """What the central directory says of some records: a column for each field, in the entries' order."""

    headers: Sequence[int]  # offsets of the local headers
    raw_names: Sequence[bytes]
    names: Sequence[str]
    flags: Sequence[int]
    methods: Sequence[int]  # of compression
    crcs: Sequence[int]
    packed: Sequence[int]  # bytes in the file
    sizes: Sequence[int]  # bytes once inflated


# The same of one record. They sort in the order of the file.
Entry = tuple[int, bytes, str, int, int, int, int, int]


def rows(blocks: Iterable[Entries]) -> Iterator[Entry]:
    """Yield the entries one by one."""
    return chain.from_iterable(zip(*block, strict=True) for block in blocks)


def in_columns(entries: Sequence[Entry]) -> Iterator[Entries]:
    """Yield entries, MANY at a time."""
    return (Entries(*zip(*entries[i : i + MANY], strict=True)) for i in range(0, len(entries), MANY))


def entries(place: ByteRange, count: int, raw: bytes) -> Iterator[Entries]:
    """Yield the `count` entries of the central directory `raw`, MANY at a time."""
    end = 0
    for done in range(0, count, MANY):
        together = min(MANY, count - done)
        block, end = _alike(raw, end, together) or _one_by_one(place, raw, end, together)
        yield block
    if end != len(raw):
        raise Damaged(place.path, "its zip directory is longer than its entries")


def have_all(lines: bytes, size: int, at: int, what: bytes) -> bool:
    """Return whether each line of `size` bytes has the same bytes at a place."""
    # A slice with a step takes a nanosecond for each line, where to unpack a field takes 30.
    count = len(lines) // size
    return all(lines[at + i :: size] == what[i : i + 1] * count for i in range(len(what)))


# Where the fields are that the entries of many records have in common: the signature, flags and method, the
# lengths of name, extra field and comment with the number of the disk, the external attributes.
IN_COMMON = slice(0, 4), slice(8, 12), slice(28, 36), slice(38, 42)


def _alike(raw: bytes, begin: int, count: int) -> tuple[Entries, int] | None:
    """Return entries of one length, and where they end, if nothing is to be said of any; else None."""
    if begin + CENTRAL_ENTRY.size > len(raw):
        return None
    first = CENTRAL_ENTRY.unpack_from(raw, begin)
    signature, flags, method, _, _, _, named, extra, comment, disk, attributes, _ = first
    if signature != Signature.CENTRAL or method != STORED or disk:
        return None
    if flags & UNREADABLE or attributes & NOT_A_FILE:
        return None
    entry = struct.Struct(f"<16xIII14xI{named}s{extra}s{comment}x")
    end = begin + count * entry.size
    lines = raw[begin:end]
    if end > len(raw) or not all(have_all(lines, entry.size, at.start, lines[at]) for at in IN_COMMON):
        return None
    crcs, packed, sizes, headers, raw_names, extras = zip(*entry.iter_unpack(lines), strict=True)
    if packed != sizes or FULL32 in sizes:
        return None
    if FULL32 in headers:
        if {*headers} != {FULL32} or extra != 12 or {each[:4] for each in extras} != {WIDE_PLACE}:
            return None
        headers = tuple(place for (place,) in struct.iter_unpack("<4xQ", b"".join(extras)))
    try:
        names = [*map(bytes.decode, raw_names)]
    except UnicodeDecodeError:
        return None
    same = (flags,) * count, (method,) * count
    return Entries(headers, raw_names, names, *same, crcs, packed, sizes), end


def _one_by_one(place: ByteRange, raw: bytes, end: int, count: int) -> tuple[Entries, int]:
    """Return `count` entries, and where they end; refuse the first that is wrong."""
    block: list[Entry] = []
    for _ in range(count):
        begin = end + CENTRAL_ENTRY.size
        if begin > len(raw):
            raise Damaged(place.path, "its zip directory ends early")
        fields = CENTRAL_ENTRY.unpack_from(raw, end)
        signature, flags, method, crc, packed, size, named, extra, comment, disk, attributes, header = fields
        end = begin + named + extra + comment
        if signature != Signature.CENTRAL or end > len(raw):
            raise Damaged(place.path, "its zip directory is malformed")
        raw_name = raw[begin : begin + named]
        try:
            name = raw_name.decode()
        except UnicodeDecodeError:
            raise Damaged(place.path, f"has a record whose name is not UTF-8: {raw_name[:40]!r}") from None
        if FULL32 in (packed, size, header):
            wide = raw[begin + named : begin + named + extra]
            size, packed, header = widened(place, name, wide, size, packed, header)
        if flags & UNREADABLE:
            raise Unsupported(place.path, f"its record '{name[:80]}' is encrypted or a patch")
        if disk:
            raise Unsupported(place.path, f"its record '{name[:80]}' is in another volume of a split zip")
        if packed != size and method == STORED:
            raise Damaged(place.path, f"its record '{name[:80]}' has two sizes")
        if attributes & NOT_A_FILE:
            _require_file(place, name, attributes, size)
        block.append((header, raw_name, name, flags, method, crc, packed, size))
    return Entries(*zip(*block, strict=True)), end


def widened(place: ByteRange, name: str, extra: bytes, *narrow: int) -> list[int]:
    """Replace the numbers that are too narrow by those of the ZIP64 extra field: size, packed, offset."""
    numbers = next((data for kind, data in extra_fields(extra) if kind == ZIP64_EXTRA), b"")
    wide = [number for (number,) in struct.iter_unpack("<Q", numbers[: len(numbers) // 8 * 8])]
    if len(wide) >= narrow.count(FULL32):
        return [wide.pop(0) if number == FULL32 else number for number in narrow]
    raise Damaged(place.path, f"its record '{name[:80]}' lacks its ZIP64 sizes")


def extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the data of each extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if at + 4 + length > len(extra):
            return
        yield kind, extra[at + 4 : at + 4 + length]
        at += 4 + length


def _require_file(place: ByteRange, name: str, attributes: int, size: int) -> None:
    """Refuse a symbolic link, and a folder that holds bytes."""
    if attributes & KIND == LINK:
        raise Damaged(place.path, f"its record '{name[:80]}' is a symbolic link")
    if attributes & FOLDER and size:
        raise Damaged(place.path, f"its record '{name[:80]}' is a folder that holds bytes")
