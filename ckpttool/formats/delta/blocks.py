"""Tensors made of a base's values and of what a delta says of them, a block at a time. Imports numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...errors import Damaged
from ...files.threads import cut
from ...lazy import NDArray, np
from ...tensors.ref import Computed, TensorRef
from ...tensors.source import ByteRange
from ...tensors.values import read_into, stretches
from . import compression
from .differences import UNSIGNED, BadDifference, largest, unpack
from .header import BLOCK

# Places that are read together: 1 MiB of them, of 8 bytes each.
MANY = 1 << 17

Make = Callable[[int, memoryview], None]

_of_thread = threading.local()


def computed(path: str, nbytes: int, make: Make, require: Callable[[], None] | None = None) -> Computed:
    """Return bytes of which `make(number, buffer)` makes a whole block."""

    def fill(start: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            number, skipped = divmod(start + done, BLOCK)
            size = min(BLOCK, nbytes - number * BLOCK)
            count = min(size - skipped, len(out) - done)
            if count == size:
                make(number, out[done : done + count])
            else:
                with memoryview(bytearray(size)) as block:
                    make(number, block)
                    out[done : done + count] = block[skipped : skipped + count]
            done += count

    return replace(Computed.filling(path, nbytes, fill), require=require)


def fill_values(tensor: TensorRef, start: int, out: memoryview) -> None:
    """Fill a buffer with a stretch of a tensor's values: row-major, little-endian, whole elements."""
    if tensor.is_stretch:
        data, done = tensor.data.part(start, len(out)), 0
        for piece in data.chunks(out):
            if isinstance(data, Computed) and data.fill is None:
                out[done : done + len(piece)] = piece
            done += len(piece)
        return
    width, done = tensor.dtype.itemsize, 0
    for part in stretches(tensor, start // width, len(out) // width):
        read_into(out[done : done + part.nbytes], part)
        done += part.nbytes


@dataclass
class Xored:
    """The values of a base, XORed with the differences that the frames of a payload hold.

    A payload is the frame of each block, one after another, and at its end the size of each as 4 bytes,
    little-endian. A size of 0 stands for a block that is the base's.
    """

    name: str
    base: TensorRef
    payload: ByteRange

    def make(self, number: int, out: memoryview) -> None:
        """Fill a buffer with a block."""
        begin, end = self._places[number : number + 2].tolist()
        fill_values(self.base, number * BLOCK, out)
        if begin == end:
            return
        if not hasattr(_of_thread, "decompress"):
            compression.require(self.payload.path)
            _of_thread.decompress = compression.decompressor()
        frame, width = memoryview(self.payload.part(begin, end - begin).read()), self.base.dtype.itemsize
        try:
            raw = _of_thread.decompress(frame, largest(len(out), width))
            unpack(raw, np.frombuffer(out, UNSIGNED[width]))
        except (compression.BadFrame, BadDifference) as fault:
            raise self._damaged(f"frame {number} {fault}") from None

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """Where each frame begins, and the end of the last."""
        count = -(-self.base.nbytes // BLOCK)
        frames = self.payload.nbytes - 4 * count
        if frames < 0:
            raise self._damaged("its sizes of frames are cut short")
        sizes = np.frombuffer(self.payload.part(frames, 4 * count).read(), "<u4")
        places = np.zeros(count + 1, np.int64)
        np.cumsum(sizes, out=places[1:])
        if places[-1] != frames:
            raise self._damaged("its sizes of frames do not add up")
        return places

    def _damaged(self, what: str) -> Damaged:
        return Damaged(self.payload.path, f"'{self.name[:80]}' is no difference: {what}")


@dataclass
class Patched:
    """The values of a base, others in some places: flat, ascending, each once."""

    name: str
    base: TensorRef
    places: TensorRef
    values: TensorRef

    def make(self, number: int, out: memoryview) -> None:
        """Fill a buffer with a block."""
        width = self.base.dtype.itemsize
        begin, end = self._starts[number : number + 2].tolist()
        fill_values(self.base, number * BLOCK, out)
        elements, first = np.frombuffer(out, UNSIGNED[width]), number * BLOCK // width
        for start, count in cut(end - begin, MANY):
            places = self._read(begin + start, count)
            values = np.empty(count, UNSIGNED[width])
            fill_values(self.values, (begin + start) * width, _bytes(values))
            elements[places - first] = values

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """How many places lie before each block, and all; checks each place."""
        starts = np.zeros(-(-self.base.nbytes // BLOCK) + 1, np.int64)
        last = -1
        for begin, count in cut(self.places.numel, MANY):
            places = self._read(begin, count)
            if places[0] <= last or (np.diff(places) <= 0).any():
                raise self._damaged("its places do not ascend")
            last = int(places[-1])
            if last >= self.base.numel:
                raise self._damaged(f"place {last} is outside its {self.base.numel} elements")
            blocks = places // (BLOCK // self.base.dtype.itemsize)
            starts[1:] += np.bincount(blocks, minlength=len(starts) - 1)
        return np.cumsum(starts)

    def _read(self, first: int, count: int) -> NDArray[np.int64]:
        width = self.places.dtype.itemsize
        raw = np.empty(count, f"<i{width}")
        fill_values(self.places, first * width, _bytes(raw))
        return raw.astype(np.int64)

    def _damaged(self, what: str) -> Damaged:
        return Damaged(self.places.storage.data.path, f"'{self.name[:80]}' is no difference: {what}")


def _bytes(values: NDArray[Any]) -> memoryview:
    return memoryview(values.view("u1"))  # type: ignore[arg-type]


def values_of(path: str, tensor: TensorRef) -> Computed:
    """Return the values of a tensor that are not one stretch of bytes, row-major and little-endian."""
    return computed(path, tensor.nbytes, lambda number, out: fill_values(tensor, number * BLOCK, out))
