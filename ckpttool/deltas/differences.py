"""Blocks of bytes as zstd frames: the standard library's since Python 3.14, else the package `zstandard`."""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..core.lazy import NDArray, np
from ..core.tensors.ref import ByteRange, Computed
from ..errors import Unsupported, install
from .header import BLOCK

# The fastest level packs XORs of weights best: what a longer search finds costs more to say than it saves. A
# table of matches of 2^10 entries finds those that pay, which are near, in half the time of the usual 2^14.
LEVEL, HASH_LOG = 1, 10

Compress = Callable[[Any], bytes]
Decompress = Callable[[memoryview, int], bytes]


class BadFrame(ValueError):
    """A frame that does not hold what it should; its text follows the frame's name."""


def is_there() -> bool:
    """Return whether anything here knows zstd."""
    return _find("compression.zstd") or _find("zstandard")


def require(path: str) -> None:
    """Raise Unsupported if nothing here knows zstd."""
    if not is_there():
        hint = f"{install('delta')}; Python 3.14 has it already"
        raise Unsupported(path, "holds differences packed by zstd, which is not installed", hint=hint)


@cache
def _find(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor its package
        return False


def compressor() -> Compress:
    """Return what packs a block as one frame that states its size, for one thread.

    It has no checksum: the header has those of all frames together, and of what is made of them.
    """
    if _find("compression.zstd"):
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]

        parameter = zstd.CompressionParameter
        options = {parameter.compression_level: LEVEL, parameter.hash_log: HASH_LOG}
        return lambda block: zstd.compress(block, options=options)  # type: ignore[no-any-return,unused-ignore]
    import zstandard

    chosen = zstandard.ZstdCompressionParameters.from_level(
        LEVEL, source_size=BLOCK, hash_log=HASH_LOG, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=chosen).compress


def decompressor() -> Decompress:
    """Return what unpacks a frame that states its size, a given number of bytes at most, for one thread.

    It raises BadFrame for any other frame, and takes no more memory than was given.
    """
    if _find("compression.zstd"):
        return _with_standard_library
    import zstandard

    unpack = zstandard.ZstdDecompressor().decompress

    def decompress(frame: memoryview, most: int) -> bytes:
        try:
            # It sizes the output, whatever is allowed.
            if not 0 <= zstandard.frame_content_size(frame) <= most:
                raise BadFrame("is of another size")
            return unpack(frame, max_output_size=most, allow_extra_data=False)
        except zstandard.ZstdError:
            raise BadFrame("is damaged") from None

    return decompress


def _with_standard_library(frame: memoryview, most: int) -> bytes:
    from compression import zstd

    try:
        nbytes = zstd.get_frame_info(frame).decompressed_size
        if nbytes is None or nbytes > most:
            raise BadFrame("is of another size")
        unpacker = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 23})
        block: bytes = unpacker.decompress(frame, nbytes + 1)
    except zstd.ZstdError:
        raise BadFrame("is damaged") from None
    if len(block) != nbytes or not unpacker.eof or unpacker.unused_data:
        raise BadFrame("is of another size")
    return block


# ---- Frames of whole tensors, as other programs have them: packed and unpacked from front to back.


class _Packed(io.RawIOBase):
    """The bytes of a place, from front to back."""

    def __init__(self, place: ByteRange | Computed) -> None:
        self.place, self.at = place, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, out: Any) -> int:
        """Fill a buffer as far as there are bytes."""
        count = min(len(out), self.place.nbytes - self.at)
        out[:count] = self.place.part(self.at, count).read() if count else b""
        self.at += count
        return count


def taking(place: ByteRange | Computed) -> Callable[[int], bytes]:
    """Return what unpacks a frame from front to back, so many bytes a call; fewer where it ends.

    It takes no more memory than was asked for, and the frame's window of 128 MiB at most. It raises BadFrame.
    """
    if _find("compression.zstd"):
        from compression import zstd

        unpacked: Any = zstd.ZstdFile(_Packed(place))
    else:
        import zstandard as zstd

        unpacked = zstd.ZstdDecompressor().stream_reader(_Packed(place))

    def take(count: int) -> bytes:
        found = b""
        try:
            while len(found) < count and (piece := unpacked.read(count - len(found))):
                found += piece
        except (zstd.ZstdError, EOFError):
            raise BadFrame("is damaged") from None
        return found

    return take


def packing(nbytes: int) -> Any:
    """Return what packs that many bytes as one frame that states its size: `compress(bytes)`, `flush()`."""
    if _find("compression.zstd"):
        from compression import zstd

        frame = zstd.ZstdCompressor(level=LEVEL)
        frame.set_pledged_input_size(nbytes)
        return frame
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL).compressobj(size=nbytes)


# ---- The XOR of a block with the base's as bytes that zstd packs well and fast, and back. Imports numpy.
#
# A step leaves most elements as they were, and a fine-tune the highest byte of most. Zeros are left out,
# of the elements and then of each byte plane of those that changed, where they are most of it: for runs
# of zeros that end at random places zstd takes more time, and more room.


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
