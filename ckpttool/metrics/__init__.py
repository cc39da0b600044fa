"""Metrics that are exact: the same to the last bit for any number of ranks, any batches and any order.

    accuracy = metrics.Accuracy()
    for scores, labels in batches:                 # this rank's batches
        accuracy.update(scores, labels)
    print(metrics.reduce(accuracy).compute())      # over all ranks, on every rank

A metric's state is integers: counts, and sums without rounding (`exact_sum`). Two metrics merge by adding
these, and the one division comes last. Inputs are numpy arrays or torch tensors on any device. Making a
metric imports numpy; only `reduce` and `gather` import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy import attributes

if TYPE_CHECKING:
    from .base import Metric as Metric
    from .base import gather as gather
    from .base import reduce as reduce
    from .evaluating import evaluate as evaluate
    from .evaluating import evaluate_classes as evaluate_classes
    from .scores import AUROC as AUROC
    from .scores import R2 as R2
    from .scores import Accuracy as Accuracy
    from .scores import CalibrationError as CalibrationError
    from .scores import ClassScore as ClassScore
    from .scores import ConfusionMatrix as ConfusionMatrix
    from .scores import Count as Count
    from .scores import Loss as Loss
    from .scores import MeanAbsoluteError as MeanAbsoluteError
    from .scores import MeanSquaredError as MeanSquaredError
    from .scores import MeanVariance as MeanVariance
    from .scores import Moments as Moments
    from .scores import PerClass as PerClass
    from .scores import Perplexity as Perplexity
    from .scores import TopK as TopK
else:
    __getattr__, __dir__, __all__ = attributes(
        __name__,
        {
            "base": "Metric gather reduce",
            "scores": (
                "Accuracy ClassScore ConfusionMatrix Count PerClass TopK AUROC CalibrationError "
                "Loss MeanAbsoluteError MeanSquaredError MeanVariance Moments Perplexity R2"
            ),
            "evaluating": "evaluate evaluate_classes",
        },
    )
