"""Numbers that are looked up: what each code stands for in a block is worked out and rounded once.

A block of 128 × 128 has 16,384 elements and 256 codes. The results are those of the formula, for they depend
on nothing but the code and its block. Imports numpy.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from ...lazy import NDArray, np
from ...tensors.cast import Caster, carrier
from ...tensors.dtypes import DTYPES, numpy_type
from ...tensors.ref import LARGEST, Computed, TensorRef
from .fields import Sizes, boxes_in
from .formula import FLOAT, Formula

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


def rounded_to_fp8(values: NDArray[Any], out: NDArray[Any]) -> None:
    """Put the codes of float32 values, rounded to e4m3, into bytes: as ml_dtypes, seven times as fast."""
    # The upper half of a number, its last bit set where the lower one is not 0, is the number rounded to odd.
    # That has digits enough to be rounded once more, to fewer. Source: Boldo and Melquiond 2008.
    bits = values.view("<u4")
    halves = bits & 0xFFFF
    halves += 0xFFFF
    halves |= bits
    _fp8_of_halves().take(halves.view("<u2")[..., 1::2], out=out, mode="clip")


@lru_cache(1)
def _fp8_of_halves() -> NDArray[Any]:
    values = (np.arange(1 << 16, dtype="<u4") << 16).view("<f4")
    with np.errstate(all="ignore"):
        codes: NDArray[Any] = values.astype(numpy_type(DTYPES["float8_e4m3fn"])).view("u1")
    return codes
