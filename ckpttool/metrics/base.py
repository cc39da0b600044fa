"""The base of all metrics: exact sums that merge in any order, and checked inputs. Imports numpy when called.

Every finite float64 is an integer multiple of some smallest unit, and so is its square. A sum is kept as that
integer, in a Python int, which is as long as it has to be. Adding is exact, so order and parts don't matter,
and the result is rounded once, when it is read. (`math.fsum` is as exact but can't be merged; compensated
sums can be merged but are not exact.) Only `reduce` and `gather` import torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .. import distributed
from ..core.lazy import NDArray, np
from ..errors import CheckFailed

if TYPE_CHECKING:
    import torch

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
        self.nans += other.nans
        self.ups += other.ups
        self.downs += other.downs

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


# ---- Metrics


T = TypeVar("T")


class Metric(Generic[T]):
    """A metric over samples, whose state is integers. It takes numpy arrays, lists, or tensors on any device.

    `update` raises TypeError for values of another kind, ValueError for another shape, length or range.

    Attributes:
        higher_is_better: None where that depends on what is measured; the name is torchmetrics'.
    """

    higher_is_better: bool | None = None

    def __init__(self, *settings: object, counts: int = 0, sums: int = 0) -> None:
        self.settings = settings  # two metrics merge only if these are equal
        self.counts: NDArray[Any] = np.zeros(counts, dtype=np.int64)
        self.sums = [ExactSum() for _ in range(sums)]

    def compute(self) -> T:
        """Return the metric over all samples seen."""
        raise NotImplementedError

    def merge(self, other: Metric[T]) -> None:
        """Add the samples that another metric has seen; TypeError if its class or settings differ."""
        if type(other) is not type(self) or other.settings != self.settings:
            raise TypeError(f"{self!r} can't be merged with {other!r}")
        self.merge_packed(other.pack())

    def pack(self) -> NDArray[Any]:
        """Return the whole state as int64 [any number], which `merge_packed` takes."""
        sums = [digit for total in self.sums for digit in total.pack()]
        return np.concatenate([self.counts, np.array(sums, dtype=np.int64)])

    def merge_packed(self, packed: NDArray[Any]) -> None:
        """Add the packed state of a metric of the same class and settings."""
        self.counts = self.counts + packed[: len(self.counts)]
        digits = iter(packed[len(self.counts) :].tolist())
        for total in self.sums:
            total.merge(ExactSum.unpack(digits))

    def count(self, places: NDArray[Any], start: int, size: int) -> None:
        """Add 1 to `counts[start + place]` for each place, int64 [n] below `size`."""
        self.counts[start : start + size] += np.bincount(places, minlength=size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.settings))})"


def share(part: int, of: int) -> float:
    """Return the quotient of two integers, rounded once; NaN if `of` is 0."""
    return rounded(Fraction(part, of)) if of else math.nan


def as_floats(values: Any, *, dims: int | None = None) -> NDArray[Any]:
    """Return numbers as float64, which holds every float32, float16 and bfloat16 exactly."""
    array = _array(values)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"expected numbers, not {array.dtype}")
    if dims is not None and array.ndim != dims:
        raise ValueError(f"{dims} axis is wanted, one number per sample; its shape is {array.shape}")
    exact = array.astype(np.float64)
    if array.dtype.itemsize > 8 or array.dtype.kind in "iu":
        with np.errstate(invalid="ignore"):
            back = exact.astype(array.dtype)
        if not np.array_equal(back, array, equal_nan=array.dtype.kind == "f"):
            raise ValueError(f"a number of {array.dtype} is not a float64: it would be rounded")
    return exact


def as_scores(values: Any) -> NDArray[Any]:
    """Return scores [n, classes] in their own type."""
    array = _array(values)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"expected scores, not {array.dtype}")
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"scores are [samples, classes]; their shape is {array.shape}")
    return array


def as_predictions(values: Any) -> NDArray[Any]:
    """Return classes [n] as int64; of scores [n, classes], the class of the first largest."""
    array = _array(values)
    if array.ndim != 2:
        return as_labels(array)
    best: NDArray[Any] = as_scores(array).argmax(axis=1)
    return best


def as_labels(values: Any, *, below: int | None = None) -> NDArray[Any]:
    """Return classes [n] as int64."""
    array = _array(values)
    if array.dtype.kind not in "iub" and array.size:
        raise TypeError(f"classes are integers, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"expected one class per sample; the shape is {array.shape}")
    classes = array.astype(np.int64)
    if array.dtype.kind == "u" and len(classes) and classes.min() < 0:
        raise ValueError(f"a class is {array.max()}, which int64 can't hold")
    if below is not None and len(classes) and not (classes.min() >= 0 and classes.max() < below):
        wrong = classes[(classes < 0) | (classes >= below)][0]
        raise ValueError(f"there are {below} classes, 0 to {below - 1}, and one of these is {wrong}")
    return classes


def same_length(first: NDArray[Any], second: NDArray[Any]) -> None:
    """Raise ValueError if two inputs have different numbers of samples."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} samples on one side, {len(second)} on the other")


