"""Read the directory of a zip file strictly.

Whatever readers of zip files understand differently, torch's and Python's above all, is refused: duplicate
names, a local header that disagrees with the central directory, records that overlap, folders that hold
bytes. The data descriptors behind records are skipped, as all other readers do. A record is a range of the
file; `archive` reads the records that another tool than torch compressed. Format: PKWARE APPNOTE 6.3.

A checkpoint may hold 100,000 records. Their local headers are read in the order of the file, a window at a
time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from ...errors import Damaged, Unsupported
from ...tensors.source import ByteRange, Source
from .zip_writer import DESCRIPTOR, END, END64, FULL16, FULL32, LOCATOR64, STORED, ZIP64_EXTRA, Signature

# The fields that are read; versions, times and internal attributes between them are skipped.
CENTRAL_ENTRY = struct.Struct("<I4xHH4xIIIHHHH2xII")
LOCAL_HEADER = struct.Struct("<I2xHH4xIIIHH")

# Flags: encrypted, a patch, strongly encrypted, headers masked.
UNREADABLE = 0x1 | 0x20 | 0x40 | 0x2000

# External attributes: a folder's bit in MS-DOS and torch; a symbolic link among the kinds of Unix; their
# mask.
FOLDER, LINK, KIND = 0x10, 0o120000 << 16, 0o170000 << 16

# The bits that tell either from a regular file.
NOT_A_FILE = FOLDER | LINK & ~(0o100000 << 16)

# Bytes read at once for local headers: several headers, where records are small.
WINDOW = 1 << 15

# What a list of names, one a line, contains if one of them may leave the archive or is a folder's.
SUSPECT = ("\\", "\0", "..", "\n/", "/\n")


class Record(NamedTuple):
    """One record."""

    name: str
    data: ByteRange  # its bytes as they are in the file
    # bytes once inflated. crc32: CRC-32 of the inflated bytes; None where the writer left it out (0, torch's
    # `set_crc32_options(False)`).
    size: int
    crc32: int | None
    compression: int  # STORED, DEFLATED, or another number of the format's


# What the central directory says of a record: offset of the local header, name as bytes and as text, flags,
# compression, checksum, bytes in the file, bytes once inflated. Entries sort in the order of the file.
_Entry = tuple[int, bytes, str, int, int, int, int, int]


class _Overlap(Damaged):
    """A record begins before the one listed before it ends."""


def first_name(head: bytes) -> str:
    """Return the name of the record with which a zip begins, of its first bytes; empty for other files."""
    if len(head) < LOCAL_HEADER.size or not head.startswith(b"PK\x03\x04"):
        return ""
    length = LOCAL_HEADER.unpack_from(head)[-2]
    return head[LOCAL_HEADER.size :][:length].decode("utf-8", "replace")


def read_directory(
    source: Source, place: ByteRange | None = None, *, folded: bool = True
) -> dict[str, Record]:
    """Return every record of a zip file by name, in the order of its central directory.

    With `folded`, names that differ in the case of letters alone count as the same.
    """
    place = place or ByteRange(source, 0, source.size)
    count, size, offset = _find_directory(place)
    raw = place.part(offset, size).read()
    find = _records if source.is_local else _unseen_records
    try:
        records = find(place, _entries(place, count, raw), offset)
    except _Overlap:  # or not listed in the order of the file, as no writer of torch's does
        records = find(place, sorted(_entries(place, count, raw)), offset)
    fold = str.lower if folded else str
    if len(set(map(fold, records))) != count:
        _refuse_duplicate(place, (fold(entry[2]) for entry in _entries(place, count, raw)))
    names = "\n" + "\n".join(records) + "\n"
    if any(sign in names for sign in SUSPECT):
        for name, record in records.items():
            _require_plain(place, name, record.size)
    return records


# The end records.


def _find_directory(place: ByteRange) -> tuple[int, int, int]:
    """Return the number of entries, the bytes and the offset of the central directory."""
    tail_size = min(place.nbytes, END.size + FULL16)
    tail = place.part(place.nbytes - tail_size, tail_size).read()
    at = tail.rfind(struct.pack("<I", Signature.END))
    if at < 0 or at + END.size > len(tail):
        raise Damaged(place.path, "is cut short: the zip directory at its end is missing")
    _, disk, start_disk, here, count, size, offset, comment = END.unpack_from(tail, at)
    end = place.nbytes - tail_size + at
    if end + END.size + comment != place.nbytes:
        raise Damaged(place.path, "its zip directory is not at its end")
    if disk or start_disk or here != count:
        raise Unsupported(place.path, "is one volume of a split zip archive")
    count, size, offset, end = _find_directory64(place, end, (count, size, offset))
    if offset + size != end:
        raise Damaged(place.path, "its zip directory is not where the end of the file says")
    return count, size, offset


def _find_directory64(place: ByteRange, end: int, narrow: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Return the same numbers from the ZIP64 end record, which torch always writes, and where that begins."""
    # Without a ZIP64 record they are the narrow ones, and the place of the narrow record, `end`.
    at = end - LOCATOR64.size
    locator = place.part(at, LOCATOR64.size).read() if at >= 0 else bytes(LOCATOR64.size)
    signature, end_disk, position, disks = LOCATOR64.unpack(locator)
    if signature != Signature.LOCATOR64:
        return (*narrow, end)
    # Python would take an extension behind the record for the record.
    fields = END64.unpack(place.part(position, END64.size).read()) if position + END64.size == at else ()
    if fields[:2] != (Signature.END64, END64.size - 12):
        raise Damaged(place.path, "its ZIP64 directory is malformed")
    disk, start_disk, here, count, size, offset = fields[4:]
    if end_disk or disks > 1 or disk or start_disk or here != count:
        raise Unsupported(place.path, "is one volume of a split zip archive")
    for wide, short, full in zip((count, size, offset), narrow, (FULL16, FULL32, FULL32), strict=True):
        if short not in (full, wide):
            raise Damaged(place.path, "its two zip directories disagree")
    return count, size, offset, position


