"""Exact metrics of predicted classes, losses, scores and numbers. Imports numpy when used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..core.lazy import NDArray, np
from .base import Metric, as_floats, as_labels, as_predictions, as_scores, rounded, same_length, share


class Count(Metric[int]):
    """The number of samples."""

    def __init__(self) -> None:
        super().__init__(counts=1)

    def update(self, samples: Any) -> None:
        """Add a batch: anything whose length is the number of samples."""
        self.counts[0] += len(samples)

    def compute(self) -> int:
        return int(self.counts[0])


class SampleFraction(Metric[float]):
    """The base of fractions of samples: how many, and of how many; NaN without samples."""

    higher_is_better = True

    def __init__(self, *settings: object) -> None:
        super().__init__(*settings, counts=2)

    def compute(self) -> float:
        return share(*self.counts.tolist())


class Accuracy(SampleFraction):
    """The fraction of samples whose class was predicted correctly; NaN without samples."""

    def __init__(self) -> None:
        super().__init__()

    def update(self, predictions: Any, labels: Any) -> None:
        """Add predicted classes, integers [n], or scores [n, classes], and labels, integers [n]."""
        predicted, right = as_predictions(predictions), as_labels(labels)
        same_length(predicted, right)
        self.counts[0] += int((predicted == right).sum())
        self.counts[1] += len(right)

    @property
    def correct(self) -> int:
        return int(self.counts[0])

    @property
    def samples(self) -> int:
        return int(self.counts[1])


class TopK(SampleFraction):
    """The fraction of samples whose label is among the k highest scores; ValueError for k below 1.

    Of equal scores the lower class comes first, and NaN is the highest score, as in `argmax`.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"k is {k}, and at least 1 is needed")
        super().__init__(k)
        self.k = k

    def update(self, scores: Any, labels: Any) -> None:
        """Add scores [n, classes], and labels, integers [n] from 0 to classes - 1."""
        values = as_scores(scores)
        right = as_labels(labels, below=values.shape[1])
        same_length(values, right)
        target = np.take_along_axis(values, right[:, None], axis=1)
        nan, target_nan = np.isnan(values), np.isnan(target)
        earlier = np.arange(values.shape[1]) < right[:, None]
        equal = (values == target) | (nan & target_nan)
        before = (values > target) | (nan & ~target_nan) | (equal & earlier)
        self.counts[0] += int((before.sum(axis=1) < self.k).sum())
        self.counts[1] += len(right)


class ConfusionMatrix(Metric["NDArray[Any]"]):
    """The number of samples of each label and predicted class: int64 [classes, classes], a row per label."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, counts=classes * classes)
        self.classes = classes

    def update(self, predictions: Any, labels: Any) -> None:
        """Add classes, integers [n] from 0 to classes - 1, or scores [n, classes], and such labels."""
        right = as_labels(labels, below=self.classes)
        predicted = as_labels(as_predictions(predictions), below=self.classes)
        same_length(predicted, right)
        self.count(right * self.classes + predicted, 0, len(self.counts))

    def compute(self) -> NDArray[Any]:
        matrix: NDArray[Any] = self.counts.reshape(self.classes, self.classes).copy()
        return matrix


@dataclass(frozen=True, slots=True)
class ClassScore:
    """The counts of one class."""

    correct: int  # samples of this class that were predicted as such
    predicted: int  # samples of any class that were predicted as this one
    samples: int  # samples of this class

    @property
    def precision(self) -> float:
        """correct / predicted; NaN if the class was never predicted."""
        return share(self.correct, self.predicted)

    @property
    def recall(self) -> float:
        """correct / samples; NaN if the class has no samples."""
        return share(self.correct, self.samples)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; NaN if the class was never predicted and has no samples."""
        return share(2 * self.correct, self.predicted + self.samples)


