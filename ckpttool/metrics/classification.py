"""Exact metrics of predicted classes, as counts. Imports numpy when used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .base import Metric, as_labels, as_predictions, as_scores, same_length, share

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Count(Metric[int]):
    """The number of samples."""

    def __init__(self) -> None:
        super().__init__(counts=1)

    def update(self, samples: Any) -> None:
        """Add a batch.

        Args:
            samples: anything whose length is the number of samples.
        """
        self.counts[0] += len(samples)

    def compute(self) -> int:
        return int(self.counts[0])


class Accuracy(Metric[float]):
    """The fraction of samples whose class was predicted correctly; NaN of no samples."""

    def __init__(self) -> None:
        super().__init__(counts=2)

    def update(self, predictions: Any, labels: Any) -> None:
        """Add a batch.

        Args:
            predictions: classes, integers [n]; or scores [n, classes], of which the first largest is taken.
            labels: integers [n].

        Raises:
            TypeError: predicted classes or labels are not integers.
            ValueError: another shape, or not as many predictions as labels.
        """
        found, right = as_predictions(predictions), as_labels(labels)
        same_length(found, right)
        self.counts[0] += int((found == right).sum())
        self.counts[1] += len(right)

    @property
    def correct(self) -> int:
        return int(self.counts[0])

    @property
    def samples(self) -> int:
        return int(self.counts[1])

    def compute(self) -> float:
        return share(*self.counts.tolist())


class TopK(Metric[float]):
    """The fraction of samples whose label is among the k highest scores.

    Of equal scores the lower class comes first, and NaN is the highest score, as in `argmax`.

    Raises:
        ValueError: k is less than 1.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"k is {k}, and at least 1 is needed")
        super().__init__(k, counts=2)
        self.k = k

    def update(self, scores: Any, labels: Any) -> None:
        """Add a batch.

        Args:
            scores: numbers [n, classes].
            labels: integers [n], from 0 to classes - 1.

        Raises:
            TypeError: scores are not real numbers, or labels are not integers.
            ValueError: another shape, not as many scores as labels, or a label out of range.
        """
        import numpy as np

        values = as_scores(scores)
        right = as_labels(labels, below=values.shape[1])
        same_length(values, right)
        own = np.take_along_axis(values, right[:, None], axis=1)
        nan, own_nan = np.isnan(values), np.isnan(own)
        earlier = np.arange(values.shape[1]) < right[:, None]
        before = (values > own) | (nan & ~own_nan) | (((values == own) | (nan & own_nan)) & earlier)
        self.counts[0] += int((before.sum(axis=1) < self.k).sum())
        self.counts[1] += len(right)

    def compute(self) -> float:
        return share(*self.counts.tolist())


class ConfusionMatrix(Metric["NDArray[Any]"]):
    """The number of samples of each label and predicted class: int64 [classes, classes], a row per label."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, counts=classes * classes)
        self.classes = classes

    def update(self, predictions: Any, labels: Any) -> None:
        """Add a batch.

        Args:
            predictions: classes, integers [n] from 0 to classes - 1; or scores [n, classes].
            labels: integers [n] from 0 to classes - 1.

        Raises:
            TypeError: predicted classes or labels are not integers.
            ValueError: another shape, not as many predictions as labels, or a class out of range.
        """
        right = as_labels(labels, below=self.classes)
        found = as_labels(as_predictions(predictions), below=self.classes)
        same_length(found, right)
        self.count(right * self.classes + found, 0, len(self.counts))

    def compute(self) -> NDArray[Any]:
        matrix: NDArray[Any] = self.counts.reshape(self.classes, self.classes).copy()
        return matrix


@dataclass(frozen=True, slots=True)
class ClassScore:
    """The counts of one class.

    Attributes:
        correct: samples of this class that were predicted as such.
        predicted: samples of any class that were predicted as this one.
        samples: samples of this class.
    """

    correct: int
    predicted: int
    samples: int

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
        """Add a batch.

        Args:
            predictions: classes, integers [n]; or scores [n, any number].
            labels: integers [n] from 0 to classes - 1.

        Raises:
            TypeError: predicted classes or labels are not integers.
            ValueError: another shape, not as many predictions as labels, or a label out of range.
        """
        right, found = as_labels(labels, below=self.classes), as_predictions(predictions)
        same_length(found, right)
        within = found[(found >= 0) & (found < self.classes)]
        for kind, places in enumerate((right[found == right], within, right)):
            self.count(places, kind * self.classes, self.classes)

    def compute(self) -> tuple[ClassScore, ...]:
        return tuple(ClassScore(*each) for each in self.counts.reshape(3, self.classes).T.tolist())
