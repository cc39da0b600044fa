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
        """Add predictions and targets: numbers of the same shape; nothing is broadcast."""
        predicted, wanted = _pair(predictions, targets)
        self.counts[0] += predicted.size
        self.sums[0].add_squares(_errors(predicted, wanted))

    def compute(self) -> float:
        return self.sums[0].over(int(self.counts[0]))


class MeanAbsoluteError(Metric[float]):
    """The mean of |prediction - target| over all numbers; NaN of none.

    Each difference is rounded once to float64; their sum is exact.
    """

    def __init__(self) -> None:
        super().__init__(counts=1, sums=1)

    def update(self, predictions: Any, targets: Any) -> None:
        """Add predictions and targets: numbers of the same shape; nothing is broadcast."""
        predicted, wanted = _pair(predictions, targets)
        self.counts[0] += predicted.size
        self.sums[0].add(abs(_errors(predicted, wanted)))

    def compute(self) -> float:
        return self.sums[0].over(int(self.counts[0]))


class R2(Metric[float]):
    """The coefficient of determination, 1 - Σ(prediction - target)² / Σ(target - mean)².

    Of several outputs per sample, the mean of their coefficients, as scikit-learn's `r2_score` gives it. NaN
    if the targets of an output are all equal, or a number is not finite. Raises ValueError without an output.
    """

    def __init__(self, outputs: int = 1) -> None:
        if outputs < 1:
            raise ValueError(f"outputs is {outputs}, and at least 1 is needed")
        super().__init__(outputs, counts=1, sums=3 * outputs)
        self.outputs = outputs

    def update(self, predictions: Any, targets: Any) -> None:
        """Add predictions and targets: numbers [n], or [n, ...] with `outputs` numbers for each sample."""
        predicted, wanted = _pair(predictions, targets)
        samples = len(predicted) if predicted.ndim else 0
        if predicted.size != samples * self.outputs or predicted.ndim == 0:
            raise ValueError(f"{self!r} needs {self.outputs} per sample; the shape is {predicted.shape}")
        wanted = wanted.reshape(samples, self.outputs)
        errors = _errors(predicted.reshape(wanted.shape), wanted)
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
    predicted, wanted = as_floats(predictions), as_floats(targets)
    if predicted.shape != wanted.shape:
        raise ValueError(f"predictions have the shape {predicted.shape}, and targets {wanted.shape}")
    return predicted, wanted


def _errors(predicted: NDArray[Any], wanted: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        errors: NDArray[Any] = np.asarray(predicted - wanted)
    return errors
