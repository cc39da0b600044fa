"""The directory of a zip, read strictly.

What readers of zips understand differently, torch's and Python's above all, is refused: duplicate names, a
local header that disagrees with the central directory, records that overlap, folders that hold bytes. The
descriptors behind records are passed over, as by all other readers. A record is a range of the
file; those that another tool than torch compressed are the business of `inflate`. Format: PKWARE APPNOTE 6.3.

A checkpoint may hold 100,000 records. Their headers are read in the order of the file, a window at a time,
and the two loops below are written out for speed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ...errors import Damaged, Unsupported
from ...tensors.ref import ByteRange, Source
from .writer import (
    CENTRAL,
    CENTRAL_SIGNATURE,
    DESCRIPTOR,
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
    UNREADABLE,
    ZIP64_EXTRA,
)

# The fields that are looked at; what lies between them (versions, times) is passed over.
CENTRAL_ENTRY = struct.Struct("<I4xHH4xIIIHHHH2xII")
COMMON = struct.Struct("<2xHH4xIII")
LOCAL_HEADER = struct.Struct(f"<I{COMMON.size}sHH")
assert (CENTRAL_ENTRY.size, LOCAL_HEADER.size) == (CENTRAL.size, LOCAL.size)

COMMON_IN_ENTRY = 6
"""Where in an entry those fields begin that a local header has too, in the same order."""

FOLDER, LINK, KIND = 0x10, 0o120000 << 16, 0o170000 << 16
NO_FILE = FOLDER | LINK & ~(0o100000 << 16)
"""Attributes: a folder's, as MS-DOS and torch have it; a symbolic link's, among the kinds that Unix has; the
bits that distinguish either from a regular file."""

WINDOW = 1 << 15
"""Bytes read at a time for local headers: more than one, where records are small."""


class Record(NamedTuple):
    """One record.

    Attributes:
        data: its bytes as they are in the file.
        size: how many bytes they are once inflated.
        crc32: of the bytes once inflated; None where the writer left it out (0, torch's
            `set_crc32_options(False)`).
        compression: STORED, DEFLATED, or another number of the format's.
    """

    name: str
    data: ByteRange
    size: int
    crc32: int | None
    compression: int


_Entry = tuple[int, bytes, str, int, int, int, int, int, int]
"""What the central directory says of a record: where its local header begins, the name as bytes and as text,
where in the directory those fields are that a local header has too, flags, compression, checksum, bytes in
the file, and bytes once inflated. Sorts in the order of the file."""

_new: Callable[..., Any] = tuple.__new__
"""Makes a NamedTuple in half the time of its class."""


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
    raw = place.part(offset, size).read()
    try:
        records = _local(place, _central(place, count, raw), raw, offset)
    except _Overlap:  # or not listed in the order of the file, as no writer of torch's does
        try:
            records = _local(place, sorted(_central(place, count, raw)), raw, offset)
        except _Overlap as fault:
            raise Damaged(place.path, str(fault)) from None
    names = "\n" + "\n".join(records) + "\n"
    if len(records) != count or not names.islower():
        _require_apart(place, (entry[2] for entry in _central(place, count, raw)))
    if any(sign in names for sign in ODD):
        for name, record in records.items():
            _require_plain(place, name, record.size)
    return records


class _Overlap(Exception):
    """A record begins before the one listed before it ends."""


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
        raise Damaged(place.path, "its zip directory is not at its end")
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
    signature, end_disk, position, disks = LOCATOR64.unpack(place.part(at, LOCATOR64.size).read())
    if signature != LOCATOR64_SIGNATURE:
        return (*narrow, end)
    if position + END64.size != at:  # an extension that may follow it would be taken for it by Python
        raise Damaged(place.path, "its ZIP64 directory is malformed")
    fields = END64.unpack(place.part(position, END64.size).read())
    if fields[:2] != (END64_SIGNATURE, END64.size - 12):
        raise Damaged(place.path, "its ZIP64 directory is malformed")
    disk, start_disk, here, count, size, offset = fields[4:]
    if end_disk or disks > 1 or disk or start_disk or here != count:
        raise Unsupported(place.path, "is one volume of a split zip archive")
    for wide, short, full in zip((count, size, offset), narrow, (FULL16, FULL32, FULL32), strict=True):
        if short not in (full, wide):
            raise Damaged(place.path, "its two zip directories disagree")
    return count, size, offset, position


def _central(place: ByteRange, count: int, raw: bytes) -> Iterator[_Entry]:
    """The entries of the central directory, which is `raw`: as many as were promised."""
    unpack, fixed, size_of_all, end = CENTRAL_ENTRY.unpack_from, CENTRAL_ENTRY.size, len(raw), 0
    for _ in range(count):
        begin, common = end + fixed, end + COMMON_IN_ENTRY
        if begin > size_of_all:
            raise Damaged(place.path, "its zip directory ends early")
        signature, flags, method, crc, packed, size, named, extra, noted, disk, kind, at = unpack(raw, end)
        end = begin + named + extra + noted
        if signature != CENTRAL_SIGNATURE or end > size_of_all:
            raise Damaged(place.path, "its zip directory is malformed")
        raw_name = raw[begin : begin + named]
        try:
            name = raw_name.decode()
        except UnicodeDecodeError:
            raise Damaged(place.path, f"has a record whose name is not UTF-8: {raw_name[:40]!r}") from None
        if packed == FULL32 or size == FULL32 or at == FULL32:
            wide = raw[begin + named : begin + named + extra]
            size, packed, at = _widen(place, name, wide, size, packed, at)
            common = size_of_all  # no bytes: the same fields may precede other ZIP64 sizes
        if flags & UNREADABLE:
            raise Unsupported(place.path, f"its record '{name[:80]}' is encrypted or a patch")
        if disk:
            raise Unsupported(place.path, f"its record '{name[:80]}' is in another volume of a split zip")
        if packed != size and method == STORED:
            raise Damaged(place.path, f"its record '{name[:80]}' has two sizes")
        if kind & NO_FILE:
            if kind & KIND == LINK:
                raise Damaged(place.path, f"its record '{name[:80]}' is a symbolic link")
            if kind & FOLDER and size:
                raise Damaged(place.path, f"its record '{name[:80]}' is a folder that holds bytes")
        yield at, raw_name, name, common, flags, method, crc, packed, size
    if end != size_of_all:
        raise Damaged(place.path, "its zip directory is longer than its entries")


def _require_apart(place: ByteRange, names: Iterable[str]) -> None:
    """Checks that no name appears twice, ignoring case, as torch does when it looks for records."""
    seen: set[str] = set()
    for name in names:
        folded = name.lower()
        if folded in seen:
            raise Damaged(place.path, f"holds the record '{name[:80]}' twice")
        seen.add(folded)


ODD = ("\\", "\0", "..", "\n/", "/\n")
"""What appears in a list of names if one may leave the archive, or be that of a folder."""


def _require_plain(place: ByteRange, name: str, size: int) -> None:
    """Checks that a name stays in the archive, and has no bytes if it is a folder's: torch reads none."""
    if size and name[-1:] == "/":
        raise Damaged(place.path, f"its record '{name[:80]}' is a folder that holds bytes")
    if "\\" in name or "\0" in name or name[:1] == "/" or ".." in name.split("/"):
        raise Damaged(place.path, f"has a record whose name leaves the archive: {name[:80]!r}")


