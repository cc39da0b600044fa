"""The k largest magnitudes of a tensor, found exactly in a few passes and bounded memory. Imports numpy.

The bits of a float's magnitude are ordered as the magnitudes are. Each pass counts the next 16 bits of the
numbers whose higher bits are those of the k-th largest, until few enough are left to be sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .aligned import BLOCK

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGNITUDE = (1 << 63) - 1  # all bits but the sign
DIGIT = 16  # bits that a pass counts
SORTED = 1 << 20  # numbers that are sorted in memory

# Makes a pass over a tensor: blocks of float64 from its beginning, each of BLOCK numbers but the last.
Pass = Callable[[], Iterable["NDArray[Any]"]]


@dataclass(frozen=True, slots=True)
class TopK:
    """Which numbers of a tensor are among its k largest: of equal ones, the first. NaN is larger than all."""

    least: int  # the bits of the k-th largest magnitude
    places: int  # how many of the numbers that have these bits are among the k
    before: NDArray[np.int64]  # how many of them stand before each block

    def mask(self, start: int, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which numbers of the block that begins at `start` are among the k largest."""
        import numpy as np

        bits = _bits(values)
        equal = bits == self.least
        left = self.places - self.before[start // BLOCK]
        first = equal & (np.cumsum(equal) <= left) if left < len(values) else equal
        chosen: NDArray[np.bool_] = (bits > self.least) | first
        return chosen


def top_k(values: Pass, k: int) -> TopK:
    """Return which numbers are the `k` of largest magnitude.

    Args:
        values: makes a pass over the tensor.
        k: how many, from 1 to the number of elements.
    """
    import numpy as np

    high, shift, left = 0, 64, k  # the bits of the k-th from `shift` up, and its rank among those with them
    count = SORTED + 1
    while shift and count > SORTED:
        shift -= DIGIT
        counts = np.zeros(1 << DIGIT, np.int64)
        for block in values():
            counts += _digits(block, high, shift)
        from_above = np.cumsum(counts[::-1])
        place = int(np.searchsorted(from_above, left))  # the first digit from above that reaches the rank
        count = int(counts[::-1][place])
        left -= int(from_above[place]) - count
        high = high << DIGIT | (1 << DIGIT) - 1 - place
    if shift:
        same = np.concatenate([bits[bits >> np.uint64(shift) == high] for bits in map(_bits, values())])
        high = int(np.partition(same, len(same) - left)[len(same) - left])
        left -= int(np.count_nonzero(same > high))
    equal = [int(np.count_nonzero(_bits(block) == high)) for block in values()]
    return TopK(high, left, np.cumsum([0, *equal]))


def _digits(values: NDArray[Any], high: int, shift: int) -> NDArray[np.int64]:
    """Count the values of DIGIT bits from `shift` up, of the numbers whose higher bits are these."""
    import numpy as np

    bits = _bits(values) >> np.uint64(shift)
    digits = bits[bits >> np.uint64(DIGIT) == high] & np.uint64((1 << DIGIT) - 1)
    return np.bincount(digits.astype(np.int64), minlength=1 << DIGIT)


def _bits(values: NDArray[Any]) -> NDArray[np.uint64]:
    import numpy as np

    bits: NDArray[np.uint64] = values.view(np.uint64) & np.uint64(MAGNITUDE)
    return bits
