"""One tensor made of the chunks it was saved in; the values are put together when they are written.

Ranks save the parts of a sharded tensor each for itself; a part is a box within the whole. Several ranks may
hold the same part: the copies are compared with each other when the values are read.
"""

from __future__ import annotations

import itertools
import math
import mmap
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, lt, sub

from ..errors import RanksDiffer
from ..lazy import np
from .checked import BadTensor
from .dtypes import DType
from .ref import MAX_BYTES, Computed, TensorRef, extent
from .source import ByteRange, Stretch
from .values import boxed, boxes_of, read_into

MAX_CUTS = 8  # dimensions along which a tensor may be cut; device meshes have three or four

NOTHING = memoryview(b"")

Index = tuple[int, ...]


# Memory of each thread, used again and again: new pages cost as much as what is read into them.
_spare = threading.local()


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A box within a tensor."""

    begin: Index
    tensor: TensorRef  # its shape is the size of the box
    copies: tuple[TensorRef, ...] = ()  # the same values as other ranks saved them
    ranks: tuple[int, ...] = ()  # that saved the tensor and its copies; empty where there are none


def assembled(name: str, path: str, dtype: DType, shape: Index, parts: Sequence[TensorPart]) -> TensorRef:
    """Return a tensor made of parts, unread; raise BadTensor unless they are the whole of it, each once.

    Reading its values raises RanksDiffer where a copy differs in any bit.
    """
    parts = sorted((part for part in parts if part.tensor.numel), key=lambda part: part.begin)
    if extent(shape) * dtype.itemsize > MAX_BYTES or not _tile(shape, parts):
        raise BadTensor(f"'{name}' of shape {str(list(shape))[:80]} whose chunks are not the whole of it")
    joined = _Whole(path, name, dtype.itemsize, shape, parts)
    origins = tuple(tensor.storage for part in parts for tensor in (part.tensor, *part.copies))
    data = Computed.filling(path, math.prod(shape) * dtype.itemsize, joined.fill, joined.stretches)
    return TensorRef.of_bytes(data, dtype, shape, *origins)


def _tile(shape: Index, parts: Sequence[TensorPart]) -> bool:
    """Return whether boxes fill a box without gap or overlap."""
    boxes = [(part.begin, part.tensor.shape) for part in parts]
    if any(len(begin) != len(shape) for begin, _ in boxes):
        return False
    if any(b + s > n for begin, size in boxes for b, s, n in zip(begin, size, shape, strict=True)):
        return False
    cut = [d for d, n in enumerate(shape) if any(size[d] != n for _, size in boxes)]
    if len(cut) > MAX_CUTS or not math.prod(shape):
        return not boxes and not math.prod(shape)
    corners: Counter[Index] = Counter()
    for begin, size in boxes:
        _add_corners(corners, [(begin[d], begin[d] + size[d]) for d in cut], 1)
    _add_corners(corners, [(0, shape[d]) for d in cut], -1)
    return not any(corners.values())


def _add_corners(corners: Counter[Index], sides: Sequence[tuple[int, int]], sign: int) -> None:
    for ends in itertools.product((0, 1), repeat=len(sides)):
        corner = tuple(side[end] for side, end in zip(sides, ends, strict=True))
        corners[corner] += sign * (-1) ** sum(ends)


@dataclass(frozen=True, slots=True)
class _Whole:
    """Make the bytes of the whole; the parts are sorted by where they begin."""

    path: str
    name: str
    width: int
    shape: Index
    parts: Sequence[TensorPart]

    def stretches(self) -> list[Stretch]:
        """Return where the parts lie, if their values follow one another in the whole; else []."""
        found, end = list[Stretch](), 0
        for part in self.parts:
            at = 0
            for i, n in zip(part.begin, self.shape, strict=True):
                at = at * n + i
            # Boxes without gap or overlap are in a row exactly if each begins where those before it end.
            if at != end or part.copies or not part.tensor.is_plain:
                return []
            end += part.tensor.numel
            data = part.tensor.data
            assert isinstance(data, ByteRange)
            found.append((data.nbytes, data))
        return found

    def fill(self, start: int, out: memoryview) -> None:
        """Fill a buffer with the bytes from `start`."""
        for begin, size in boxes_of(self.shape, start // self.width, len(out) // self.width):
            nbytes = math.prod(size) * self.width
            self._fill_box(out[:nbytes], begin, size)
            out = out[nbytes:]

    def _fill_box(self, out: memoryview, low: Index, size: Index) -> None:
        high = tuple(map(add, low, size))
        last = len(self.parts) if not low else bisect_right(self.parts, high, key=lambda part: part.begin)
        for part in self.parts[:last]:
            if low and part.begin[0] + part.tensor.shape[0] <= low[0]:
                continue
            begin = tuple(map(max, low, part.begin))
            end = tuple(map(min, high, map(add, part.begin, part.tensor.shape)))
            if all(map(lt, begin, end)):
                self._put(out, size, tuple(map(sub, begin, low)), part, begin, tuple(map(sub, end, begin)))

    def _put(
        self, out: memoryview, size: Index, at: Index, part: TensorPart, begin: Index, shape: Index
    ) -> None:
        """Put the box of a part that begins at `begin` of the whole to `at` of a box of size `size`."""
        together = len(size)  # from this dimension on the part is as wide as the box
        while together and shape[together - 1] == size[together - 1]:
            together -= 1
        in_one_run = math.prod(shape[: max(together - 1, 0)]) == 1
        nbytes = math.prod(shape) * self.width
        if in_one_run:
            step, first = self.width, 0
            for n, i in zip(reversed(size), reversed(at), strict=True):
                first += i * step
                step *= n
            target = out[first : first + nbytes]
        else:
            # Taken away meanwhile, as a part may itself be made of parts.
            spare, _spare.memory = getattr(_spare, "memory", NOTHING), NOTHING
            if len(spare) < nbytes:
                spare = memoryview(mmap.mmap(-1, nbytes))
            target = spare[:nbytes]
        within = tuple(map(sub, begin, part.begin))
        read_into(target, boxed(part.tensor, within, shape))
        if part.copies:
            self._compare(target, part, within, shape)
        if not in_one_run:
            box = tuple(slice(i, i + n) for i, n in zip(at, shape, strict=True))
            elements = np.frombuffer(out, np.uint8).reshape(*size, self.width)
            elements[box] = np.frombuffer(target, np.uint8).reshape(*shape, self.width)
            _spare.memory = spare

    def _compare(self, values: memoryview, part: TensorPart, begin: Index, shape: Index) -> None:
        other = bytearray(len(values))
        for rank, copy in zip(part.ranks[1:], part.copies, strict=True):
            with memoryview(other) as view:
                read_into(view, boxed(copy, begin, shape))
            if other != values:
                first = part.ranks[0]
                what = f"'{self.name[:80]}' differs between rank {first} and rank {rank}"
                hint = f"take one rank's values: ckpttool.open_ranks(path, take_rank={first})"
                what += ", which should hold the same values"
                raise RanksDiffer(what, path=self.path, ranks=(first, rank), hint=hint)
