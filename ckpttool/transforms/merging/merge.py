"""The merged tensors of several models: computed when they are written, a block of each model at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock

from ...tensors.cast import CastReport, reader
from ...tensors.dtypes import DType
from ...tensors.ref import Computed, TensorRef
from ..mean import nearest
from .aligned import Aligned, bytes_of
from .methods import Recipe, Rule


@dataclass(slots=True)
class Merger:
    """Makes the bytes of merged tensors.

    Attributes:
        recipe: how they are merged.
        parallel: names of the tensors between which SLERP was linear, complete once the bytes are written.
        casting: how many numbers became infinite, likewise.
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
        import numpy as np

        size = self.part.itemsize
        first, end = start // size, (start + nbytes) // size
        big_endian = self.inputs.tensors[-1].is_swapped
        for at, numbers in self.inputs.blocks(first, end) if nbytes else ():
            with np.errstate(all="ignore"):
                merged = self.rule()(at, numbers)
                rounded = nearest(merged, self.part)
                infinite = np.isinf(reader(self.part)(rounded))
                if infinite.any():
                    finite = np.logical_and.reduce([np.isfinite(each) for each in numbers])
                    self.merger.casting.note(self.number, np.flatnonzero(infinite & finite) + at)
            wanted = rounded[max(first - at, 0) : end - at]
            yield bytes_of(wanted, self.part, big_endian=big_endian)
