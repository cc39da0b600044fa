"""The local headers of a zip's records, which say again what the central directory says, and where bytes lie.

They are read in the order of the file. On this machine those of many small records are read at once, and
compared with the directory column by column.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import partial
from itertools import chain, repeat
from operator import add, le

from ...errors import Damaged, Unsupported
from ...tensors.source import ByteRange
from .zip_entries import UNREADABLE, Entries, Entry, ZipRecord, have_all, in_columns, rows, widened
from .zip_writer import DESCRIPTOR, FULL16, FULL32, Signature

LOCAL_HEADER = struct.Struct("<I2xHH4xIIIHH")

# Bytes read at once for local headers: several headers, where records are small.
WINDOW = 1 << 15


def seen_records(place: ByteRange, blocks: Iterable[Entries], limit: int) -> dict[str, ZipRecord]:
    """Find each record's bytes by its local header, which must agree with the central directory."""
    records: dict[str, ZipRecord] = {}
    end, before = 0, ""
    for block in blocks:
        found = _alike(place, block, end, limit) or _one_by_one(place, block, end, limit, before)
        records.update(zip(block.names, found, strict=True))
        before, data = found[-1][:2]
        end = data.offset - place.offset + data.nbytes
    return records


def _alike(place: ByteRange, block: Entries, end: int, limit: int) -> list[ZipRecord] | None:
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


def _one_by_one(place: ByteRange, block: Entries, end: int, limit: int, before: str) -> list[ZipRecord]:
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
