"""CRC-32s that can be combined, and rows of bytes with theirs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, reduce

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

# A CRC is the remainder of a polynomial over GF(2). The CRC of two stretches together follows from those of
# both and the length of the second: `crc(ab) = crc(a) · x^(8·len(b)) + crc(b)` modulo the polynomial. zlib
# calls this `crc32_combine`; Python does not offer it. The package `isal` (the extra `fast`) sums six times
# as fast as zlib.

POLYNOMIAL = 0xEDB88320  # x^32 is equal to this; reflected, as zip has it: the highest bit is x^0
ONE, X8 = 1 << 31, 1 << 23


def crc32_of(chunks: Iterable[memoryview]) -> int:
    """Return the CRC-32 of bytes in pieces."""
    return reduce(lambda crc, chunk: crc32(chunk, crc), chunks, 0)


def combined(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two stretches together, `nbytes` the length of the second."""
    exponent = 0
    while first and nbytes:
        if nbytes & 1:
            lowest, low, high, highest = _shift(exponent)
            first = (
                lowest[first & 255] ^ low[first >> 8 & 255] ^ high[first >> 16 & 255] ^ highest[first >> 24]
            )
        nbytes, exponent = nbytes >> 1, exponent + 1
    return first ^ second


@lru_cache(64)
def _shift(exponent: int) -> list[list[int]]:
    """Return what each byte of a CRC, the lowest first, becomes times x^(8 · 2^exponent)."""
    bits = [_square(exponent)]  # what x^0, x^1, … become: the highest bit first
    for _ in range(31):
        bits.append(_times_x(bits[-1]))
    bits.reverse()
    tables = []
    for first in range(0, 32, 8):
        table = [0]
        for bit in bits[first : first + 8]:
            table += [bit ^ below for below in table]
        tables.append(table)
    return tables


@lru_cache(64)
def _square(exponent: int) -> int:
    """Return x^(8 · 2^exponent)."""
    return _product(_square(exponent - 1), _square(exponent - 1)) if exponent else X8


def _product(a: int, b: int) -> int:
    """Return a · b modulo the polynomial."""
    product = 0
    while a:
        if a & ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = _times_x(b)
    return product


def _times_x(a: int) -> int:
    return (a >> 1) ^ (POLYNOMIAL if a & 1 else 0)


# ---- Rows: what of a file is on the disk

# Bytes of a copy that lie in a row: where they begin in the file, how many, and their CRC-32.
Row = tuple[int, int, int]
Rows = dict[int, list[Row]]  # by the place of the copy that they are of


def joined(rows: Iterable[Row]) -> list[Row]:
    """Return rows in order, those that follow each other in one; of two that overlap, the first."""
    found: list[Row] = []
    for begin, nbytes, crc in sorted(rows):
        if not found or begin > sum(found[-1][:2]):
            found.append((begin, nbytes, crc))
        elif begin == sum(found[-1][:2]):
            first, size, before = found[-1]
            found[-1] = first, size + nbytes, combined(before, crc, nbytes)
    return found


def rows_in(listed: object, size: int) -> Rows:
    """Return the rows of a file that a record lists; none if it makes no sense."""
    found: Rows = {}
    try:
        for place, rows in listed.items():  # type: ignore[attr-defined]
            found[int(place)] = joined((int(begin), int(nbytes), int(crc)) for begin, nbytes, crc in rows)
    except (AttributeError, TypeError, ValueError):
        return {}
    ends = [(begin, begin + nbytes) for rows in found.values() for begin, nbytes, _ in rows]
    return found if all(0 <= begin <= end <= size for begin, end in ends) else {}
