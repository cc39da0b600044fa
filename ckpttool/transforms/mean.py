"""The mean of numbers, element by element, computed in pairs of float64 and rounded once. Imports numpy.

A pair hi + lo has some 106 bits. Sums and products enter it without error (Knuth's TwoSum, Dekker's
TwoProduct), the quotient to within 2^-100 of itself, and the pair is rounded to the output's type in one
step, half to even. The result is the exact mean correctly rounded when the weights are equal and the finite
numbers averaged for an element are of types up to float32 and within a factor of 2^50 of each other.
Otherwise it is the nearest number or, when the mean lies within 2^-40 of the middle of two, its neighbour.
Numbers that nearly cancel, and numbers so large or small that a pair can't hold their products, are averaged
as fractions, exactly.

Most numbers need none of this: when both ends of the interval around a plain float64 mean that contains the
exact one round to the same number, that number is the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ..tensors.cast import INFINITY, carrier, reader
from ..tensors.dtypes import DType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPLITTER = 134217729.0  # 2^27 + 1: cuts a float64 into two halves whose products are exact
BLOCK = 1 << 16
"""Elements that are read at a time."""

STEP = 1 << 15
"""Elements that are averaged at a time: few enough for the processor's cache."""

LARGE, SMALL = 2.0**900, 2.0**-900

CANCELLED = 2.0**-40
"""The remainder, as a part of the largest number, below which pairs may have lost digits."""


def mean(raw: Sequence[memoryview], weights: Sequence[float], dtype: DType) -> memoryview:
    """Return the weighted mean of elements of one type, as bytes of that type; see `Means`."""
    return Means(weights, dtype).of(raw)


class Means:
    """Weighted means of elements of one type, computed in memory that is used again, by one thread at a time.

    Args:
        weights: one per input, not negative, of a positive sum. Equal weights, whatever their value, are
            exact.
        dtype: float64, float32, float16 or bfloat16.
    """

    def __init__(self, weights: Sequence[float], dtype: DType) -> None:
        import numpy as np

        self._dtype, self._inputs = dtype, len(weights)
        self._counted = [number for number, weight in enumerate(weights) if weight]
        counted = [weights[number] for number in self._counted]
        self._weights = [1.0] * len(counted) if len(set(counted)) == 1 else counted
        self._total, self._end = np.empty(STEP), np.empty(STEP)
        self._high = np.empty(STEP, carrier(dtype))

    @cached_property
    def buffers(self) -> list[memoryview]:
        """Where the bytes of each input may be read to, BLOCK elements each."""
        return [memoryview(bytearray(BLOCK * self._dtype.itemsize)) for _ in range(self._inputs)]

    def of(self, raw: Sequence[memoryview | bytes | bytearray]) -> memoryview:
        """Return the means as bytes of the type, little-endian.

        Args:
            raw: the bytes of the same elements in each input, little-endian.
        """
        import numpy as np

        inputs = [np.frombuffer(raw[number], dtype=carrier(self._dtype)) for number in self._counted]
        out = np.empty(len(inputs[0]), carrier(self._dtype))
        unsure = np.ones(len(out), np.bool_)
        for start in range(0, len(out), STEP):
            stop = min(start + STEP, len(out))
            self._plainly([each[start:stop] for each in inputs], out[start:stop], unsure[start:stop])
        if unsure.any():
            places = np.flatnonzero(unsure)
            read = reader(self._dtype)
            out[places] = _carefully(
                [read(each[places]).astype("<f8") for each in inputs], self._weights, self._dtype
            )
        return memoryview(out.view("u1"))  # type: ignore[arg-type]

    def _plainly(self, inputs: list[NDArray[Any]], out: NDArray[Any], unsure: NDArray[np.bool_]) -> None:
        """Compute the means of at most STEP elements, and where they may not be the nearest numbers."""
        import numpy as np

        if self._dtype.itemsize == 8 or (largest := max(map(_largest, inputs))) >= INFINITY[self._dtype.name]:
            return
        high = self._high[: len(out)]
        with np.errstate(all="ignore"):
            values = list(map(reader(self._dtype), inputs))
            self._bound(values, _float(largest, self._dtype), out, high)
        bits = f"u{self._dtype.itemsize}"
        np.not_equal(out.view(bits), high.view(bits), out=unsure)

    def _bound(
        self, values: list[NDArray[Any]], largest: float, low: NDArray[Any], high: NDArray[Any]
    ) -> None:
        """Round both ends of an interval around each float64 mean that contains the exact one.

        For n values of magnitude up to L, the products, the additions, the sum of the weights and the
        quotient err by at most (2n + 1) 2^-53 L together. The interval allows 2n + 4, as its ends are rounded
        too.
        """
        import numpy as np

        total, end = self._total[: len(low)], self._end[: len(low)]
        np.multiply(values[0], self._weights[0], out=total, dtype="<f8")
        for value, weight in zip(values[1:], self._weights[1:], strict=True):
            term = value if weight == 1.0 else np.multiply(value, weight, out=end, dtype="<f8")
            np.add(total, term, out=total)
        np.multiply(total, 1.0 / math.fsum(self._weights), out=total)
        reach = (len(values) + 2) * 2.0**-52 * largest
        _round(np.subtract(total, reach, out=end), self._dtype, low)
        _round(np.add(total, reach, out=end), self._dtype, high)


