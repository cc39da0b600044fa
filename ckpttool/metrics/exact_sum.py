"""Sums of float64 without rounding, the same in any order and any parts. Imports numpy when called.

Every finite float64 is an integer multiple of some smallest unit, and so is its square. The sum is kept as
that integer, in a Python int, which is as long as it has to be. Adding is exact, so order and parts don't
matter, and the result is rounded once, when it is read. (`math.fsum` is as exact but can't be merged;
compensated sums can be merged but are not exact.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from ..lazy import NDArray, np

# Binary places after the point of a float64 written as a 53-bit integer times a power of two.
SMALLEST = 1126

# Binary places after the point of a sum, which may be one of squares.
POINT = 2 * SMALLEST

# Numbers added in float64 at a time: integers below 2^32, so their sum stays below 2^53 and is exact.
PIECE = 1 << 20


class ExactSum:
    """The sum of float64 numbers, or of their squares."""

    def __init__(self, units: int = 0, nans: int = 0, ups: int = 0, downs: int = 0) -> None:
        self.units, self.nans, self.ups, self.downs = units, nans, ups, downs

    def add(self, values: NDArray[Any]) -> None:
        """Add an array of float64, of any shape."""
        mantissas, shifts = self._finite(values)
        self.units += _total(shifts, mantissas) << SMALLEST

    def add_squares(self, values: NDArray[Any]) -> None:
        """Add the square of each number, as three products that fit into 64 bits."""
        mantissas, shifts = self._finite(np.abs(values))
        high, low = mantissas >> 26, mantissas & ((1 << 26) - 1)
        for bits, part in ((52, high * high), (26, 2 * high * low), (0, low * low)):
            self.units += _total(2 * shifts, part) << bits

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self.units += other.units
        self.nans, self.ups, self.downs = (
            self.nans + other.nans,
            self.ups + other.ups,
            self.downs + other.downs,
        )

    @property
    def is_finite(self) -> bool:
        return not (self.nans or self.ups or self.downs)

    @property
    def fraction(self) -> Fraction:
        """The exact sum of the finite numbers."""
        return Fraction(self.units, 1 << POINT)

    def over(self, count: int | Fraction) -> float:
        """Return the sum divided by a number, rounded once; NaN over 0. Infinities behave as in float64."""
        if count == 0 or self.nans or (self.ups and self.downs):
            return math.nan
        if not self.is_finite:
            return math.inf if self.ups else -math.inf
        return rounded(self.fraction / count)

    @property
    def value(self) -> float:
        return self.over(1)

    def pack(self) -> list[int]:
        """Return the sum as 64-bit integers: the number of its digits, the three counts, then the digits."""
        nbytes = -(-(self.units.bit_length() + 1) // 64) * 8
        raw = self.units.to_bytes(nbytes, "little", signed=True)
        digits = [int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, nbytes, 8)]
        return [len(digits), self.nans, self.ups, self.downs, *digits]

    @classmethod
    def unpack(cls, packed: Iterable[int]) -> ExactSum:
        """Take one packed sum from an iterator of integers."""
        following = iter(packed)
        length, *counts = (next(following) for _ in range(4))
        raw = b"".join(next(following).to_bytes(8, "little", signed=True) for _ in range(length))
        return cls(int.from_bytes(raw, "little", signed=True), *counts)

    def _finite(self, values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the finite numbers as 53-bit integers and the shift of each; count the others."""
        flat = np.asarray(values, dtype=np.float64).reshape(-1)
        finite = np.isfinite(flat)
        if not finite.all():
            self.nans += int(np.isnan(flat).sum())
            self.ups += int((flat == np.inf).sum())
            self.downs += int((flat == -np.inf).sum())
            flat = flat[finite]
        mantissas, exponents = np.frexp(flat)
        return np.ldexp(mantissas, 53).astype(np.int64), exponents.astype(np.int64) + (SMALLEST - 53)


def _total(shifts: NDArray[Any], mantissas: NDArray[Any]) -> int:
    """Return the sum of mantissa · 2^shift, for integers below 2^62 in size and shifts of 0 or more."""
    total = 0
    for start in range(0, len(mantissas), PIECE):
        places, part = shifts[start : start + PIECE], mantissas[start : start + PIECE]
        for bits, half in ((31, part >> 31), (0, part & ((1 << 31) - 1))):
            sums = np.bincount(places, weights=half)
            for place in np.flatnonzero(sums).tolist():
                total += int(sums[place]) << (place + bits)
    return total


def rounded(exact: Fraction) -> float:
    """Return the nearest float64, ties to even; infinity beyond the largest."""
    try:
        return exact.numerator / exact.denominator  # Python rounds a quotient of ints once
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
