"""The mean of numbers, element by element, computed in pairs of float64 and rounded once. Imports numpy.

A pair hi + lo has some 106 bits. Sums and products enter it without error (Knuth's TwoSum, Dekker's
TwoProduct), the quotient to within 2^-100 of itself, and the pair is rounded to the output's type in one
step, half to even. The result is the exact mean correctly rounded when the weights are equal and the finite
numbers averaged for an element are of types up to float32 and within a factor of 2^50 of each other.
Otherwise it is the nearest number or, when the mean lies within 2^-40 of the middle of two, its neighbour.
Numbers that nearly cancel, and numbers so large or small that a pair can't hold their products, are averaged
as fractions, exactly.

Most numbers need none of this. Where float64 adds without error, the quotient of that sum rounds as the exact
mean does. Elsewhere, when both ends of the interval around a plain float64 mean that contains the exact one
round to the same number, that number is the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import Any

from ..core.lazy import NDArray, np
from ..core.tensors.cast import INFINITY, CastReport, carrier, nearest, reader
from ..core.tensors.ref import ByteRange, Computed, DType, TensorRef
from ..core.tensors.values import in_pieces

SPLITTER = 134217729.0  # 2^27 + 1: cuts a float64 into two halves whose products are exact
BLOCK = 1 << 17  # elements averaged at a time: numpy works on them long enough for another thread to run
FEW = 1 << 15  # elements averaged as pairs at a time: each takes a dozen times its size
HELD = 4 << 20  # bytes read at a time of all inputs together
LARGE, SMALL = 2.0**900, 2.0**-900
CANCELLED = 2.0**-40  # the remainder, as a part of the largest number, below which pairs may have lost digits


def mean(raw: Sequence[memoryview], weights: Sequence[float], dtype: DType) -> memoryview:
    """Return the weighted mean of elements of one type, as bytes of that type; see `Means`."""
    return Means(weights, dtype, len(raw[0]) // dtype.itemsize).of(raw)


class Means:
    """Weighted means of elements of one type, in memory that is used again: one thread at a time."""

    def __init__(self, weights: Sequence[float], dtype: DType, elements: int | None = None) -> None:
        self._dtype, self._inputs = dtype, len(weights)
        self._counted = [number for number, weight in enumerate(weights) if weight]
        counted = [weights[number] for number in self._counted]
        self._are_equal = len(set(counted)) == 1
        self._weights = [1.0] * len(counted) if self._are_equal else counted
        if elements is None:
            elements = max(min(BLOCK, HELD // (self._inputs * dtype.itemsize)), 1)
        self._elements = elements
        self._total, self._term = np.empty(elements), np.empty(elements)
        self._low, self._high = np.empty(elements, carrier(dtype)), np.empty(elements, carrier(dtype))

    @cached_property
    def buffers(self) -> list[memoryview]:
        """Where the bytes of each input may be read to."""
        return [memoryview(bytearray(self._elements * self._dtype.itemsize)) for _ in range(self._inputs)]

    def of(self, raw: Sequence[memoryview | bytes | bytearray]) -> memoryview:
        """Return the means as bytes of the type, little-endian, valid until the next call."""
        inputs = [np.frombuffer(raw[number], dtype=carrier(self._dtype)) for number in self._counted]
        out = self._low[: len(inputs[0])]
        unsure, read = self._plainly(inputs, out), reader(self._dtype)
        for start in range(0, len(unsure), FEW):
            places = unsure[start : start + FEW]
            values = [read(each[places]).astype("<f8") for each in inputs]
            out[places] = _carefully(values, self._weights, self._dtype)
        return memoryview(out.view("u1"))  # type: ignore[arg-type]

    def _plainly(self, inputs: list[NDArray[Any]], out: NDArray[Any]) -> NDArray[np.intp]:
        """Compute the means; return the places where they may not be the nearest numbers."""
        largest = max(map(_largest, inputs)) if len(out) else 0
        if self._dtype.itemsize == 8 or largest >= INFINITY[self._dtype.name]:
            return np.arange(len(out))
        total = self._total[: len(out)]
        with np.errstate(all="ignore"):
            self._add(inputs, total)
            if self._are_equal and _is_sum_exact(inputs, largest, self._dtype):
                _round(np.divide(total, len(inputs), out=total), self._dtype, out)
                return np.arange(0)
            np.multiply(total, 1.0 / math.fsum(self._weights), out=total)
            return self._bound(total, (len(inputs) + 2) * 2.0**-52 * _float(largest, self._dtype), out)

    def _add(self, inputs: list[NDArray[Any]], total: NDArray[Any]) -> None:
        read, term = reader(self._dtype), self._term[: len(total)]
        for number, (each, weight) in enumerate(zip(inputs, self._weights, strict=True)):
            value = term if number else total
            np.copyto(value, read(each))
            if weight != 1.0:
                np.multiply(value, weight, out=value)
            if number:
                np.add(total, term, out=total)

    def _bound(self, means: NDArray[Any], reach: float, low: NDArray[Any]) -> NDArray[np.intp]:
        """Round both ends of an interval around each float64 mean; return the places where they differ."""
        # For n values of magnitude up to L, the products, the additions, the sum of the weights and the
        # quotient err by at most (2n + 1) 2^-53 L together. A reach of (2n + 4) 2^-53 L allows for the ends,
        # which are rounded too.
        end, high, bits = self._term[: len(low)], self._high[: len(low)], f"u{low.itemsize}"
        _round(np.subtract(means, reach, out=end), self._dtype, low)
        _round(np.add(means, reach, out=end), self._dtype, high)
        return np.flatnonzero(low.view(bits) != high.view(bits))


def _is_sum_exact(inputs: list[NDArray[Any]], largest: int, dtype: DType) -> bool:
    """Return whether float64 adds the elements, whose largest magnitude has these bits, without error."""
    # It does where all are multiples of some 2^k, and their sums less than 2^(k + 53). Then the float64
    # nearest to their mean lies in the middle between two numbers of the type only if the mean itself does:
    # rounding it again is rounding the mean.
    infinity = INFINITY[dtype.name]
    digits = (infinity & -infinity).bit_length() - 1
    least = (largest >> digits) - (52 - digits - (len(inputs) - 1).bit_length())
    return least <= 1 or min(map(_smallest, inputs)) >> digits >= least


def _carefully(values: list[NDArray[Any]], weights: Sequence[float], dtype: DType) -> Any:
    """Return the mean in pairs, rounded once."""
    pairs = [*zip(values, weights, strict=True)]
    with np.errstate(all="ignore"):
        high, low = _quotient(*_sum(values, weights), *_total(tuple(weights)))
        plain = sum((value * weight for value, weight in pairs[1:]), values[0] * weights[0]) / sum(weights)
        sizes = np.maximum.reduce([np.abs(value * weight) for value, weight in pairs])
        finite = np.logical_and.reduce([np.isfinite(value) for value in values])
        # The mean of zeros alone has the sign that adding them gives.
        numbers = finite & np.logical_or.reduce([value != 0 for value in values])
        cancelled = np.abs(high) * sum(weights) <= sizes * CANCELLED
        for place in np.flatnonzero(numbers & (cancelled | ~_in_reach(values))):
            high[place], low[place] = _exact([float(value[place]) for value in values], weights)
    # In float64 infinities, NaN and zeros are right.
    return _rounded(np.where(numbers, high, plain), np.where(numbers, low, 0.0), dtype)


def _largest(values: NDArray[Any]) -> int:
    """Return the bits of the largest magnitude; those of NaN are larger than an infinity's."""
    width = values.itemsize
    sign = 1 << 8 * width - 1
    below, above = int(values.view(f"<u{width}").max()), int(values.view(f"<i{width}").max())
    return max(below - sign, above, 0)


