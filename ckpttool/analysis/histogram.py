"""A histogram of values that come in blocks, in one pass and bounded memory. Imports numpy when called."""

from __future__ import annotations

import math
from typing import Any

from ..lazy import NDArray, np

FINE = 1024  # cells of the grid, at most; a bin is the sum of many
DIGITS = 60  # bits of a cell's number: it is an int64


class Histogram:
    """Counts on a grid of cells 2^e wide, where e grows with the range of the values.

    Cells of one grid lie whole in those of a wider one, so neither the size nor the order of blocks makes a
    difference.
    """

    def __init__(self) -> None:
        self.count = 0
        self.least = self.most = 0.0
        self._exponent: int | None = None  # None while all values are equal
        self._first = 0  # the number of the cell that the first count is of
        self._counts: NDArray[Any] | None = None

    def add(self, block: NDArray[Any]) -> None:
        """Add finite numbers: (n,), n > 0."""
        least, most = float(block.min()), float(block.max())
        if self.count:
            before = self.least, self.most
            self.least, self.most = min(before[0], least), max(before[1], most)
        else:
            before = self.least, self.most = least, most
        if self.least < self.most:
            exponent = _exponent(self.least, self.most)
            if self._exponent is None:
                self._first, self._counts = _cell(before[0], exponent), np.array([self.count])
            else:
                self._widen(exponent - self._exponent)
            self._exponent = exponent
            cells = np.floor(np.ldexp(block.astype("f8"), -exponent)).astype("i8")
            cells[(block < 0) & (cells == 0)] = -1  # of a number too small to be scaled
            self._insert(int(cells.min()), np.bincount(cells - cells.min()))
        self.count += len(block)

    def _widen(self, bits: int) -> None:
        if bits and self._counts is not None:
            cells = np.arange(self._first, self._first + len(self._counts)) >> bits
            self._first = int(cells[0])
            self._counts = np.bincount(cells - self._first, weights=self._counts).astype("i8")

    def _insert(self, first: int, counts: NDArray[Any]) -> None:
        assert self._counts is not None
        start = min(first, self._first)
        end = max(first + len(counts), self._first + len(self._counts))
        total = np.zeros(end - start, dtype="i8")
        for at, part in ((self._first, self._counts), (first, counts)):
            total[at - start : at - start + len(part)] += part
        self._first, self._counts = start, total

    def bins(self, number: int) -> tuple[int, ...]:
        """Return the counts of `number` bins of equal width from the least value to the most.

        A value may be counted in the bin next to its own if it lies within 2 / FINE of the range of their
        edge. Of equal values there is one bin; of none, none.
        """
        if self._exponent is None or self._counts is None:
            return (self.count,) * (self.count > 0)
        cells = np.arange(self._first, self._first + len(self._counts)) + 0.5
        half = self.most / 2 - self.least / 2  # the range of the largest doubles is not one
        places = (np.ldexp(cells, self._exponent - 1) - self.least / 2) / half if half else cells * 0
        found = np.clip((places * number).astype("i8"), 0, number - 1)
        return tuple(np.bincount(found, weights=self._counts, minlength=number).astype("i8").tolist())


def _exponent(least: float, most: float) -> int:
    """Return the least exponent of which cells from the least to the most value are at most FINE."""
    # Not less than what numbers the largest of them in DIGITS bits.
    size = math.frexp(max(-least, most))[1]
    spread = math.frexp(most / 2 - least / 2)[1]
    exponent = max(spread - 12, size - DIGITS)
    while _cell(most, exponent) - _cell(least, exponent) >= FINE:
        exponent += 1
    return exponent


def _cell(value: float, exponent: int) -> int:
    return math.floor(math.ldexp(value, -exponent)) or -(value < 0)
