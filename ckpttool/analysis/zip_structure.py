"""The bytes of a zip between its records' contents: headers, padding, descriptors, directory.

The reader refuses what readers of zips would understand differently. Here the rest is compared with what it
should be, and what nothing determines is counted. Format: PKWARE APPNOTE 6.3; torch's padding:
`caffe2/serialize/inline_container.cc`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence

from ..files.gathering import MOST_PIECES
from ..formats.pytorch import zip_writer
from ..formats.pytorch.zip_entries import extra_fields
from ..formats.pytorch.zip_reader import ZipRecord, read_directory
from ..formats.pytorch.zip_writer import CENTRAL, END, FULL32, LOCAL, LOCATOR64, PADDING_EXTRA, ZIP64_EXTRA
from ..tensors.source import Source

# A descriptor behind a record by its size: signature, CRC-32, bytes in the file, bytes once inflated
DESCRIPTORS = {16: struct.Struct("<4sIII"), 24: struct.Struct("<4sIQQ")}

DESCRIPTOR_SIGNATURE = b"PK\x07\x08"

# Bytes of a directory entry that nothing determines: version made by, internal and external attributes
FREE_IN_ENTRY = 8

FREE_AT_END = 4  # Bytes of a ZIP64 end record that nothing determines: its two versions


def zip_frame(source: Source) -> tuple[list[tuple[str, str]], Counter[str]]:
    """Compare the bytes around the records of a zip with what they should be.

    Returns pairs of a record and what is wrong around it, and how many bytes nothing determines, by what they
    are.
    """
    records = sorted(read_directory(source).values(), key=lambda record: record.data.offset)
    start, entries = _directory(source, len(records))
    faults: list[tuple[str, str]] = []
    free: Counter[str] = Counter({"header fields": FREE_IN_ENTRY * len(records)})
    ends = [header for header, _, _ in entries[1:]] + [start]
    if entries:
        free["between records"] += entries[0][0]
    between = _between(source, records, [header for header, _, _ in entries], ends)
    for record, (_, fields, extra), end, (before, after) in zip(records, entries, ends, between, strict=True):
        local = LOCAL.unpack_from(before)
        if local[1:6] != fields[2:7]:
            faults.append((record.name, "its two headers differ in version, flags or time"))
        own = bytes(before[len(before) - local[-1] :])
        for piece in (own, extra):
            parts = [*extra_fields(piece)]
            padding = b"".join(data for kind, data in parts if kind == PADDING_EXTRA)
            wide = sum(len(data) for kind, data in parts if kind == ZIP64_EXTRA and FULL32 in fields)
            # Readers pass over extra fields that they do not know, so nothing determines kind and length.
            free["header fields"] += len(piece) - len(padding) - wide
            if padding.strip(b"Z"):
                faults.append((record.name, "its padding is not what torch pads with"))
        gap = end - record.data.offset - record.data.nbytes
        descriptor = DESCRIPTORS.get(gap)
        if fields[3] & zip_writer.DESCRIPTOR and descriptor:
            if descriptor.unpack(after) != (DESCRIPTOR_SIGNATURE, fields[7], record.data.nbytes, record.size):
                faults.append((record.name, "the descriptor behind it does not fit it"))
        else:
            free["between records"] += gap
    size = sum(CENTRAL.size + fields[10] + fields[11] + fields[12] for _, fields, _ in entries)
    free["comments"] += sum(fields[12] for _, fields, _ in entries)
    rest = source.size - start - size - END.size
    if rest >= zip_writer.END64.size + LOCATOR64.size:
        free["header fields"] += FREE_AT_END
        rest -= zip_writer.END64.size + LOCATOR64.size
    free["comments"] += rest
    return faults, +free


def _between(
    source: Source, records: Sequence[ZipRecord], headers: Sequence[int], ends: Sequence[int]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield what stands before each record and behind it, as far as a descriptor may; many read together."""
    for first in range(0, len(records), MOST_PIECES):
        ranges: list[tuple[int, int]] = []
        for number in range(first, min(first + MOST_PIECES, len(records))):
            data = records[number].data
            behind = data.offset + data.nbytes
            longest = min(ends[number] - behind, max(DESCRIPTORS))  # what lies there may fill the memory
            ranges += (headers[number], data.offset - headers[number]), (behind, longest)
        found = source.read_near(ranges)
        yield from zip(found[::2], found[1::2], strict=True)


def _directory(source: Source, count: int) -> tuple[int, list[tuple[int, tuple[int, ...], bytes]]]:
    """Return where the directory begins; of each entry where its header is, its fields and extra fields."""
    tail = source.read(max(0, source.size - END.size - 0xFFFF), min(source.size, END.size + 0xFFFF))
    at = tail.rfind(b"PK\x05\x06")
    size, start = END.unpack_from(tail, at)[5:7]
    end = source.size - len(tail) + at - LOCATOR64.size
    signature, _, wide, _ = LOCATOR64.unpack(source.read(end, LOCATOR64.size)) if end >= 0 else (0, 0, 0, 0)
    if signature == zip_writer.Signature.LOCATOR64:
        size, start = zip_writer.END64.unpack(source.read(wide, zip_writer.END64.size))[8:10]
    raw, at, entries = source.read(start, size), 0, []
    for _ in range(count):
        fields = CENTRAL.unpack_from(raw, at)
        begin = at + CENTRAL.size + fields[10]
        extra = raw[begin : begin + fields[11]]
        header = fields[16]
        if header == FULL32:
            (header,) = struct.unpack_from("<Q", extra, len(extra) - 8)
        entries.append((header, fields, extra))
        at = begin + fields[11] + fields[12]
    return start, sorted(entries, key=lambda entry: entry[0])
