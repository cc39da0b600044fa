"""The merged tensors of several models: computed when they are written, a block of each model at a time.

What a method is given is checked before anything is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

from ...errors import UsageFault
from ...lazy import np
from ...tensors.cast import reader
from ...tensors.dtypes import DType
from ...tensors.losses import CastReport
from ...tensors.ref import Computed, TensorRef
from ..mean import nearest
from .aligned import Aligned, bytes_of
from .methods import Recipe, Rule

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
