"""The entries of a zip's central directory, each checked by itself; the records that they tell of.

A checkpoint may hold 100,000 records, whose entries differ in name, checksum, sizes and place alone. Such are
read a few hundred at a time, and each rule is checked for all of them in one C loop; what differs in anything
else is read entry by entry.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from operator import add, le
from typing import NamedTuple

from ....errors import Damaged, Refused, Unsupported
from ...files.commit import Spool
from ...files.crc import crc32_of
from ...files.threads import BUFFER
from ...tensors.ref import ByteRange, Source
from .zip_writer import (
    DEFLATED,
    DESCRIPTOR,
    END64,
    END_OF_ZIP,
    FULL16,
    FULL32,
    LOCATOR64,
    STORED,
    ZIP64_EXTRA,
    Signature,
)

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


# ---- Local headers: they repeat the central directory, and tell where bytes lie.
#
# They are read in the order of the file. On this machine those of many small records are read at once,
# and compared with the directory column by column.


LOCAL_HEADER = struct.Struct("<I2xHH4xIIIHH")

# Bytes read at once for local headers: several headers, where records are small.
WINDOW = 1 << 15


def seen_records(place: ByteRange, blocks: Iterable[Entries], limit: int) -> dict[str, ZipRecord]:
    """Find each record's bytes by its local header, which must agree with the central directory."""
    records: dict[str, ZipRecord] = {}
    end, before = 0, ""
    for block in blocks:
        found = _headers_alike(place, block, end, limit) or _headers_one_by_one(
            place, block, end, limit, before
        )
        records.update(zip(block.names, found, strict=True))
        before, data = found[-1][:2]
        end = data.offset - place.offset + data.nbytes
    return records


def _headers_alike(place: ByteRange, block: Entries, end: int, limit: int) -> list[ZipRecord] | None:
    """Return records whose headers say the same in the same words, if all is well with them; else None."""
    headers, raw_names, names, flags, methods, crcs, packed, sizes = block
    named = len(raw_names[0])
    local = struct.Struct(f"<14xIII2xH{named}s")
    if {*map(len, raw_names)} != {named} or headers[-1] + local.size > limit or headers[0] < end:
        return None
    if {*flags} != {flags[0]} or {*methods} != {methods[0]} or FULL32 in packed or FULL32 in sizes:
        return None  # a size of FULL32 itself has to be said again in a ZIP64 field
    if not all(map(le, headers, headers[1:])):
        return None
    lines = place.source.read_near([(place.offset + header, local.size) for header in headers])
    found = b"".join(lines)
    in_common = (0, Signature.LOCAL, "<I"), (6, flags[0], "<H"), (8, methods[0], "<H"), (26, named, "<H")
    if not all(have_all(found, local.size, at, struct.pack(form, n)) for at, n, form in in_common):
        return None
    *own, extras, own_names = zip(*local.iter_unpack(found), strict=True)
    if own_names != raw_names:
        return None
    if own != [crcs, packed, sizes] and not (flags[0] & DESCRIPTOR and {*chain(*own)} == {0}):
        return None  # zeros stand where a data descriptor behind the record has checksum and sizes
    begins = [header + local.size + extra for header, extra in zip(headers, extras, strict=True)]
    ends = [*map(add, begins, packed)]
    if ends[-1] > limit or not all(map(le, ends, headers[1:])):
        return None
    # NamedTuples made in a C loop, which takes a third of the time of a call each.
    starts = map(place.offset.__add__, begins)
    data = map(partial(tuple.__new__, ByteRange), zip(repeat(place.source), starts, packed))
    stated = [crc or None for crc in crcs] if 0 in crcs else crcs
    return [*map(partial(tuple.__new__, ZipRecord), zip(names, data, sizes, stated, methods, strict=True))]


