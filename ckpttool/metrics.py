"""Metrics that are exact: the same to the last bit for any number of ranks, any batches and any order.

    accuracy = metrics.Accuracy()
    for scores, labels in batches:                 # of this rank alone
        accuracy.update(scores, labels)
    print(metrics.reduce(accuracy).compute())      # of all ranks, on every rank

What a metric keeps is whole numbers: counts, and sums without rounding (`exact_sum`). Two of them merge by
adding those, and the one division comes last, when all is there. Inputs are numpy arrays or torch tensors on
any device, of one batch. Numpy is imported when a metric is made, torch only by `reduce` and `gather`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

from .batches import as_floats, as_labels, as_predictions, as_scores, same_length
from .exact_sum import rounded
from .metric import Metric as Metric
from .metric import share

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

M = TypeVar("M", bound="Metric[Any]")


class Count(Metric[int]):
    """How many samples there were."""

    def __init__(self) -> None:
        super().__init__(counts=1)

    def update(self, samples: Any) -> None:
        """Args: anything with one row a sample."""
        self.counts[0] += len(samples)

    def compute(self) -> int:
        return int(self.counts[0])


class Loss(Metric[float]):
    """The mean of the losses of all samples, rounded once; NaN of none."""

    def __init__(self) -> None:
        super().__init__(counts=1, sums=1)

    def update(self, losses: Any) -> None:
        """Args: floats [n], one a sample (`reduction="none"`): means of batches are refused."""
        values = as_floats(losses, dims=1)
        self.counts[0] += len(values)
        self.sums[0].add(values)

    def compute(self) -> float:
        return self.sums[0].over(int(self.counts[0]))


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


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and variance (over the count) of numbers; NaN of none."""

    count: int
    mean: float
    variance: float


class MeanVariance(Metric[Moments]):
    """Mean and variance of numbers, each the exact one rounded once: nothing cancels."""

    def __init__(self) -> None:
        super().__init__(counts=1, sums=2)

    def update(self, values: Any) -> None:
        """Args: floats of any shape."""
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
    """The area under the ROC curve of two classes, of all thresholds: the share of pairs that are in order.

    Keeps each distinct score with its counts, so it grows with them. NaN where a class has no sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self._met: list[tuple[Any, Any, Any]] = []

    def update(self, scores: Any, labels: Any) -> None:
        """Args: floats [n], higher for class 1, not NaN; labels [n] of 0 and 1."""
        import numpy as np

        values, right = as_floats(scores, dims=1), as_labels(labels, below=2)
        same_length(values, right)
        if np.isnan(values).any():
            raise ValueError("a score is NaN, which is in no order with the others")
        self._met.append((values + 0.0, right, 1 - right))  # -0.0 + 0.0 is 0.0, the same score

    def compute(self) -> float:
        _, positive, negative = self._table()
        pairs, below = 0, 0
        for ones, zeros in zip(positive.tolist(), negative.tolist(), strict=True):
            pairs += ones * (2 * below + zeros)
            below += zeros
        return share(pairs, 2 * int(positive.sum()) * below)

    def pack(self) -> NDArray[Any]:
        import numpy as np

        scores, positive, negative = self._table()
        return np.concatenate([scores.view(np.int64), positive, negative])

    def merge_packed(self, packed: NDArray[Any]) -> None:
        import numpy as np

        scores, positive, negative = packed.reshape(3, -1)
        self._met.append((scores.view(np.float64), positive, negative))

    def _table(self) -> tuple[Any, Any, Any]:
        """Each distinct score in ascending order, and how many samples of class 1 and of class 0 have it."""
        import numpy as np

        met = self._met or [(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))]
        parts = [np.concatenate(columns) for columns in zip(*met, strict=True)]
        scores, places = np.unique(parts[0], return_inverse=True)
        counts = []
        for part in parts[1:]:
            summed = np.zeros(len(scores), dtype=np.int64)
            np.add.at(summed, places, part)
            counts.append(summed)
        self._met = [(scores, counts[0], counts[1])]
        return self._met[0]


class CalibrationError(Metric[float]):
    """How far confidence is from accuracy: |right - confidence| in bins of equal width, weighted by samples.

    The expected calibration error of Guo et al., "On Calibration of Modern Neural Networks" (2017), in bins
    that hold their upper edge.
    """

    def __init__(self, bins: int = 15) -> None:
        super().__init__(bins, counts=2 * bins, sums=bins)
        self.bins = bins

    def update(self, confidences: Any, correct: Any) -> None:
        """Args: floats [n] in [0, 1]; booleans [n]: whether that sample was right."""
        import numpy as np

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


def reduce(metric: M) -> M:
    """The metric of all ranks, on every rank; this rank's own stays as it is. A collective.

    Each rank's whole numbers travel, and are added: in which order does not matter.

    Raises:
        RanksDiffer: ranks reduce metrics of different kinds or settings.
    """
    from .gathering import arrays_of_all_ranks
    from .ranks import rank

    whole = copy.deepcopy(metric)
    for number, packed in enumerate(arrays_of_all_ranks(metric.pack(), repr(metric))):
        if number != rank():
            whole.merge_packed(packed)
    return whole


def gather(
    index: torch.Tensor, columns: Mapping[str, torch.Tensor], *, samples: int, **choices: Any
) -> dict[str, torch.Tensor]:
    """What can't be reduced: rows of all ranks, joined by sample. See `gathering.gather`."""
    from .gathering import gather

    return gather(index, columns, samples=samples, **choices)
