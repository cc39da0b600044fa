"""Tensors read with their last two axes swapped, in strips that serve many boxes.

A row of the swapped tensor lies scattered over the file: reading it costs a call for each column, however few
rows are read together. So a strip of rows is read, and a few are kept for all tensors. Imports numpy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import prod
from threading import Lock
from typing import Any

from ..core.lazy import NDArray, np
from ..core.tensors.cast import Caster, carrier
from ..core.tensors.ref import LARGEST, ByteRange, Computed, DType, TensorRef
from .formula import FLOAT, Field, Formula, Sizes, boxes_in, carried, elements

STRIP, KEPT_STRIPS = 4 << 20, 12  # bytes of a strip, and how many are kept
FEWEST = 16  # rows of a strip: of longer rows each box is read alone
APART = 64  # bytes between rows in memory: a power of two from one to the next, and a column evicts itself


@dataclass(slots=True)
class _Strip:
    lock: Lock = field(default_factory=Lock)
    values: Any = None


class Strips:
    """The strips that were read last, of all tensors of a checkpoint. Several threads may ask at once."""

    def __init__(self) -> None:
        self._strips: OrderedDict[object, _Strip] = OrderedDict()
        self._lock = Lock()

    def turned(self, tensor: TensorRef) -> Field:
        """Return the elements of a tensor with its last two axes swapped."""
        whole, shape = elements(tensor), _turned(tensor.shape)
        rows = STRIP // max(shape[-1] * tensor.dtype.itemsize, 1)

        def read(begin: Sizes, size: Sizes) -> NDArray[Any]:
            if rows < FEWEST:
                return np.ascontiguousarray(whole.read(_turned(begin), _turned(size)).swapaxes(-1, -2))
            out = np.empty(size, carried(tensor.dtype))
            first, end = begin[-2], begin[-2] + size[-2]
            columns = slice(begin[-1], begin[-1] + size[-1])
            for outer in product(*map(range, size[:-2])):
                at, matrix = tuple(i + j for i, j in zip(begin, outer, strict=False)), out[outer]
                for start in range(first - first % rows, end, rows):
                    low, high = max(first, start), min(end, start + rows)
                    values = self._strip(whole, tensor, (*at, start), min(rows, shape[-2] - start))
                    matrix[low - first : high - first] = values[low - start : high - start, columns]
            return out

        return Field(shape, read, whole.storages, tensor.dtype)

    def _strip(self, whole: Field, tensor: TensorRef, at: Sizes, rows: int) -> Any:
        """Return rows of a swapped matrix from the last of these places on."""
        with self._lock:
            strip = self._strips.setdefault((tensor, at), _Strip())
            self._strips.move_to_end((tensor, at))
            if len(self._strips) > KEPT_STRIPS:
                self._strips.popitem(last=False)
        with strip.lock:  # the first of several threads reads it
            if strip.values is None:
                strip.values = _columns(whole, tensor, at, rows).T.copy()
        return strip.values


def _turned(sizes: Sizes) -> Sizes:
    return (*sizes[:-2], sizes[-1], sizes[-2])


def _columns(whole: Field, tensor: TensorRef, at: Sizes, count: int) -> NDArray[Any]:
    """Return some columns of a matrix, a call for each row: to map its page would cost more."""
    data: Any
    data, width, rows = tensor.storage.data, tensor.dtype.itemsize, tensor.shape[-2]
    nbytes = count * width
    raw = np.empty((rows, nbytes + APART), np.uint8)
    values: NDArray[Any] = raw[:, :nbytes].view(carried(tensor.dtype))
    is_here = isinstance(data, ByteRange) and data.source.is_local
    if count == tensor.shape[-1] or not (is_here and tensor.stride[-1] == 1) or tensor.is_swapped:
        box = whole.read((*at[:-1], 0, at[-1]), (*(1 for _ in at[:-1]), rows, count))
        values[...] = box.reshape(rows, count)
        return values
    view = memoryview(raw.reshape(-1))  # type: ignore[arg-type]
    outer = sum(i * step for i, step in zip(at[:-1], tensor.stride, strict=False))
    start, step = data.offset + (tensor.offset + outer + at[-1]) * width, nbytes + APART
    for row in range(rows):
        part = view[row * step : row * step + nbytes]
        data.source.fill(start + row * tensor.stride[-2] * width, part)
    return values


# ---- Lookup: the number of each code in a block is computed and rounded once
#
# A block of 128 × 128 has 16,384 elements and 256 codes. The results are those of the formula, for they
# depend on nothing but the code and its block. Imports numpy.


PIECE = 1 << 21  # elements of a piece; one costs hundreds of calls of Python, whatever its size
TILE = 1 << 16  # elements that are looked up together, so that numpy's indices stay in the processor's cache
KEPT = 8 << 20  # bytes of an array that the allocator keeps


def rounded(formula: Formula, caster: Caster, shape: Sizes) -> TensorRef:
    """Return the numbers of a formula in the caster's type, which are computed when they are read."""
    tensor = caster.cast(formula.tensor(shape))
    blocks = {(grid.block, id(grid.index)) for grid in formula.grids}
    if tensor.dtype is FLOAT or not formula.codes.codes or len(blocks) != 1:
        return tensor
    _keep_freed_memory()
    data = tensor.storage.data
    assert isinstance(data, Computed)
    fill = _Lookup(formula, caster, data).fill
    looked_up = Computed.filling(data.path, data.nbytes, fill, together=LARGEST)
    storage = replace(tensor.storage, data=replace(looked_up, require=data.require))
    return replace(tensor, storage=storage)