def _widen(
    place: ByteRange, name: str, extra: bytes, size: int, packed: int, header: int
) -> tuple[int, int, int]:
    """Replaces the fields that are too narrow by those of the ZIP64 extra field, in its fixed order."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if position + 4 + length > len(extra):
            break
        if kind == ZIP64_EXTRA:
            wide = iter(struct.iter_unpack("<Q", extra[position + 4 : position + 4 + length // 8 * 8]))
            try:
                size, packed, header = (next(wide)[0] if v == FULL32 else v for v in (size, packed, header))
            except (StopIteration, RuntimeError):
                break
            return size, packed, header
        position += 4 + length
    raise Damaged(place.path, f"its record '{name[:80]}' lacks its ZIP64 sizes")


def _local(place: ByteRange, entries: Iterable[_Entry], raw: bytes, limit: int) -> dict[str, Record]:
    """Where each record's bytes begin, by its local header, which must agree with the directory.

    Args:
        entries: in the order of the file.
        raw: the directory.
        limit: where it begins, and all records must have ended.

    Raises:
        _Overlap: they overlap, or are not in that order.
    """
    records: dict[str, Record] = {}
    unpack, fixed, source, base = LOCAL_HEADER.unpack_from, LOCAL_HEADER.size, place.source, place.offset
    window, start, end, before = b"", 0, 0, ""
    # Fields that leave checksum and sizes to the directory, and the flags and compression that it must have.
    usual, usual_flags, usual_method = b"", 0, 0
    for header, raw_name, name, common, flags, method, crc, packed, size in entries:
        if header < end:
            raise _Overlap(f"its records '{before[:80]}' and '{name[:80]}' overlap")
        at, length = header - start, len(raw_name)
        named = at + fixed + length
        if named > len(window):
            wanted = max(WINDOW, fixed + length)
            window = source.read(base + header, max(0, min(wanted, limit - header)))
            start, at, named = header, 0, fixed + length
            if named > len(window):
                raise Damaged(place.path, f"its record '{name[:80]}' lies outside the file")
        signature, fields, own_length, extra = unpack(window, at)
        if signature != LOCAL_SIGNATURE or own_length != length or window[at + fixed : named] != raw_name:
            raise Damaged(place.path, f"its record '{name[:80]}' has another name in its local header")
        data = header + fixed + length + extra
        as_usual = fields == usual and flags == usual_flags and method == usual_method
        if not as_usual and fields != raw[common : common + COMMON.size]:
            wide = place.part(data - extra, extra)
            _require_agreement(place, name, fields, wide, (flags, method, crc, packed, size))
            if flags & DESCRIPTOR and not any(fields[-12:]):
                usual, usual_flags, usual_method = fields, flags, method
        end, before = data + packed, name
        if end > limit:
            raise Damaged(place.path, f"its record '{name[:80]}' runs past the end of the records")
        where = _new(ByteRange, (source, base + data, packed))
        records[name] = _new(Record, (name, where, size, crc or None, method))
    return records


def _require_agreement(
    place: ByteRange, name: str, fields: bytes, wide: ByteRange, theirs: tuple[int, int, int, int, int]
) -> None:
    """That a local header which is not the same as the directory's entry means the same.

    Args:
        fields: those that both have.
        wide: the extra fields after them, which hold ZIP64 sizes.
        theirs: flags, compression, checksum and the two sizes, as the directory has them.
    """
    flags, method, crc, packed, size = COMMON.unpack(fields)
    if FULL32 in (packed, size):
        size, packed, _ = _widen(place, name, wide.read(), size, packed, 0)
    mine, behind = (crc, packed, size), flags & DESCRIPTOR  # which follows the bytes; 0 here, then
    same = all(m == t or (m == 0 and behind) for m, t in zip(mine, theirs[2:], strict=True))
    if (flags ^ theirs[0]) & (UNREADABLE | DESCRIPTOR) or method != theirs[1] or not same:
        raise Damaged(place.path, f"its record '{name[:80]}' has two headers that disagree")