def _carefully(values: list[NDArray[Any]], weights: Sequence[float], dtype: DType) -> Any:
    """Return the mean in pairs, rounded once."""
    import numpy as np

    with np.errstate(all="ignore"):
        high, low = _quotient(*_sum(values, weights), *_total(tuple(weights)))
        plain = _plain(values, weights)
        sizes = np.maximum.reduce(
            [np.abs(value * weight) for value, weight in zip(values, weights, strict=True)]
        )
        finite = np.logical_and.reduce([np.isfinite(value) for value in values])
        # The mean of zeros alone has the sign that adding them gives.
        numbers = finite & np.logical_or.reduce([value != 0 for value in values])
        cancelled = np.abs(high) * sum(weights) <= sizes * CANCELLED
        for place in np.flatnonzero(numbers & (cancelled | ~_in_reach(values))):
            high[place], low[place] = _exact([float(value[place]) for value in values], weights)
    return _rounded(np.where(numbers, high, plain), np.where(numbers, low, 0.0), dtype)


def _largest(values: NDArray[Any]) -> int:
    """Return the bits of the largest magnitude; those of NaN are larger than an infinity's."""
    width = values.itemsize
    sign = 1 << 8 * width - 1
    below, above = int(values.view(f"<u{width}").max()), int(values.view(f"<i{width}").max())
    return max(below - sign, above, 0)


def _float(bits: int, dtype: DType) -> float:
    """Return the number that has these bits."""
    import numpy as np

    return float(reader(dtype)(np.array([bits], f"<u{dtype.itemsize}").view(carrier(dtype)))[0])


def _plain(values: list[NDArray[Any]], weights: Sequence[float]) -> Any:
    """Return the mean in float64, which is right for infinities, NaN and zeros."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total / sum(weights)


def _in_reach(values: list[NDArray[Any]]) -> Any:
    """Return the places where no product can overflow, or lose bits below the smallest number."""
    import numpy as np

    sizes = [np.abs(value) for value in values]
    return np.logical_and.reduce([(size < LARGE) & ((size > SMALL) | (size == 0)) for size in sizes])


def _exact(values: list[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return the mean as a pair, computed with fractions."""
    total = sum(Fraction(w) * Fraction(value) for w, value in zip(weights, values, strict=True))
    found = Fraction(total) / sum(map(Fraction, weights))
    high = float(found)
    return high, float(found - Fraction(high))


def _sum(values: list[NDArray[Any]], weights: Sequence[float]) -> tuple[Any, Any]:
    high: Any = None
    low: Any = 0.0
    for value, weight in zip(values, weights, strict=True):
        term, error = (value, 0.0) if weight == 1.0 else _product(value, weight)
        if high is None:
            high, low = term, error
        else:
            high, rest = _two_sum(high, term)
            low = low + (rest + error)
    return _two_sum(high, low)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Return a + b rounded, and its rounding error. Source: Knuth, TAOCP 2, 4.2.2."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _product(a: Any, b: Any) -> tuple[Any, Any]:
    """Return a * b rounded, and its rounding error. Source: Dekker, Numerische Mathematik 18 (1971)."""
    product = a * b
    a_high, b_high = a * SPLITTER, b * SPLITTER
    a_high, b_high = a_high - (a_high - a), b_high - (b_high - b)
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


@lru_cache(16)
def _total(weights: tuple[float, ...]) -> tuple[float, float]:
    """Return the sum of the weights as a pair."""
    by = sum(map(Fraction, weights), Fraction())
    return float(by), float(by - Fraction(float(by)))


def _quotient(high: Any, low: Any, whole: float, rest: float) -> tuple[Any, Any]:
    quotient = high / whole
    product, error = _product(quotient, whole)
    left = ((high - product) - error) + low - quotient * rest
    return _two_sum(quotient, left / whole)


def _rounded(high: NDArray[Any], low: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Round a pair to a type in one step, first to odd, so that the last rounding sees no false tie.

    Source: Boldo and Melquiond, "When double rounding is odd" (2005).
    """
    import numpy as np

    if dtype.itemsize == 8:
        return high
    bits = np.ascontiguousarray(high).view("<i8")
    away = (low > 0) == (high > 0)
    even = (bits & 1 == 0) & (low != 0) & np.isfinite(high) & (high != 0)
    return nearest(np.where(even, np.where(away, bits + 1, bits - 1), bits).view("<f8"), dtype)


def _round(values: NDArray[Any], dtype: DType, out: NDArray[Any]) -> None:
    """Round float64 to a type, into an array of its carrier."""
    import numpy as np

    np.copyto(out, nearest(values, dtype) if dtype.name == "bfloat16" else values, casting="same_kind")


def nearest(odd: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Round float64 to a type in one step; to bfloat16, which numpy lacks, through float32 rounded to odd."""
    import numpy as np

    if dtype.name != "bfloat16":
        return odd.astype(carrier(dtype))
    single = odd.astype("<f4")
    upper = single.view("<u4").copy()
    over = np.abs(single.astype("<f8")) > np.abs(odd)
    inexact = (single.astype("<f8") != odd) & np.isfinite(odd)
    upper = np.where(inexact, (upper - over.astype("<u4")) | np.uint32(1), upper)
    nan = np.isnan(single)
    rounded = (upper + np.uint32(0x7FFF) + ((upper >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(nan, 0x7FC0, rounded).astype("<u2")