class PerClass(Metric[tuple[ClassScore, ...]]):
    """Precision, recall and F1 of each class. A predicted class out of range is wrong, and of no class."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, counts=3 * classes)
        self.classes = classes

    def update(self, predictions: Any, labels: Any) -> None:
        """Add predicted classes, integers [n], or scores, and labels from 0 to classes - 1."""
        right, predicted = as_labels(labels, below=self.classes), as_predictions(predictions)
        same_length(predicted, right)
        in_range = predicted[(predicted >= 0) & (predicted < self.classes)]
        for kind, places in enumerate((right[predicted == right], in_range, right)):
            self.count(places, kind * self.classes, self.classes)

    def compute(self) -> tuple[ClassScore, ...]:
        return tuple(ClassScore(*counts) for counts in self.counts.reshape(3, self.classes).T.tolist())


# ---- Losses, scores, confidences and predicted numbers


class Mean(Metric[float]):
    """The base of mean losses and errors, each divided and rounded once; NaN without any."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(counts=1, sums=1)

    def compute(self) -> float:
        return self.sums[0].over(int(self.counts[0]))


class Loss(Mean):
    """The mean loss over samples, rounded once; NaN without samples."""

    def update(self, losses: Any) -> None:
        """Add losses: numbers [n], one for each sample (`reduction="none"`)."""
        values = as_floats(losses, dims=1)
        self.counts[0] += len(values)
        self.sums[0].add(values)


class Perplexity(Mean):
    """e to the mean loss over tokens, whose exact sum is divided and rounded once; NaN without tokens."""

    def update(self, losses: Any, counts: Any = None) -> None:
        """Add losses, numbers [n]: cross entropy in nats of a token, or summed over `counts` [n] tokens."""
        values = as_floats(losses, dims=1)
        tokens = None if counts is None else as_labels(counts)
        if tokens is not None:
            same_length(values, tokens)
            if (tokens < 0).any():
                raise ValueError(f"a count is {tokens.min()}")
        self.counts[0] += len(values) if tokens is None else int(tokens.sum())
        self.sums[0].add(values)

    def compute(self) -> float:
        try:
            return math.exp(super().compute())
        except OverflowError:
            return math.inf


class MeanSquaredError(Mean):
    """The mean of (prediction - target)² over all numbers; NaN without any.

    Each difference is rounded once to float64; squares and their sum are exact.
    """

    def update(self, predictions: Any, targets: Any) -> None:
        """Add predictions and targets: numbers of the same shape; nothing is broadcast."""
        errors = _errors(*_pair(predictions, targets))
        self.counts[0] += errors.size
        self.sums[0].add_squares(errors)


class MeanAbsoluteError(Mean):
    """The mean of |prediction - target| over all numbers; NaN without any.

    Each difference is rounded once to float64; their sum is exact.
    """

    def update(self, predictions: Any, targets: Any) -> None:
        """Add predictions and targets: numbers of the same shape; nothing is broadcast."""
        errors = _errors(*_pair(predictions, targets))
        self.counts[0] += errors.size
        self.sums[0].add(abs(errors))


