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

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..tensors.cast import carrier, reader
from ..tensors.dtypes import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLITTER = 134217729.0  # 2^27 + 1: cuts a float64 into two halves whose products are exact
LARGE, SMALL = 2.0**900, 2.0**-900

CANCELLED = 2.0**-40
"""The remainder, as a part of the largest number, below which pairs may have lost digits."""


def mean(raw: Sequence[memoryview], weights: Sequence[float], dtype: DType) -> memoryview:
    """Return the weighted mean of elements of one type, as bytes of that type, little-endian.

    Args:
        raw: the bytes of the same elements in each input, little-endian.
        weights: one per input, not negative, of a positive sum. Equal weights, whatever their value, are
            exact.
        dtype: float64, float32, float16 or bfloat16.
    """
    import numpy as np

    read = reader(dtype)
    values = [read(np.frombuffer(one, dtype=carrier(dtype))).astype("<f8") for one in raw]
    equal = len(set(weights)) == 1
    if equal:
        weights = [1.0] * len(weights)
    if equal and dtype.itemsize < 8:
        out, unsure = _plainly(values, dtype)
        if isinstance(unsure, slice) or len(unsure):
            out[unsure] = _carefully([value[unsure] for value in values], weights, dtype)
    else:
        out = _carefully(values, weights, dtype)
    return memoryview(out.view("u1"))


def _plainly(values: list[NDArray[Any]], dtype: DType) -> tuple[Any, Any]:
    """Return the float64 mean, rounded, and the places where the exact mean may round differently.

    For n values of magnitude up to L, each addition errs by at most 2^-53 n L, so the mean by (n - 1) 2^-53
    L, and the quotient by 2^-53 L: n 2^-53 L together. The interval allows twice that.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        ends = [end for value in values for end in (-value.min(initial=0.0), value.max(initial=0.0))]
        reach = len(values) * 2.0**-52 * np.max(ends)
        plain = sum(values[1:], values[0]) / len(values)
        below, above = nearest(plain - reach, dtype), nearest(plain + reach, dtype)
    if not np.isfinite(reach):
        return below, slice(None)
    bits = f"u{below.itemsize}"
    return below, np.flatnonzero(below.view(bits) != above.view(bits))


def _carefully(values: list[NDArray[Any]], weights: Sequence[float], dtype: DType) -> Any:
    """Return the mean in pairs, rounded once."""
    import numpy as np

    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    values, weights = [value for value, _ in counted], [weight for _, weight in counted]
    with np.errstate(all="ignore"):
        high, low = _quotient(*_sum(values, weights), sum(map(Fraction, weights), Fraction()))
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


def _quotient(high: Any, low: Any, by: Fraction) -> tuple[Any, Any]:
    whole = float(by)
    rest = float(by - Fraction(whole))
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
