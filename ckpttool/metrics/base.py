"""The base of all metrics: integers that merge by adding. Imports numpy when a metric is made."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .exact_sum import ExactSum, rounded

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")


class Metric(Generic[T]):
    """A metric over samples, whose state is integers.

    Attributes:
        settings: the constructor's arguments; two metrics merge only if these are equal.
        counts: int64 [any number].
        sums: exact sums of floats.
    """

    def __init__(self, *settings: object, counts: int = 0, sums: int = 0) -> None:
        import numpy as np

        self.settings = settings
        self.counts: NDArray[Any] = np.zeros(counts, dtype=np.int64)
        self.sums = [ExactSum() for _ in range(sums)]

    def compute(self) -> T:
        """Return the metric over all samples seen."""
        raise NotImplementedError

    def merge(self, other: Metric[T]) -> None:
        """Add the samples that another metric has seen.

        Raises:
            TypeError: the other metric has another class or other settings.
        """
        if type(other) is not type(self) or other.settings != self.settings:
            raise TypeError(f"{self!r} can't be merged with {other!r}")
        self.merge_packed(other.pack())

    def pack(self) -> NDArray[Any]:
        """Return the whole state as int64 [any number], which `merge_packed` takes."""
        import numpy as np

        sums = [digit for one in self.sums for digit in one.pack()]
        return np.concatenate([self.counts, np.array(sums, dtype=np.int64)])

    def merge_packed(self, packed: NDArray[Any]) -> None:
        """Add the packed state of a metric of the same class and settings."""
        self.counts = self.counts + packed[: len(self.counts)]
        digits = iter(packed[len(self.counts) :].tolist())
        for one in self.sums:
            one.merge(ExactSum.unpack(digits))

    def count(self, places: NDArray[Any], start: int, size: int) -> None:
        """Add 1 to `counts[start + place]` for each place, int64 [n] below `size`."""
        import numpy as np

        self.counts[start : start + size] += np.bincount(places, minlength=size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.settings))})"


def share(part: int, of: int) -> float:
    """Return the quotient of two integers, rounded once; NaN if `of` is 0."""
    return rounded(Fraction(part, of)) if of else math.nan
