"""Exact metrics of predicted numbers. Imports numpy when a metric is made."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from .base import Metric, as_floats
from .exact_sum import rounded

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MeanSquaredError(Metric[float]):
    """The mean of (prediction - target)² over all numbers; NaN of none.

    Each difference is rounded once to float64; squares and their sum are exact.
    """

    def __init__(self) -> None:
        super().__init__(counts=1, sums=1)

    def update(self, predictions: Any, targets: Any) -> None:
        """Add a batch.

        Args:
            predictions, targets: numbers of any one shape.

        Raises:
            TypeError: they are not real numbers.
            ValueError: the shapes differ; nothing is broadcast.
        """
        found, wanted = _pair(predictions, targets)
        self.counts[0] += found.size
        self.sums[0].add_squares(_errors(found, wanted))

    def compute(self) -> float:
        return self.sums[0].over(int(self.counts[0]))


class MeanAbsoluteError(Metric[float]):
    """The mean of |prediction - target| over all numbers; NaN of none.

    Each difference is rounded once to float64; their sum is exact.
    """

    def __init__(self) -> None:
        super().__init__(counts=1, sums=1)

    def update(self, predictions: Any, targets: Any) -> None:
        """Add a batch. Args and Raises are those of `MeanSquaredError.update`."""
        found, wanted = _pair(predictions, targets)
        self.counts[0] += found.size
        self.sums[0].add(abs(_errors(found, wanted)))

    def compute(self) -> float:
        return self.sums[0].over(int(self.counts[0]))


class R2(Metric[float]):
    """The coefficient of determination, 1 - Σ(prediction - target)² / Σ(target - mean)².

    Of several outputs per sample, the mean of their coefficients, as scikit-learn's `r2_score` gives it. NaN
    where the targets of an output are all equal, and where a number is not finite.

    Raises:
        ValueError: there is not even one output.
    """

    def __init__(self, outputs: int = 1) -> None:
        if outputs < 1:
            raise ValueError(f"outputs is {outputs}, and at least 1 is needed")
        super().__init__(outputs, counts=1, sums=3 * outputs)
        self.outputs = outputs

    def update(self, predictions: Any, targets: Any) -> None:
        """Add a batch.

        Args:
            predictions, targets: numbers [n] if there is one output per sample, or [n, ...] with `outputs`
                numbers each.

        Raises:
            TypeError: they are not real numbers.
            ValueError: the shapes differ, or a sample has another number of outputs.
        """
        found, wanted = _pair(predictions, targets)
        samples = len(found) if found.ndim else 0
        if found.size != samples * self.outputs or found.ndim == 0:
            raise ValueError(f"{self!r} needs {self.outputs} per sample; the shape is {found.shape}")
        wanted = wanted.reshape(samples, self.outputs)
        errors = _errors(found.reshape(wanted.shape), wanted)
        self.counts[0] += samples
        for output in range(self.outputs):
            residual, total, squares = self.sums[3 * output : 3 * output + 3]
            residual.add_squares(errors[:, output])
            total.add(wanted[:, output])
            squares.add_squares(wanted[:, output])

    def compute(self) -> float:
        samples, coefficients = int(self.counts[0]), []
        for output in range(self.outputs):
            residual, total, squares = self.sums[3 * output : 3 * output + 3]
            if not (samples and residual.is_finite and total.is_finite):
                return math.nan
            spread = squares.fraction - total.fraction**2 / samples
            if not spread:
                return math.nan
            coefficients.append(1 - residual.fraction / spread)
        return rounded(sum(coefficients, Fraction()) / self.outputs)


def _pair(predictions: Any, targets: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    found, wanted = as_floats(predictions), as_floats(targets)
    if found.shape != wanted.shape:
        raise ValueError(f"predictions have the shape {found.shape}, and targets {wanted.shape}")
    return found, wanted


def _errors(found: NDArray[Any], wanted: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        errors: NDArray[Any] = np.asarray(found - wanted)
    return errors
