"""Exact metrics of classes: how often the right one was predicted, in counts. Imports numpy when used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .base import Metric, share
from .inputs import as_labels, as_predictions, as_scores, same_length

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Count(Metric[int]):
    """How many samples there were."""

    def __init__(self) -> None:
        super().__init__(counts=1)

    def update(self, samples: Any) -> None:
        """Args: anything with one row per sample."""
        self.counts[0] += len(samples)

    def compute(self) -> int:
        return int(self.counts[0])


class Accuracy(Metric[float]):
    """The share of samples that were right; NaN of none."""

    def __init__(self) -> None:
        super().__init__(counts=2)

    def update(self, predictions: Any, labels: Any) -> None:
        """Args: classes [n], or scores [n, classes] of which the first largest counts; labels [n]."""
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
    """The share of samples whose label is among the k best scores.

    Of equal scores those of lower classes come first, and NaN comes before all, as in `argmax`.
    """

    def __init__(self, k: int) -> None:
        super().__init__(k, counts=2)
        self.k = k

    def update(self, scores: Any, labels: Any) -> None:
        """Args: scores [n, classes], labels [n] below `classes`."""
        import numpy as np

        values, right = as_scores(scores), as_labels(labels, below=scores.shape[1])
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
    """How many samples of each class were taken for each: int64 [classes, classes], a row for each label."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, counts=classes * classes)
        self.classes = classes

    def update(self, predictions: Any, labels: Any) -> None:
        """Args: classes [n] or scores [n, classes]; labels [n]. Raises ValueError for a class beyond."""
        right = as_labels(labels, below=self.classes)
        found = as_labels(as_predictions(predictions), below=self.classes)
        same_length(found, right)
        self.count(right * self.classes + found, 0, len(self.counts))

    def compute(self) -> NDArray[Any]:
        matrix: NDArray[Any] = self.counts.reshape(self.classes, self.classes).copy()
        return matrix


@dataclass(frozen=True, slots=True)
class ClassScore:
    """How one class fared. `correct` of its `samples` were found, among `predicted` taken for it."""

    correct: int
    predicted: int
    samples: int

    @property
    def precision(self) -> float:
        """NaN where nothing was taken for this class."""
        return share(self.correct, self.predicted)

    @property
    def recall(self) -> float:
        """NaN where there is no sample of it."""
        return share(self.correct, self.samples)

    @property
    def f1(self) -> float:
        """NaN where there is neither."""
        return share(2 * self.correct, self.predicted + self.samples)


class PerClass(Metric[tuple[ClassScore, ...]]):
    """Precision, recall and F1 of each class. A prediction beyond the classes is wrong, and of none."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, counts=3 * classes)
        self.classes = classes

    def update(self, predictions: Any, labels: Any) -> None:
        """Args: classes [n] or scores [n, any number]; labels [n]. Raises ValueError for a label beyond."""
        right, found = as_labels(labels, below=self.classes), as_predictions(predictions)
        same_length(found, right)
        within = found[(found >= 0) & (found < self.classes)]
        for kind, places in enumerate((right[found == right], within, right)):
            self.count(places, kind * self.classes, self.classes)

    def compute(self) -> tuple[ClassScore, ...]:
        return tuple(ClassScore(*each) for each in self.counts.reshape(3, self.classes).T.tolist())
