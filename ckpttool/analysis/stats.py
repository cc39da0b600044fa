"""Statistics of a tensor's values: extremes, mean and spread, in constant memory. Imports numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..tensors.cast import FLOATS, carrier, reader
from ..tensors.ref import TensorRef
from ..tensors.values import MAX_REPEATED, require_bounded, stream, without_repeats

if TYPE_CHECKING:
    from numpy.typing import NDArray

INTEGERS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"}

BLOCK = 1 << 18  # Elements per step: as float64 they stay in the processor's cache


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a tensor's values."""

    # minimum, maximum: of the finite values, in the tensor's own type; None when there are none
    minimum: float | int | None = None
    maximum: float | int | None = None
    # mean, deviation: of the finite values, computed in float64; the deviation is a population's (÷ n)
    mean: float | None = None
    deviation: float | None = None
    non_finite: int = 0  # the number of values that are NaN or infinite


def measure(name: str, tensor: TensorRef) -> Stats | None:
    """Return the statistics of a tensor; None for complex, quantised and other types that have no order."""
    kind = tensor.dtype.name
    if kind not in FLOATS and kind not in INTEGERS:
        return None
    once, repeats = without_repeats(tensor)  # equal repetition of all values changes no mean
    require_bounded(name, once, MAX_REPEATED)
    sums = _Sums()
    for piece in stream(once):
        values = _values(kind, tensor, piece)
        for start in range(0, len(values), BLOCK):
            sums.add(values[start : start + BLOCK])
    return sums.stats(repeats)


def _values(kind: str, tensor: TensorRef, piece: memoryview) -> NDArray[Any]:
    import numpy as np

    if kind in FLOATS:
        return reader(tensor.dtype)(np.frombuffer(piece, dtype=carrier(tensor.dtype)))
    return np.frombuffer(piece, dtype="u1" if kind == "bool" else np.dtype(kind).newbyteorder("<"))


class _Sums:
    """Sums over blocks, merged as in Chan, Golub and LeVeque (1979)."""

    def __init__(self) -> None:
        self.count = self.non_finite = 0
        self.mean = self.squares = 0.0
        self.least: Any = None
        self.most: Any = None

    def add(self, block: NDArray[Any]) -> None:
        import numpy as np

        if block.dtype.kind == "f":
            finite = np.isfinite(block)
            if not finite.all():
                self.non_finite += int(block.size - np.count_nonzero(finite))
                block = block[finite]
        if not block.size:
            return
        least, most = block.min(), block.max()
        self.least = least if self.least is None else min(self.least, least)
        self.most = most if self.most is None else max(self.most, most)
        wide = block.astype("f8")
        with np.errstate(over="ignore", invalid="ignore"):  # the squares of the largest doubles
            mean = float(wide.mean())
            wide -= mean
            squares = float(np.dot(wide, wide))
            apart, total = mean - self.mean, self.count + block.size
            self.squares += squares + apart * apart * self.count * block.size / total
            self.mean += apart * block.size / total
        self.count = total

    def stats(self, repeats: int) -> Stats:
        if not self.count:
            return Stats(non_finite=self.non_finite * repeats)
        least, most = self.least.item(), self.most.item()
        return Stats(least, most, self.mean, (self.squares / self.count) ** 0.5, self.non_finite * repeats)
