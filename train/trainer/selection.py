"""Which of two scores is the better one: `--best METRIC`, or else the accuracy or the loss. Imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import CheckFailed, UsageFault
from ckpttool.metrics.base import measures
from ckpttool.metrics.certificate import Certificate, LossCertificate
from train.config.shared import OWN
from train.tasks.builtin import Classification
from train.tasks.task import Task
from train.trainer.progress import Scores

SIGNS = {"max": 1, "min": -1}

# The attribute of a metric that says whether more of it is better, as torchmetrics calls it.
MORE = "higher_is_better"


@dataclass(frozen=True)
class Selection:
    """A number of a score, and whether a larger one is the better."""

    test_set: str
    metric: str
    sign: int

    def merit(self, scores: Scores) -> float:
        """Return a number that is the larger the better; -inf if the loss or the metric is not finite.

        Raises:
            CheckFailed: the metric is not one number.
        """
        score = scores[self.test_set]
        value: Any = score.loss
        if self.metric == "accuracy" and isinstance(score, Certificate):
            value = score.accuracy
        elif self.metric != "loss" and isinstance(score, LossCertificate):
            value = score.metrics[self.metric]
        if not isinstance(value, int | float):
            raise CheckFailed(f"--best {self.metric}: is a {type(value).__name__}, not a number")
        value = float(value)  # a user's may be numpy's, which no checkpoint can hold
        return self.sign * value if math.isfinite(score.loss) and math.isfinite(value) else -math.inf

    def in_words(self, merit: float) -> str:
        """Return a merit as it is shown: `91.73%`, `loss 0.3012`, `ood/mae 0.25`."""
        value, where = self.sign * merit, f"{self.test_set}/" * bool(self.test_set)
        if self.metric == "accuracy":
            return f"{where and f'{where}accuracy '}{value:.2%}"
        return (
            f"{where}{self.metric} {value:.4f}"
            if self.metric == "loss"
            else f"{where}{self.metric} {value:.4g}"
        )


def selection(best: str | None, task: Task, test_sets: tuple[str, ...] = ()) -> Selection:
    """Return what `--best` says, as `[TEST SET/]METRIC[:min|:max]`.

    Args:
        test_sets: the names of those besides --data's own.

    Raises:
        UsageFault: there is no such metric or test set, or nothing says whether more of it is better.
    """
    has_classes = isinstance(task, Classification)
    if best is None:
        return Selection(OWN, "accuracy", 1) if has_classes else Selection(OWN, "loss", -1)
    test_set, _, rest = best.rpartition("/")
    metric, _, end = rest.partition(":")
    metrics = {} if has_classes else measures(task.metrics)
    known = ["loss", *(["accuracy"] if has_classes else metrics)]
    if test_set not in (OWN, *test_sets):
        hint = f"--also-test names {', '.join(test_sets) or 'none'}"
        raise UsageFault(f"--best {best}: no test set is named '{test_set}'", hint=hint)
    if metric not in known:
        hint = f"one of {', '.join(known)}"
        raise UsageFault(f"--best {best}: --task {task.name} has no '{metric}'", hint=hint)
    more: Any = metric == "accuracy"
    if metric in metrics:
        more = getattr(metrics[metric].make(), MORE, None)
    if (end and end not in SIGNS) or (more is None and not end):
        hint = f"{metric}:min or {metric}:max"
        raise UsageFault(f"--best {best}: nothing says whether more of it is better", hint=hint)
    return Selection(test_set, metric, SIGNS[end] if end else 1 if more else -1)
