"""Norms of two tensors and of their difference, and the cosine between them. Imports numpy when called.

All sums are of float64, over the elements that are finite in both tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..files.threads import cores, in_order
from ..tensors.dtypes import REAL_TYPES, DType
from ..tensors.ref import ByteRange, TensorRef
from ..tensors.values import in_pieces
from .compare_values import repeated_once
from .distances import has_numbers, numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

ELEMENTS = 1 << 16
"""Elements added up at a time: as float64 they stay in the processor's cache."""

BATCH = 4 << 20
"""Bytes of small tensors measured as one job."""

WORKERS = 4


@dataclass(frozen=True, slots=True)
class Norms:
    """Sums of products of two tensors' elements; `+` makes one of several tensors, as if they were joined.

    Attributes:
        aa: the sum of |a|².
        bb: the sum of |b|².
        dd: the sum of |a - b|².
        ab: the sum of a·b; of complex numbers, its real part.
    """

    aa: float = 0.0
    bb: float = 0.0
    dd: float = 0.0
    ab: float = 0.0

    def __add__(self, other: Norms) -> Norms:
        return Norms(self.aa + other.aa, self.bb + other.bb, self.dd + other.dd, self.ab + other.ab)

    def times(self, count: int) -> Norms:
        """Return the norms of tensors that repeat every element `count` times."""
        return Norms(self.aa * count, self.bb * count, self.dd * count, self.ab * count)

    @property
    def a(self) -> float:
        """The norm of A: the square root of the sum of squares."""
        return math.sqrt(self.aa)

    @property
    def b(self) -> float:
        """The norm of B."""
        return math.sqrt(self.bb)

    @property
    def difference(self) -> float:
        """The norm of A - B."""
        return math.sqrt(self.dd)

    @property
    def relative(self) -> float | None:
        """The norm of A - B as a part of B's; infinite where B is 0; None where a sum exceeds float64."""
        if not (math.isfinite(self.dd) and math.isfinite(self.bb)):
            return None
        return self.difference / self.b if self.b else math.inf if self.dd else 0.0

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between A and B, from -1 to 1; None where one of them is 0 or too large."""
        lengths = self.a * self.b
        if not lengths or not math.isfinite(lengths) or not math.isfinite(self.ab):
            return None
        return max(-1.0, min(1.0, self.ab / lengths))


def norms(pairs: Sequence[tuple[TensorRef, TensorRef]]) -> Iterator[Norms | None]:
    """Yield the norms of pairs of tensors, in their order; memory holds a few pieces of 64 Ki elements.

    Args:
        pairs: two tensors each, of one shape and any dtypes.

    Yields:
        The norms of a pair; None for types that have no numbers (quantised ones).

    Raises:
        Damaged: a file ends early.
    """
    for done in in_order(_jobs(pairs), cores(WORKERS)):
        yield from done


def _jobs(pairs: Iterable[tuple[TensorRef, TensorRef]]) -> Iterator[Callable[[], list[Norms | None]]]:
    small: list[tuple[TensorRef, TensorRef]] = []
    held = 0
    for a, b in pairs:
        small.append((a, b))
        held += a.nbytes
        if not all(side.is_plain and isinstance(side.storage.data, ByteRange) for side in (a, b)):
            yield partial(_measured, small[:-1])
            yield partial(list, _measured(small[-1:]))  # values that are computed may wait for other threads
        elif held >= BATCH:
            yield partial(_measured, small)
        else:
            continue
        small, held = [], 0
    yield partial(_measured, small)


def _measured(pairs: list[tuple[TensorRef, TensorRef]]) -> list[Norms | None]:
    return [_norms(a, b) if has_numbers(a.dtype) and has_numbers(b.dtype) else None for a, b in pairs]


def _norms(a: TensorRef, b: TensorRef) -> Norms:
    import numpy as np

    total, once = Norms(), repeated_once(a, b)
    sides = (in_pieces(side, ELEMENTS * side.dtype.itemsize) for side in once)
    with np.errstate(all="ignore"):
        for x, y in zip(*sides, strict=True):
            total += _sums(_floats(a.dtype, x), _floats(b.dtype, y))
    return total.times(a.numel // once[0].numel) if once[0].numel else total


def _floats(dtype: DType, raw: bytes | bytearray) -> NDArray[Any]:
    """Return elements as float64: (elements,), or (elements, 2) of complex ones."""
    values = numbers(dtype, memoryview(raw))
    return values.view("<f8").reshape(-1, 2) if dtype.name in REAL_TYPES else values.astype("<f8", copy=False)


def _sums(a: NDArray[Any], b: NDArray[Any]) -> Norms:
    import numpy as np

    if a.ndim != b.ndim:  # a complex number beside a real one
        a, b = (each if each.ndim == 2 else np.stack([each, np.zeros_like(each)], axis=1) for each in (a, b))
    a, b = a.reshape(-1), b.reshape(-1)
    d = a - b
    # Not np.dot: BLAS would start threads of its own, which wait busily for each other.
    found = Norms(*(float((x * y).sum()) for x, y in ((a, a), (b, b), (d, d), (a, b))))
    if math.isfinite(found.dd):
        return found
    finite = np.isfinite(a) & np.isfinite(b)
    if finite.all():
        return found  # a sum that exceeds float64
    return _sums(a[finite], b[finite])
