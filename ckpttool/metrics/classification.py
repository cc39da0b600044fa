"""Exact metrics of predicted classes, as counts. Imports numpy when used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..lazy import NDArray, np
from .base import Metric, as_labels, as_predictions, as_scores, same_length, share


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
        before = (
            (values > target) | (nan & ~target_nan) | (((values == target) | (nan & target_nan)) & earlier)
        )
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