# The central directory.


def _entries(place: ByteRange, count: int, raw: bytes) -> Iterator[_Entry]:
    """Yield the `count` entries of the central directory `raw`, each checked by itself."""
    end = 0
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
            size, packed, header = _widen(place, name, wide, size, packed, header)
        if flags & UNREADABLE:
            raise Unsupported(place.path, f"its record '{name[:80]}' is encrypted or a patch")
        if disk:
            raise Unsupported(place.path, f"its record '{name[:80]}' is in another volume of a split zip")
        if packed != size and method == STORED:
            raise Damaged(place.path, f"its record '{name[:80]}' has two sizes")
        if attributes & NOT_A_FILE:
            _require_file(place, name, attributes, size)
        yield header, raw_name, name, flags, method, crc, packed, size
    if end != len(raw):
        raise Damaged(place.path, "its zip directory is longer than its entries")


def _widen(place: ByteRange, name: str, extra: bytes, *narrow: int) -> list[int]:
    """Replace the numbers that are too narrow by those of the ZIP64 extra field: size, packed, offset."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if position + 4 + length > len(extra):
            break
        if kind == ZIP64_EXTRA:
            numbers = extra[position + 4 : position + 4 + length // 8 * 8]
            wide = [number for (number,) in struct.iter_unpack("<Q", numbers)]
            if len(wide) < narrow.count(FULL32):
                break
            return [wide.pop(0) if number == FULL32 else number for number in narrow]
        position += 4 + length
    raise Damaged(place.path, f"its record '{name[:80]}' lacks its ZIP64 sizes")


def _require_file(place: ByteRange, name: str, attributes: int, size: int) -> None:
    """Refuse a symbolic link, and a folder that holds bytes."""
    if attributes & KIND == LINK:
        raise Damaged(place.path, f"its record '{name[:80]}' is a symbolic link")
    if attributes & FOLDER and size:
        raise Damaged(place.path, f"its record '{name[:80]}' is a folder that holds bytes")


def _refuse_duplicate(place: ByteRange, names: Iterable[str]) -> None:
    """Name the record that is there twice; torch looks for records in any case of letters."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise Damaged(place.path, f"holds the record '{name[:80]}' twice")
        seen.add(name)


def _require_plain(place: ByteRange, name: str, size: int) -> None:
    """Refuse a name that leaves the archive, and a folder's that has bytes, of which torch reads none."""
    if size and name[-1:] == "/":
        raise Damaged(place.path, f"its record '{name[:80]}' is a folder that holds bytes")
    if "\\" in name or "\0" in name or name[:1] == "/" or ".." in name.split("/"):
        raise Damaged(place.path, f"has a record whose name leaves the archive: {name[:80]!r}")


# The local headers.


