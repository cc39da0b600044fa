"""Read the directory of a zip file strictly.

Whatever readers of zip files understand differently, torch's and Python's above all, is refused: duplicate
names, a local header that disagrees with the central directory, records that overlap, folders that hold
bytes. The data descriptors behind records are skipped, as all other readers do. A record is a range of the
file; `archive` reads the records that another tool than torch compressed. Format: PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from ...errors import Damaged, Unsupported
from ...tensors.source import ByteRange, Source
from .zip_entries import ZipRecord as ZipRecord
from .zip_entries import entries, in_columns, rows
from .zip_headers import LOCAL_HEADER, seen_records, unseen_records
from .zip_writer import END, END64, FULL16, FULL32, LOCATOR64, Signature

# What a list of names, one a line, contains if one of them may leave the archive or is a folder's.
SUSPECT = ("\\", "\0", "..", "\n/", "/\n")


def first_name(head: bytes) -> str:
    """Return the name of the record with which a zip begins, of its first bytes; empty for other files."""
    if len(head) < LOCAL_HEADER.size or not head.startswith(b"PK\x03\x04"):
        return ""
    length = LOCAL_HEADER.unpack_from(head)[-2]
    return head[LOCAL_HEADER.size :][:length].decode("utf-8", "replace")


def read_directory(
    source: Source, place: ByteRange | None = None, *, folded: bool = True
) -> dict[str, ZipRecord]:
    """Return every record of a zip file by name, in the order of its central directory.

    With `folded`, names that differ in the case of letters alone count as the same.
    """
    place = place or ByteRange(source, 0, source.size)
    count, size, offset = _find_directory(place)
    raw = place.part(offset, size).read()
    find = seen_records if source.is_local else unseen_records
    try:
        records = find(place, entries(place, count, raw), offset)
    except Damaged:
        listed = [*rows(entries(place, count, raw))]
        if listed == (in_order := sorted(listed)):
            raise
        # Not listed in the order of the file, as no writer of torch's does.
        records = find(place, in_columns(in_order), offset)
    names = "\n" + "\n".join(records) + "\n"
    different = {*map(str.lower, records)} if folded and names != names.lower() else records
    if len(different) != count:
        fold = str.lower if folded else str
        _refuse_duplicate(place, (fold(entry[2]) for entry in rows(entries(place, count, raw))))
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
