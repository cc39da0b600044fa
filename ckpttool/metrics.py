"""Metrics that are exact: the same to the last bit for any number of ranks, any batches and any order.

    accuracy = metrics.Accuracy()
    for scores, labels in batches:                 # only of this rank
        accuracy.update(scores, labels)
    print(metrics.reduce(accuracy).compute())      # of all ranks, on every rank

What a metric keeps is whole numbers: counts, and sums without rounding (`exact_sum`). Two of them merge by
adding those, and the one division comes last, when all is there. Inputs are numpy arrays or torch tensors on
any device, of one batch. Numpy is imported when a metric is made, torch only by `reduce` and `gather`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .class_metrics import Accuracy, ClassScore, ConfusionMatrix, Count, PerClass, TopK
from .metric import Metric
from .number_metrics import AUROC, CalibrationError, Loss, MeanVariance, Moments

if TYPE_CHECKING:
    import torch

__all__ = [
    "AUROC",
    "Accuracy",
    "CalibrationError",
    "ClassScore",
    "ConfusionMatrix",
    "Count",
    "Loss",
    "MeanVariance",
    "Metric",
    "Moments",
    "PerClass",
    "TopK",
    "gather",
    "reduce",
]

M = TypeVar("M", bound="Metric[Any]")


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