def _records(place: ByteRange, entries: Iterable[_Entry], limit: int) -> dict[str, Record]:
    """Find each record's bytes by its local header, which must agree with the central directory."""
    records: dict[str, Record] = {}
    unpack, fixed, source, base = LOCAL_HEADER.unpack_from, LOCAL_HEADER.size, place.source, place.offset
    window, start, end, before = b"", 0, 0, ""
    for header, raw_name, name, flags, method, crc, packed, size in entries:
        if header < end:
            raise _Overlap(place.path, f"its records '{before[:80]}' and '{name[:80]}' overlap")
        length = len(raw_name)
        at, named = header - start, header - start + fixed + length
        if named > len(window):
            window = source.read(base + header, max(0, min(max(WINDOW, fixed + length), limit - header)))
            start, at, named = header, 0, fixed + length
            if named > len(window):
                raise Damaged(place.path, f"its record '{name[:80]}' lies outside the file")
        signature, own_flags, own_method, *mine, own_length, extra = unpack(window, at)
        if signature != Signature.LOCAL or own_length != length or window[at + fixed : named] != raw_name:
            raise Damaged(place.path, f"its record '{name[:80]}' has another name in its local header")
        data = header + fixed + length + extra
        theirs = [crc, packed, size]
        # Zeros stand where a data descriptor behind the record has checksum and sizes.
        as_listed = (mine == theirs and FULL32 not in mine) or (flags & DESCRIPTOR and not any(mine))
        if not as_listed or own_flags != flags or own_method != method:
            wide = place.part(data - extra, extra).read()
            _require_agreement(place, name, (own_flags, own_method, *mine), (flags, method, *theirs), wide)
        end, before = data + packed, name
        if end > limit:
            raise Damaged(place.path, f"its record '{name[:80]}' runs past the end of the records")
        records[name] = Record(name, ByteRange(source, base + data, packed), size, crc or None, method)
    return records


ALIGNED = 64  # torch's storages begin at multiples of this

LONGEST_HEADER = LOCAL_HEADER.size + 2 * FULL16

# Bytes of a data descriptor: with signature and narrow or wide sizes, or without.
DESCRIPTORS = (16, 24, 12, 20)


def _unseen_records(place: ByteRange, entries: Iterable[_Entry], limit: int) -> dict[str, Record]:
    """Find each record's bytes by where the next one begins; its local header is checked when they are read.

    The headers lie all over a file, and each would be a request of its own where it is not on this machine.
    """
    listed = [*entries]
    ends = [*(entry[0] for entry in listed[1:]), limit]
    records: dict[str, Record] = {}
    for entry, end in zip(listed, ends, strict=True):
        header, raw_name, name, flags, method, crc, packed, size = entry
        least = header + LOCAL_HEADER.size + len(raw_name)
        behind = DESCRIPTORS if flags & DESCRIPTOR else (0,)
        starts = [end - packed - length for length in behind if end - packed - length >= least]
        if not starts:
            raise _Overlap(place.path, f"its record '{name[:80]}' runs into the one behind it")
        start = next((start for start in starts if start % ALIGNED == 0), starts[0])
        if start - header > LONGEST_HEADER:  # nobody has written what lies between: it is read as in a file
            return _records(place, listed, limit)
        data = ByteRange(place.source, place.offset + start, packed)
        check = partial(_check_header, place, entry, start)
        place.source.guard(data.offset, packed, place.offset + header, check)
        records[name] = Record(name, data, size, crc or None, method)
    return records


def _check_header(place: ByteRange, entry: _Entry, start: int, raw: bytes) -> None:
    """Compare a record's local header with its entry, and with where its bytes were taken to begin."""
    header, raw_name, name, flags, method, *theirs = entry
    signature, own_flags, own_method, *mine, own_length, extra = LOCAL_HEADER.unpack_from(raw)
    named = LOCAL_HEADER.size + own_length
    if signature != Signature.LOCAL or raw[LOCAL_HEADER.size : named] != raw_name:
        raise Damaged(place.path, f"its record '{name[:80]}' has another name in its local header")
    if header + named + extra != start:
        what = f"its record '{name[:80]}' does not lie where the next one's place says"
        raise Unsupported(place.path, what, hint="download it first: a file on this machine is read")
    stated, listed = (own_flags, own_method, *mine), (flags, method, *theirs)
    _require_agreement(place, name, stated, listed, raw[named:])


def _require_agreement(
    place: ByteRange, name: str, mine: tuple[int, ...], theirs: tuple[int, ...], extra: bytes
) -> None:
    """Refuse a local header that means something else than the central directory's entry."""
    flags, method, crc, packed, size = mine
    if FULL32 in (packed, size):
        size, packed = _widen(place, name, extra, size, packed)
    behind = flags & DESCRIPTOR  # which follows the bytes, and leaves zeros here
    same = all(m == t or (m == 0 and behind) for m, t in zip((crc, packed, size), theirs[2:], strict=True))
    if (flags ^ theirs[0]) & (UNREADABLE | DESCRIPTOR) or method != theirs[1] or not same:
        raise Damaged(place.path, f"its record '{name[:80]}' has two headers that disagree")