def _array(values: Any) -> NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("a masked array: leave out the masked samples")
    if hasattr(values, "detach"):  # a torch tensor; numpy has no bfloat16 and no 8-bit floats
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    return np.asarray(values)


M = TypeVar("M", bound="Metric[Any]")


def reduce(metric: M) -> M:
    """Return the metric over the samples of all ranks, on every rank; this one stays as it is. A collective.

    Raises:
        RanksDiffer: the ranks reduce metrics of different classes or settings.
        NeedsTorch: torch is not installed.
    """
    joined = copy.deepcopy(metric)
    for number, packed in enumerate(distributed.gather_rows.gather_arrays(metric.pack(), repr(metric))):
        if number != distributed.rank():
            joined.merge_packed(packed)
    return joined


def gather(
    index: torch.Tensor, columns: Mapping[str, torch.Tensor], *, samples: int, **choices: Any
) -> dict[str, torch.Tensor]:
    """Return rows of all ranks, joined by sample, on every rank: for what can't be reduced. A collective.

    As `ckpttool.distributed.gather_rows.gather`; raises NeedsTorch if torch is not installed.
    """
    return distributed.gather_rows.gather(index, columns, samples=samples, **choices)


@dataclass(frozen=True)
class Measure:
    """A metric to be computed: how to make one, and what its `update` gets of (outputs, batch)."""

    make: Callable[[], Metric[Any]]
    arguments: Callable[[Any, Any], Sequence[Any]]


def measures(metrics: Mapping[str, Any]) -> dict[str, Measure]:
    """Return metrics, as `evaluate` takes them, in one form; TypeError names one that is something else."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is a {type(metrics).__name__}, not a mapping of names to metrics")
    measured = {}
    for name, given in metrics.items():
        make, arguments = given if isinstance(given, tuple | list) and len(given) == 2 else (given, _compared)
        if isinstance(make, Metric):
            make = partial(copy.deepcopy, make)
        made = make() if callable(make) else make
        if not isinstance(made, Metric):
            what = f"makes a {type(made).__name__}, not a metric of ckpttool.metrics"
            raise TypeError(f"metrics[{name!r}] {what}")
        if not callable(arguments):
            raise TypeError(f"metrics[{name!r}]: the second of a pair is a function of (outputs, batch)")
        measured[str(name)] = Measure(make, arguments)
    return measured


def update(
    name: str, metric: Metric[Any], arguments: Callable[[Any, Any], Sequence[Any]], outputs: Any, batch: Any
) -> None:
    """Update a metric with a batch; CheckFailed names the metric if it does not take the outputs."""
    try:
        metric.update(*arguments(outputs, batch))  # type: ignore[attr-defined]
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        hint = "give a pair of the metric and a function: (outputs, batch) -> the arguments of its update"
        raise CheckFailed(f"metric '{name}': {type(error).__name__}: {error}", hint=hint) from error


def _compared(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """Return what most metrics are updated with: the outputs, and the last part of the batch."""
    return outputs, batch[-1] if isinstance(batch, tuple | list) else batch