def _headers_one_by_one(
    place: ByteRange, block: Entries, end: int, limit: int, before: str
) -> list[ZipRecord]:
    """Return the record of each entry; refuse the first that is wrong."""
    records: list[ZipRecord] = []
    unpack, fixed, source, base = LOCAL_HEADER.unpack_from, LOCAL_HEADER.size, place.source, place.offset
    window, start = b"", 0
    for header, raw_name, name, flags, method, crc, packed, size in rows([block]):
        if header < end:
            raise Damaged(place.path, f"its records '{before[:80]}' and '{name[:80]}' overlap")
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
        records.append(ZipRecord(name, ByteRange(source, base + data, packed), size, crc or None, method))
    return records


ALIGNED = 64  # torch's storages begin at multiples of this

LONGEST_HEADER = LOCAL_HEADER.size + 2 * FULL16

# Bytes of a data descriptor: with signature and narrow or wide sizes, or without.
DESCRIPTORS = (16, 24, 12, 20)


def unseen_records(place: ByteRange, blocks: Iterable[Entries], limit: int) -> dict[str, ZipRecord]:
    """Find each record's bytes by where the next one begins; its local header is checked when they are read.

    The headers lie all over a file, and each would be a request of its own where it is not on this machine.
    """
    listed = [*rows(blocks)]
    ends = [*(entry[0] for entry in listed[1:]), limit]
    records: dict[str, ZipRecord] = {}
    for entry, end in zip(listed, ends, strict=True):
        header, raw_name, name, flags, method, crc, packed, size = entry
        least = header + LOCAL_HEADER.size + len(raw_name)
        behind = DESCRIPTORS if flags & DESCRIPTOR else (0,)
        starts = [end - packed - length for length in behind if end - packed - length >= least]
        if not starts:
            raise Damaged(place.path, f"its record '{name[:80]}' runs into the one behind it")
        start = next((start for start in starts if start % ALIGNED == 0), starts[0])
        if start - header > LONGEST_HEADER:  # nobody has written what lies between: it is read as in a file
            return seen_records(place, in_columns(listed), limit)
        data = ByteRange(place.source, place.offset + start, packed)
        check = partial(_check_header, place, entry, start)
        place.source.guard(data.offset, packed, place.offset + header, check)
        records[name] = ZipRecord(name, data, size, crc or None, method)
    return records


def _check_header(place: ByteRange, entry: Entry, start: int, raw: bytes) -> None:
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
        size, packed = widened(place, name, extra, size, packed)
    behind = flags & DESCRIPTOR  # which follows the bytes, and leaves zeros here
    same = all(m == t or (m == 0 and behind) for m, t in zip((crc, packed, size), theirs[2:], strict=True))
    if (flags ^ theirs[0]) & (UNREADABLE | DESCRIPTOR) or method != theirs[1] or not same:
        raise Damaged(place.path, f"its record '{name[:80]}' has two headers that disagree")


# ---- The directory, read strictly.
#
# Whatever readers of zip files understand differently, torch's and Python's above all, is refused:
# duplicate names, a local header that disagrees with the central directory, records that overlap, folders
# that hold bytes. The data descriptors behind records are skipped, as all other readers do. A record is a
# range of the file; `archive` reads the records that another tool than torch compressed. Format: PKWARE
# APPNOTE 6.3.


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
    tail_size = min(place.nbytes, END_OF_ZIP.size + FULL16)
    tail = place.part(place.nbytes - tail_size, tail_size).read()
    at = tail.rfind(struct.pack("<I", Signature.END))
    if at < 0 or at + END_OF_ZIP.size > len(tail):
        raise Damaged(place.path, "is cut short: the zip directory at its end is missing")
    _, disk, start_disk, here, count, size, offset, comment = END_OF_ZIP.unpack_from(tail, at)
    end = place.nbytes - tail_size + at
    if end + END_OF_ZIP.size + comment != place.nbytes:
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


# ---- The bytes of records: as they lie in the file, or inflated.
#
# For a stream that is cut short torch returns uninitialised memory. Here a record must have exactly the
# size and the checksum that the directory states. Records are inflated into an unnamed temporary file, so
# that they are byte ranges again. Sizes are checked before a byte is written: deflate can't make more
# than 1032 bytes of one, and all records together may not grow without bound.


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
