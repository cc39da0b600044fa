"""What all metrics are made of: whole numbers that merge by adding. Imports numpy when one is made."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .exact_sum import ExactSum, rounded

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")


class Metric(Generic[T]):
    """What all metrics share.

    Attributes:
        settings: what two metrics must have in common to be merged.
        counts: int64.
        sums: exact sums.
    """

    def __init__(self, *settings: object, counts: int = 0, sums: int = 0) -> None:
        import numpy as np

        self.settings = settings
        self.counts: NDArray[Any] = np.zeros(counts, dtype=np.int64)
        self.sums = [ExactSum() for _ in range(sums)]

    def compute(self) -> T:
        """The metric of all that was met so far."""
        raise NotImplementedError

    def merge(self, other: Metric[T]) -> None:
        """Adds what another metric of the same kind has met.

        Raises:
            TypeError: it is of another kind, or has other settings.
        """
        if type(other) is not type(self) or other.settings != self.settings:
            raise TypeError(f"{self!r} can't be merged with {other!r}")
        self.merge_packed(other.pack())

    def pack(self) -> NDArray[Any]:
        """All that the metric knows, as int64 [any number]."""
        import numpy as np

        sums = [digit for one in self.sums for digit in one.pack()]
        return np.concatenate([self.counts, np.array(sums, dtype=np.int64)])

    def merge_packed(self, packed: NDArray[Any]) -> None:
        """Adds what a metric of the same kind and settings has packed."""
        self.counts = self.counts + packed[: len(self.counts)]
        digits = iter(packed[len(self.counts) :].tolist())
        for one in self.sums:
            one.merge(ExactSum.unpack(digits))

    def count(self, places: NDArray[Any], start: int, size: int) -> None:
        """Adds 1 at each place of the `size` counts from `start` on."""
        import numpy as np

        self.counts[start : start + size] += np.bincount(places, minlength=size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.settings))})"


def share(part: int, of: int) -> float:
    """A quotient of whole numbers, rounded once; NaN over 0."""
    return rounded(Fraction(part, of)) if of else math.nan
