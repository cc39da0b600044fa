"""The XOR of a block with the base's as bytes that zstd packs well and fast, and back. Imports numpy.

A step leaves most elements as they were, and a fine-tune the highest byte of most. Zeros are left out, of
the elements and then of each byte plane of those that changed, where they are most of it: for runs of zeros
that end at random places zstd takes more time, and more room.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any

from ...lazy import NDArray, np
from .header import BLOCK

if TYPE_CHECKING:
    Bytes = NDArray[np.uint8]
    Places = NDArray[np.int64]

UNSIGNED = {width: f"<u{width}" for width in (1, 2, 4, 8)}  # numpy's types of that many bytes

# Zeros are left out where at most one in so many is none. With more of those zstd is as good, and faster.
FEW = 3

SIZE = struct.Struct("<I")  # how many bytes of gaps follow
GOES_ON = 255  # a byte of a gap that the next byte belongs to

_of_thread = threading.local()


class BadDifference(ValueError):
    """Bytes that are no difference; its text follows their name."""


def largest(nbytes: int, width: int) -> int:
    """Return how many bytes the difference of a block of elements of `width` bytes has at most."""
    return nbytes + SIZE.size * (1 + width)


def few_places(items: NDArray[Any]) -> Places | None:
    """Return where the items lie that are not zero; None if those are many."""
    kept = items != 0  # numpy counts and finds booleans much faster
    return np.flatnonzero(kept) if np.count_nonzero(kept) * FEW <= len(items) else None


def packable(changes: NDArray[Any], places: Places | None) -> memoryview:
    """Return the XOR of a block as bytes that zstd packs.

    The next call of a thread writes over what this returned.

    Args:
        changes: unsigned numbers, one for each element.
        places: `few_places` of them.
    """
    width = changes.itemsize
    out = _scratch("packable", "u1", largest(BLOCK, width))
    at = _put_gaps(out, 0, places)
    values = changes if places is None else changes[places]
    shifted = _scratch("shifted", values.dtype.str, BLOCK // width)[: len(values)]
    for number in range(width):
        plane = out[at + SIZE.size :][: len(values)]
        np.right_shift(values, np.array(8 * number, values.dtype), out=shifted)
        np.copyto(plane, shifted, casting="unsafe")
        few = few_places(plane)
        items = plane if few is None else plane[few]
        at = _put_gaps(out, at, few)
        if few is not None:
            out[at : at + len(items)] = items
        at += len(items)
    return out[:at].data


def unpack(raw: bytes, values: NDArray[Any]) -> None:
    """XOR the elements of a base's block in place with a difference. Raises BadDifference."""
    reader = _Reader(np.frombuffer(raw, np.uint8))
    places = reader.places(len(values))
    changed = values if places is None else np.zeros(len(places), values.dtype)
    for number in range(values.itemsize):
        few = reader.places(len(changed))
        _xor_plane(changed, number, few, reader.take(len(changed) if few is None else len(few)))
    if len(reader.rest):
        raise BadDifference("holds more than a block")
    if places is not None:
        values[places] ^= changed


def _xor_plane(values: NDArray[Any], number: int, places: Places | None, items: Bytes) -> None:
    """XOR one byte of each element, or of those at some places, in place."""
    if places is not None:
        values.view("u1")[number :: values.itemsize][places] ^= items
        return
    other = _scratch("shifted", values.dtype.str, BLOCK // values.itemsize)[: len(values)]
    np.copyto(other, items)
    if number:
        np.left_shift(other, np.array(8 * number, values.dtype), out=other)
    values ^= other


def _put_gaps(out: Bytes, at: int, places: Places | None) -> int:
    """Write how many items are left out before each that is not, after the bytes that takes; return the end.

    A gap is as many bytes of 255 as go into it, and the rest as one byte.
    """
    begin = at + SIZE.size
    if places is None:
        end = begin
    elif not len(places):
        end = begin + 1
        out[begin] = GOES_ON
    else:
        gaps = places.copy()
        gaps[1:] -= places[:-1] + 1
        more = gaps // GOES_ON  # much faster than divmod
        ends = np.cumsum(more + 1)
        end = begin + int(ends[-1])
        out[begin:end] = GOES_ON
        out[begin:end][ends - 1] = gaps - more * GOES_ON
    SIZE.pack_into(out.data, at, end - begin)
    return end


class _Reader:
    """The bytes of a difference, from front to back."""

    def __init__(self, raw: Bytes) -> None:
        self.rest = raw

    def take(self, count: int) -> Bytes:
        if len(self.rest) < count:
            raise BadDifference("is cut short")
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def places(self, count: int) -> Places | None:
        """Return which of `count` items were not left out; None if none was."""
        (size,) = SIZE.unpack(self.take(SIZE.size).data)
        if not size:
            return None
        gaps = self.take(size)
        ends = np.flatnonzero(gaps != GOES_ON)
        places = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
        if len(places) and places[-1] >= count:
            raise BadDifference(f"has a place outside of {count}")
        return places


def _scratch(name: str, kind: str, count: int) -> NDArray[Any]:
    """Return memory of this thread, which is used again: new pages cost more than what is done in them."""
    kept: dict[tuple[str, str], NDArray[Any]] = _of_thread.__dict__.setdefault("scratch", {})
    if (name, kind) not in kept or len(kept[name, kind]) < count:
        kept[name, kind] = np.empty(count, kind)
    return kept[name, kind]