def _smallest(values: NDArray[Any]) -> int:
    """Return the bits of the smallest magnitude that is not zero; larger ones than any if all are."""
    width = values.itemsize
    sign, bits = 1 << 8 * width - 1, values.view(f"<u{width}")
    smallest = min(int(bits.min()), int(values.view(f"<i{width}").min()) + sign)
    return smallest or (int(((bits << 1) - 2).min()) >> 1) + 1


def _float(bits: int, dtype: DType) -> float:
    """Return the number that has these bits."""
    return float(reader(dtype)(np.array([bits], f"<u{dtype.itemsize}").view(carrier(dtype)))[0])


def _in_reach(values: list[NDArray[Any]]) -> Any:
    """Return the places where no product can overflow, or lose bits below the smallest number."""
    sizes = [np.abs(value) for value in values]
    return np.logical_and.reduce([(size < LARGE) & ((size > SMALL) | (size == 0)) for size in sizes])


def _exact(values: list[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return the mean as a pair, computed with fractions."""
    total = sum(Fraction(w) * Fraction(value) for w, value in zip(weights, values, strict=True))
    quotient = Fraction(total) / sum(map(Fraction, weights))
    high = float(quotient)
    return high, float(quotient - Fraction(high))


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
    """Round a pair to a type in one step, first to odd, so that the last rounding sees no false tie."""
    # Boldo and Melquiond, "When double rounding is odd" (2005)
    if dtype.itemsize == 8:
        return high
    bits = np.ascontiguousarray(high).view("<i8")
    away = (low > 0) == (high > 0)
    even = (bits & 1 == 0) & (low != 0) & np.isfinite(high) & (high != 0)
    return nearest(np.where(even, np.where(away, bits + 1, bits - 1), bits).view("<f8"), dtype)


def _round(values: NDArray[Any], dtype: DType, out: NDArray[Any]) -> None:
    """Round float64 to a type, into an array of its carrier."""
    np.copyto(out, nearest(values, dtype) if dtype.name == "bfloat16" else values, casting="same_kind")


# ---- The bytes of mean tensors, computed when they are written; small tensors together.


# Bytes of a tensor that is averaged together with others: few elements take as long as thousands.
SMALL_TENSOR = 1 << 14
BATCH = 1 << 18  # bytes of small tensors averaged together
BATCHES_HELD = 16  # batches whose means stay in memory: a file may have its tensors in another order


class MeanTensors:
    """Makes the bytes of means; those of small tensors together."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = weights
        self.parallel: list[str] = []
        self.casting = CastReport()
        self.batches: dict[str, _Batch] = {}  # to which tensors of a type are added
        self.work: dict[str, _Work] = {}  # for each type
        self.held = lru_cache(BATCHES_HELD)(_Batch.means)

    def computed(self, name: str, inputs: list[TensorRef], part: DType) -> Computed:
        """Return the bytes of the means of one tensor."""
        path, nbytes = inputs[-1].storage.data.path, inputs[-1].nbytes
        if nbytes > SMALL_TENSOR or not all(tensor.is_plain for tensor in inputs):
            work = self.work.setdefault(part.name, _Work(self.weights, part))
            if all(tensor.is_stretch and _fills_buffers(tensor.storage.data) for tensor in inputs):
                stretches = partial(_means_of_stretches, work, [tensor.data for tensor in inputs])
                return Computed(path, nbytes, stretches, is_divisible=True)
            return Computed(path, nbytes, partial(_means, work, inputs))
        batch = self.batches.get(part.name)
        if batch is None or batch.nbytes > BATCH or not batch.is_near(inputs[-1]):
            self.batches[part.name] = batch = _Batch(self.weights, part)
        return Computed(path, nbytes, partial(_stretch_of, partial(self.held, batch), batch.add(inputs)))


class _Work:
    """What computes the means of one type: as many as threads compute at once."""

    def __init__(self, weights: list[float], part: DType) -> None:
        self.part = part
        self._weights = weights
        self._idle: list[Means] = []

    @contextmanager
    def means(self) -> Iterator[Means]:
        """Lend one that no thread uses."""
        try:
            means = self._idle.pop()
        except IndexError:  # not asked first: another thread may take the last one in between
            means = Means(self._weights, self.part)
        yield means
        self._idle.append(means)


class _Batch:
    """Small tensors of one type whose means are computed together."""

    def __init__(self, weights: list[float], part: DType) -> None:
        self.nbytes = 0
        self._weights, self._part = weights, part
        self._tensors: list[list[TensorRef]] = []

    def is_near(self, tensor: TensorRef) -> bool:
        """Return whether a tensor lies next to the last of these: others are read when their turn comes."""
        last, data = self._tensors[-1][-1].data, tensor.data
        ends = last.offset + last.nbytes if isinstance(last, ByteRange) else 0
        return isinstance(data, ByteRange) and 0 <= data.offset - ends < BATCH

    def add(self, inputs: list[TensorRef]) -> int:
        """Add a tensor of each file; return where its means begin."""
        start = self.nbytes
        self._tensors.append(inputs)
        self.nbytes += inputs[-1].nbytes
        return start

    def means(self) -> memoryview:
        """Return the bytes of all means."""
        by_file = zip(*self._tensors, strict=True)
        raw = [memoryview(b"".join(each.data.read() for each in tensors)) for tensors in by_file]
        return mean(raw, self._weights, self._part)


def _stretch_of(means: Callable[[], memoryview], first: int, start: int, nbytes: int) -> Iterator[memoryview]:
    yield means()[first + start : first + start + nbytes]


def _fills_buffers(data: ByteRange | Computed) -> bool:
    """Return whether bytes come in pieces of the size of the buffer they are read through."""
    return isinstance(data, ByteRange) or data.fill is not None


def _means_of_stretches(
    work: _Work, inputs: list[ByteRange | Computed], start: int, nbytes: int
) -> Iterator[memoryview]:
    """Yield a part of the means' bytes."""
    with work.means() as means:
        parts = (data.part(start, nbytes) for data in inputs)
        blocks = (part.chunks(buffer) for part, buffer in zip(parts, means.buffers, strict=True))
        yield from map(means.of, zip(*blocks, strict=True))


def _means(work: _Work, inputs: list[TensorRef], start: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a part of the means' bytes; inputs of any layout are read from their beginning."""
    at, end = 0, start + nbytes
    with work.means() as means:
        for block in zip(*(in_pieces(each, len(means.buffers[0])) for each in inputs), strict=True):
            if at >= end:
                break
            begin, at = at, at + len(block[0])
            if at > start:
                piece = means.of(block)[max(start - begin, 0) : end - begin]
                yield _swapped(piece, work.part) if inputs[-1].is_swapped else piece


def _swapped(piece: memoryview, part: DType) -> memoryview:
    """Return a big-endian piece, as the last file's storages are: a file has one byte order."""
    return memoryview(np.frombuffer(piece, dtype=f"<u{part.itemsize}").byteswap().view("u1"))