@lru_cache(1)
def _keep_freed_memory() -> None:
    """Make the allocator keep what numpy frees: memory from the system costs more than what fills it."""
    # glibc returns less the larger the largest block is that it got from the system and returned: mallopt(3).
    np.empty(KEPT, np.uint8)


class _Lookup:
    """Fills memory with numbers that are looked up, or computed one by one where blocks are small."""

    def __init__(self, formula: Formula, caster: Caster, computed: Computed) -> None:
        self._formula, self._caster, self._computed = formula, caster, computed
        self._codes, self._grid = formula.codes, formula.grids[0]

    def fill(self, start: int, out: memoryview) -> None:
        width = self._caster.to.itemsize
        values = np.frombuffer(out, carrier(self._caster.to))
        for begin, size in boxes_in(self._codes.shape, start // width, len(values), PIECE):
            count = prod(size)
            if not self._looked_up(values[:count].reshape(size), begin):
                done = len(out) - values.nbytes
                for piece in self._computed.make(start + done, count * width):
                    out[done : done + len(piece)] = piece
                    done += len(piece)
            values = values[count:]

    def _looked_up(self, box: NDArray[Any], begin: Sizes) -> bool:
        """Put the numbers of a box into an array of its size; return False where this gains nothing."""
        first, sizes = self._grid.blocks(begin, box.shape)
        if 2 * prod(sizes) * self._codes.codes > box.size:
            return False
        codes = self._codes.read(begin, box.shape)
        each = np.arange(self._codes.codes, dtype=np.uint8).view(codes.dtype)
        table = self._caster.without_loss(self._formula.table(each, first, sizes))
        if table is None:
            return False
        places = self._places(begin, box.shape, first)
        _look_up(table, codes.view(np.uint8), places, box)
        return True

    def _places(self, begin: Sizes, size: Sizes, first: Sizes) -> list[NDArray[Any]]:
        """Return the block of each element along each axis, counted from the first."""
        places = [
            np.arange(at, at + n) // block - start
            for at, n, block, start in zip(begin, size, self._grid.block, first, strict=True)
        ]
        if self._grid.index is not None:
            places[-1] = self._grid.places(begin[-1], size[-1])
        return places


def _look_up(table: NDArray[Any], codes: NDArray[Any], places: list[NDArray[Any]], out: NDArray[Any]) -> None:
    """Put what codes stand for into an array, by a table of [blocks along each axis, codes]."""
    rows = max(1, TILE // prod(out.shape[1:]))
    tiles = [slice(row, row + rows) for row in range(0, len(out), rows)]
    spans = [(int(places[0][tile].min()), int(places[0][tile].max()) + 1) for tile in tiles]
    # Two bytes for an index, where each tile is looked up in its own part of the table.
    most = max((end - start for start, end in spans), default=0)
    kind = np.uint16 if most * prod(table.shape[1:]) <= 1 << 16 else np.int64
    steps = [step // table.itemsize for step in table.strides]
    first, *others = np.ix_(*(at * step for at, step in zip(places, steps, strict=False)))
    inner: Any = sum(each.astype(kind) for each in others)
    for tile, (start, end) in zip(tiles, spans, strict=True):
        of_rows = (first[tile] - start * steps[0]).astype(kind)
        within = inner if end - start == 1 else of_rows + inner
        table[start:end].reshape(-1).take(codes[tile] + within, out=out[tile], mode="clip")


def round_to(dtype: DType, values: NDArray[Any], out: NDArray[Any]) -> None:
    """Put the codes of float32 values, rounded to e4m3 or e2m1, into bytes: as ml_dtypes, but faster."""
    # The upper half of a number, its last bit set where the lower one is not 0, is the number rounded to odd.
    # That has digits enough to be rounded once more, to fewer. Source: Boldo and Melquiond 2008.
    bits = values.view("<u4")
    halves = bits & 0xFFFF
    halves += 0xFFFF
    halves |= bits
    _of_halves(dtype.name).take(halves.view("<u2")[..., 1::2], out=out, mode="clip")


@lru_cache(2)
def _of_halves(name: str) -> NDArray[Any]:
    import ml_dtypes

    values = (np.arange(1 << 16, dtype="<u4") << 16).view("<f4")
    with np.errstate(all="ignore"):
        codes: NDArray[Any] = values.astype(getattr(ml_dtypes, name.removesuffix("_x2"))).view("u1")
    return codes
