"""Tensors of several files read in step: the same elements of each, as float64. Imports numpy."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..core.lazy import NDArray, np
from ..core.tensors.cast import CastReport, carrier, nearest, reader
from ..core.tensors.ref import Computed, DType, TensorRef, real_dtype
from ..core.tensors.values import read_into, stretches
from ..errors import UsageFault

BLOCK = 1 << 16  # numbers of each tensor in memory at a time


@dataclass(frozen=True, slots=True)
class Aligned:
    """Tensors of one shape, each a row of numbers in row-major order; a complex number is two."""

    tensors: Sequence[TensorRef]

    @property
    def count(self) -> int:
        """How many numbers each has."""
        return self.tensors[0].nbytes // real_dtype(self.tensors[0].dtype).itemsize

    def blocks(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, list[NDArray[Any]]]]:
        """Yield where blocks begin, always at multiples of BLOCK, and the numbers of each tensor in them.

        The blocks are those that hold the numbers from `first` to `end`.
        """
        end = self.count if end is None else end
        for start in range(first - first % BLOCK, end, BLOCK):
            count = min(BLOCK, self.count - start)
            yield start, [_numbers(tensor, start, count) for tensor in self.tensors]


def _numbers(tensor: TensorRef, first: int, count: int) -> NDArray[Any]:
    part = real_dtype(tensor.dtype)
    raw, done = memoryview(bytearray(count * part.itemsize)), 0
    of_number = tensor.dtype.itemsize // part.itemsize
    for piece in stretches(tensor, first // of_number, count // of_number):
        read_into(raw[done : done + piece.nbytes], piece)
        done += piece.nbytes
    return reader(part)(np.frombuffer(raw, dtype=carrier(part))).astype("<f8")


def bytes_of(values: NDArray[Any], dtype: DType, *, big_endian: bool) -> memoryview:
    """Return the elements of an array of the type's `carrier` as bytes in a file's order."""
    if big_endian and dtype.itemsize > 1:
        values = values.byteswap()
    return memoryview(values.view("u1"))  # type: ignore[arg-type]


# ---- How models are merged: each method's formula, for blocks of numbers of all models. Imports numpy.
#
# SLERP: Shoemake (1985). Task arithmetic: Ilharco et al. (2022), arXiv 2212.04089. TIES: Yadav et al.
# (2023), arXiv 2306.01708. DARE: Yu et al. (2023), arXiv 2311.03099. Where a paper leaves something open,
# it is done as in mergekit 0.1: its thresholds, its ties of signs, its rescaling.


if TYPE_CHECKING:
    Numbers = NDArray[np.float64]

PARALLEL = 0.9995  # the cosine from which vectors count as parallel
NO_LENGTH = 1e-8  # the length up to which a vector is not divided by it
NO_SUM = 1e-7  # the sum of magnitudes below which nothing is rescaled

# From where a block begins and the numbers of all tensors in it, the merged numbers.
Rule = Callable[[int, "list[Numbers]"], "Numbers"]

# From where a block begins and a difference in it, what is left of the difference.
Sparse = Callable[[int, "Numbers"], "Numbers"]

MAGNITUDE = (1 << 63) - 1  # all bits but the sign
DIGIT = 16  # bits that a pass counts
SORTED = 1 << 20  # numbers that are sorted in memory

# Makes a pass over a tensor: blocks of float64 from its beginning, each of BLOCK numbers but the last.
Pass = Callable[[], Iterable["NDArray[Any]"]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How tensors are merged, of which the first is the base's, or SLERP's start."""

    method: str
    weights: tuple[float, ...] = ()  # of all but the first
    t: float = 0.5
    scale: float = 1.0  # λ
    density: float = 1.0
    seed: int = 0

    def rule(self, name: str, tensors: Aligned, parallel: list[str]) -> Rule:
        """Return the formula for one tensor; reads all of it where that needs numbers of the whole.

        Args:
            name: the tensor's, from which DARE's random bits are made.
            tensors: the same tensor of all models.
            parallel: gets the name where SLERP becomes linear.
        """
        if self.method == "slerp":
            return self._slerp(name, tensors, parallel)
        prepare = {"ties": self._trimmed, "dare": self._dropped}.get(self.method, _whole)
        combined = _elected if self.method == "ties" else _summed
        pairs = [Aligned((tensors.tensors[0], tensor)) for tensor in tensors.tensors[1:]]
        sparse = [prepare(f"{name}\0{number}", pair) for number, pair in enumerate(pairs)]

        def rule(start: int, numbers: list[Numbers]) -> Numbers:
            base, *others = numbers
            with np.errstate(all="ignore"):
                differences = [_difference(base, each) for each in others]
                left = [
                    what_is_left(start, each) for what_is_left, each in zip(sparse, differences, strict=True)
                ]
                change = self.scale * combined(left, self.weights)
                return np.where(change == 0, base, base + change)  # even of -0.0

        return rule

    def _slerp(self, name: str, tensors: Aligned, parallel: list[str]) -> Rule:
        sums = [0.0, 0.0, 0.0]
        with np.errstate(all="ignore"):
            for _, (a, b) in tensors.blocks():
                sums = [*map(add, sums, (float(a @ b), float(a @ a), float(b @ b)))]
        dot, *squares = sums
        for square in squares:
            dot /= length if (length := math.sqrt(square)) > NO_LENGTH else 1.0
        shares = 1 - self.t, self.t
        if abs(dot) <= PARALLEL:
            angle = math.acos(dot)
            shares = math.sin(angle * shares[0]) / math.sin(angle), math.sin(angle * self.t) / math.sin(angle)
        else:  # as of what is not a number: the numbers beside it are kept
            parallel.append(name)
        return lambda _, numbers: _summed(numbers, shares)

    def _trimmed(self, name: str, pair: Aligned) -> Sparse:
        """Keep the largest differences, at least one."""
        k = max(int(self.density * pair.count), 1)
        if self.density in (0, 1) or k >= pair.count:
            return _none if self.density == 0 else _all
        top = top_k(lambda: (_difference(*numbers) for _, numbers in pair.blocks()), k)
        return lambda start, values: values * top.mask(start, values)

    def _dropped(self, name: str, pair: Aligned) -> Sparse:
        """Keep each difference with the probability `density`, and the sum of their magnitudes."""
        if self.density in (0, 1):
            return _none if self.density == 0 else _all
        kept = RandomMask(f"{self.seed}\0{name}", self.density)
        before = after = 0.0
        with np.errstate(all="ignore"):
            for start, numbers in pair.blocks():
                sizes = abs(_difference(*numbers))
                before += float(sizes.sum())
                after += float((sizes * kept.mask(start, sizes)).sum())
        factor = before / after if min(before, after) >= NO_SUM else 1.0
        if not math.isfinite(factor):
            factor = 1 / self.density  # what is to be expected of the numbers beside it
        return lambda start, values: values * kept.mask(start, values) * factor