class R2(Metric[float]):
    """The coefficient of determination, 1 - Σ(prediction - target)² / Σ(target - mean)².

    Of several outputs per sample, the mean of their coefficients, as scikit-learn's `r2_score` gives it. NaN
    if the targets of an output are all equal, or a number is not finite. Raises ValueError without an output.
    """

    higher_is_better = True

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
    with np.errstate(invalid="ignore", over="ignore"):
        errors: NDArray[Any] = np.asarray(predicted - wanted)
    return errors


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and variance (divided by the count) of numbers; NaN without numbers."""

    count: int
    mean: float
    variance: float


class MeanVariance(Metric[Moments]):
    """Mean and variance of numbers, each computed exactly and rounded once, so nothing cancels."""

    def __init__(self) -> None:
        super().__init__(counts=1, sums=2)

    def update(self, values: Any) -> None:
        """Add numbers of any shape."""
        numbers = as_floats(values)
        self.counts[0] += numbers.size
        self.sums[0].add(numbers)
        self.sums[1].add_squares(numbers)

    def compute(self) -> Moments:
        count, (total, squares) = int(self.counts[0]), self.sums
        if not (count and total.is_finite):
            return Moments(count, total.over(count), math.nan)
        mean = total.fraction / count
        return Moments(count, rounded(mean), rounded(squares.fraction / count - mean * mean))


class AUROC(Metric[float]):
    """The area under the ROC curve of two classes, over all thresholds: the fraction of pairs in order.

    NaN if a class has no samples. Memory grows with the number of distinct scores.
    """

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[Any, Any, Any]] = []

    def update(self, scores: Any, labels: Any) -> None:
        """Add scores, numbers [n] but NaN, higher for class 1, and labels, 0, 1 or booleans [n]."""
        values, right = as_floats(scores, dims=1), as_labels(labels, below=2)
        same_length(values, right)
        if np.isnan(values).any():
            raise ValueError("a score is NaN, which can't be ordered")
        self._seen.append((values + 0.0, right, 1 - right))  # -0.0 + 0.0 is 0.0, the same score

    def compute(self) -> float:
        _, positive, negative = self._table()
        pairs, below = 0, 0
        for ones, zeros in zip(positive.tolist(), negative.tolist(), strict=True):
            pairs += ones * (2 * below + zeros)
            below += zeros
        return share(pairs, 2 * int(positive.sum()) * below)

    def pack(self) -> NDArray[Any]:
        scores, positive, negative = self._table()
        return np.concatenate([scores.view(np.int64), positive, negative])

    def merge_packed(self, packed: NDArray[Any]) -> None:
        scores, positive, negative = packed.reshape(3, -1)
        self._seen.append((scores.view(np.float64), positive, negative))

    def _table(self) -> tuple[Any, Any, Any]:
        """Return each distinct score, ascending, and how many samples of class 1 and of class 0 have it."""
        seen = self._seen or [(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))]
        parts = [np.concatenate(columns) for columns in zip(*seen, strict=True)]
        scores, places = np.unique(parts[0], return_inverse=True)
        counts = []
        for part in parts[1:]:
            summed = np.zeros(len(scores), dtype=np.int64)
            np.add.at(summed, places, part)
            counts.append(summed)
        self._seen = [(scores, counts[0], counts[1])]
        return self._seen[0]


class CalibrationError(Metric[float]):
    """The expected calibration error of Guo et al., "On Calibration of Modern Neural Networks" (2017).

    |accuracy - mean confidence| in bins of equal width, which include their upper edge, weighted by samples.
    NaN without samples. Raises ValueError without a bin.
    """

    higher_is_better = False

    def __init__(self, bins: int = 15) -> None:
        if bins < 1:
            raise ValueError(f"bins is {bins}, and at least 1 is needed")
        super().__init__(bins, counts=2 * bins, sums=bins)
        self.bins = bins

    def update(self, confidences: Any, correct: Any) -> None:
        """Add confidences, numbers [n] from 0 to 1, and whether each was right, booleans or 0 and 1 [n]."""
        values, right = as_floats(confidences, dims=1), as_labels(correct, below=2)
        same_length(values, right)
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError("a confidence is not between 0 and 1")
        places = np.searchsorted(np.arange(1, self.bins) / self.bins, values)
        self.count(places, 0, self.bins)
        self.count(places[right == 1], self.bins, self.bins)
        for place in np.unique(places).tolist():
            self.sums[place].add(values[places == place])

    def compute(self) -> float:
        samples, right = int(self.counts[: self.bins].sum()), self.counts[self.bins :].tolist()
        gaps = [abs(total.fraction - hits) for total, hits in zip(self.sums, right, strict=True)]
        return rounded(sum(gaps, Fraction()) / samples) if samples else math.nan