@dataclass(frozen=True, slots=True)
class RandomMask:
    """Which numbers of a tensor are kept: random, but always the same for the same text and place."""

    text: str
    probability: float

    def mask(self, start: int, values: Numbers) -> NDArray[np.bool_]:
        """Return it for the block that begins at `start`; Philox makes its bits from a key and a counter."""
        key = int.from_bytes(
            hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).digest()[:16], "little"
        )
        generator = np.random.Philox(key=key, counter=start // 4)  # which counts four numbers at a time
        random: NDArray[np.uint64] = generator.random_raw(len(values))
        kept: NDArray[np.bool_] = random < np.uint64(int(self.probability * 2**64))
        return kept


def _difference(base: Numbers, other: Numbers) -> Numbers:
    """Return what was learnt; nothing where the numbers are equal, infinities too."""
    with np.errstate(all="ignore"):
        return np.where(other == base, 0.0, other - base)


def _whole(name: str, pair: Aligned) -> Sparse:
    return _all


def _all(start: int, values: Numbers) -> Numbers:
    return values


def _none(start: int, values: Numbers) -> Numbers:
    return values * 0.0


def _summed(values: list[Numbers], weights: Sequence[float]) -> Numbers:
    """Return the weighted sum of what has a weight."""
    with np.errstate(all="ignore"):
        terms = (weight * each for weight, each in zip(weights, values, strict=True) if weight)
        return sum(terms, start=np.zeros_like(values[0]))


def _elected(values: list[Numbers], weights: Sequence[float]) -> Numbers:
    """Return the weighted mean of those that have the sign of the sum; that of 0 is positive."""
    weighted = [weight * each for weight, each in zip(weights, values, strict=True)]
    sign = np.where(reduce(add, weighted) >= 0, 1.0, -1.0)
    agree = [np.sign(each) == sign for each in weighted]
    total = reduce(add, (each * is_in for each, is_in in zip(weighted, agree, strict=True)))
    by = reduce(add, (weight * is_in for weight, is_in in zip(weights, agree, strict=True)))
    mean: Numbers = total / np.where(by == 0, 1.0, by)
    return mean


# ---- the largest of many numbers ----------------------------------------------------------------------
# The bits of a float's magnitude are ordered as the magnitudes are. Each pass counts the next 16 bits of the
# numbers whose higher bits are those of the k-th largest, until few enough are left to be sorted.


@dataclass(frozen=True, slots=True)
class LargestMask:
    """Which numbers of a tensor are among its k largest: of equal ones, the first. NaN is larger than all."""

    least: int  # the bits of the k-th largest magnitude
    places: int  # how many of the numbers that have these bits are among the k
    before: NDArray[np.int64]  # how many of them stand before each block

    def mask(self, start: int, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which numbers of the block that begins at `start` are among the k largest."""
        bits = _bits(values)
        equal = bits == self.least
        left = self.places - self.before[start // BLOCK]
        first = equal & (np.cumsum(equal) <= left) if left < len(values) else equal
        chosen: NDArray[np.bool_] = (bits > self.least) | first
        return chosen


def top_k(values: Pass, k: int) -> LargestMask:
    """Return which numbers are the `k` of largest magnitude.

    Args:
        values: makes a pass over the tensor.
        k: how many, from 1 to the number of elements.
    """
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
    return LargestMask(high, left, np.cumsum([0, *equal]))


def _digits(values: NDArray[Any], high: int, shift: int) -> NDArray[np.int64]:
    """Count the values of DIGIT bits from `shift` up, of the numbers whose higher bits are these."""
    bits = _bits(values) >> np.uint64(shift)
    digits = bits[bits >> np.uint64(DIGIT) == high] & np.uint64((1 << DIGIT) - 1)
    return np.bincount(digits.astype(np.int64), minlength=1 << DIGIT)


def _bits(values: NDArray[Any]) -> NDArray[np.uint64]:
    bits: NDArray[np.uint64] = values.view(np.uint64) & np.uint64(MAGNITUDE)
    return bits


# ---- The merged tensors of several models: computed when they are written, a block of each model at a
# time.
#
# What a method is given is checked before anything is read.


METHODS = ("linear", "slerp", "task", "ties", "dare")

# The settings that each method takes, as they are called on the command line
TAKES = {
    "linear": {"weights"},
    "slerp": {"base", "t"},
    "task": {"base", "weights", "scale"},
    "ties": {"base", "weights", "scale", "density"},
    "dare": {"base", "weights", "scale", "density", "seed"},
}
FLAGS = {"scale": "lambda"}


def recipe(
    method: str,
    files: int,
    weights: Sequence[float] | None,
    *,
    has_base: bool,
    t: float | None,
    scale: float | None,
    density: float | None,
    seed: int | None,
) -> Recipe:
    """Return how `files` are merged, by another method than `linear`. Raises UsageFault."""
    if method not in METHODS:
        raise UsageFault(f"there is no method '{method}'", hint=f"one of {', '.join(METHODS)}")
    require_no_more(method, weights=weights, t=t, scale=scale, density=density, seed=seed)
    if method == "slerp" and files + has_base != 2:
        what = f"slerp goes from one model to one other, and {files + has_base} are given"
        raise UsageFault(what, hint="ckpttool average a.pt b.pt between.pt --method slerp --t 0.3")
    if method != "slerp" and not has_base:
        what = f"{method} adds what models learnt to the one they were trained from"
        raise UsageFault(f"{what}, and none is given", hint="name it: --base BASE")
    if not files:
        raise UsageFault(f"{method} needs a file to merge into the base")
    for name, value in {"t": t, "density": density}.items():
        if value is not None and not 0 <= value <= 1:
            raise UsageFault(f"--{name} {value:g} is not a number from 0 to 1")
    shares = one_for_each(weights, files)
    if not all(map(math.isfinite, (*shares, 1.0 if scale is None else scale))):
        raise UsageFault("weights and --lambda must be finite")
    if not any(shares) and method != "slerp":
        raise UsageFault("weights must not all be 0: nothing would be added to the base")
    return Recipe(
        method,
        tuple(shares),
        t=0.5 if t is None else t,
        scale=1.0 if scale is None else scale,
        density=1.0 if density is None else density,
        seed=seed or 0,
    )


def one_for_each(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return the weights of `count` files, all 1 when None. Raises UsageFault if there are more or fewer."""
    shares = [1.0] * count if weights is None else list(weights)
    if len(shares) != count:
        raise UsageFault(f"{len(shares)} weights for {count} files", hint="--weights w0,w1,… one per file")
    return shares


def require_no_more(method: str, **given: object) -> None:
    """Raise UsageFault for a setting that has no effect on a method."""
    for name, value in given.items():
        if value is not None and name not in TAKES[method]:
            takers = ", ".join(each for each, taken in TAKES.items() if name in taken)
            what = f"--{FLAGS.get(name, name)} has no effect on {method}"
            raise UsageFault(what, hint=f"leave it out; it is for --method {takers}")


@dataclass(slots=True)
class Merger:
    """Makes the bytes of merged tensors.

    Attributes:
        recipe: how they are merged.
        parallel: names of the tensors between which SLERP was linear, complete once the bytes are written.
        casting: which finite numbers became infinite or NaN, likewise.
    """

    recipe: Recipe
    parallel: list[str] = field(default_factory=list)
    casting: CastReport = field(default_factory=CastReport)

    def computed(self, name: str, inputs: list[TensorRef], part: DType) -> Computed:
        """Return the bytes of a tensor, in the byte order of the last input.

        Args:
            name: the tensor's.
            inputs: the same tensor of all models, in the recipe's order.
            part: the type of its numbers.
        """
        self.casting.tensors += 1
        tensor = _Tensor(name, Aligned(inputs), part, self, self.casting.tensors)
        return Computed(inputs[-1].storage.data.path, inputs[-1].nbytes, tensor.make, is_divisible=True)


@dataclass(slots=True)
class _Tensor:
    """One merged tensor, whose rule is found when its first bytes are asked for."""

    name: str
    inputs: Aligned
    part: DType
    merger: Merger
    number: int
    _lock: Lock = field(default_factory=Lock)
    _rule: Rule | None = None

    def rule(self) -> Rule:
        with self._lock:
            if self._rule is None:
                self._rule = self.merger.recipe.rule(self.name, self.inputs, self.merger.parallel)
            return self._rule

    def make(self, start: int, nbytes: int) -> Iterator[memoryview]:
        size = self.part.itemsize
        first, end = start // size, (start + nbytes) // size
        big_endian = self.inputs.tensors[-1].is_swapped
        for at, numbers in self.inputs.blocks(first, end) if nbytes else ():
            with np.errstate(all="ignore"):
                merged = self.rule()(at, numbers)
                rounded = nearest(merged, self.part)
                made = reader(self.part)(rounded)
                if not np.isfinite(made).all():
                    finite = np.logical_and.reduce([np.isfinite(each) for each in numbers])
                    self.merger.casting.note_non_finite(self.number, finite, made, at)
            wanted = rounded[max(first - at, 0) : end - at]
            yield bytes_of(wanted, self.part, big_endian=big_endian)
