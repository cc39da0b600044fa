"""The score of a model on the test set, the same in training and in train/evaluate.py. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ckpttool.distributed.group import Place
from ckpttool.metrics.certificate import Certificate, LossCertificate
from ckpttool.metrics.evaluating import Evaluated, Evaluator, measures
from ckpttool.metrics.predictions import Evaluation
from train.data.batches import load
from train.data.data_set import Data
from train.tasks.builtin import Classification
from train.tasks.task import Task

# Of classification, what is correct of each class; of other tasks, their loss and metrics.
Score = Certificate | LossCertificate


class Scorer:
    """Scores bare models on one test set. Keeps its loading processes from one score to the next."""

    def __init__(self, data: Data, task: Task, place: Place, *, batch_size: int, workers: int = 0) -> None:
        self.data, self.task = data, task
        self.before_batch: Callable[[], object] = lambda: None  # what it raises ends the evaluation
        self.measures = measures(task.metrics)
        loaded = partial(load, data.test, place=place, workers=workers, again=True)
        self.evaluator = Evaluator(data.test, batch_size=batch_size, device=place.device, load=loaded)

    def score(self, model: nn.Module, *, checkpoint: str | None = None) -> Score:
        """Return the score over the samples of all ranks; `checkpoint` is the digest for the certificate.

        A collective: if one rank fails, all end after the current batch.
        """
        if isinstance(self.task, Classification):
            return self.classes(model, checkpoint=checkpoint).certificate
        about, task = self._about(checkpoint), self.task
        how: dict[str, Any] = {"check": self._check, "forward": task.forward, "move": task.batch_to}
        return self.evaluator.losses(model, task.loss, self.measures, about=about, **how)

    def classes(self, model: nn.Module, *, checkpoint: str | None = None) -> Evaluated:
        """Return the score of a classifier, with this rank's rows. A collective, as `score`."""
        about = self._about(checkpoint)
        return self.evaluator.classes(model, about=about, check=self._check, forward=self.task.forward)

    def _check(self, batch: Any, indices: Any) -> None:
        self.before_batch()
        self.task.check(batch, indices, "test")

    def _about(self, checkpoint: str | None) -> Evaluation:
        classes = self.data.classes or None
        return Evaluation(checkpoint=checkpoint, data=self.data.fingerprint, classes=classes)


def selection_score(score: Score) -> float:
    """Return the number by which one score is better than another: the accuracy, or minus the loss."""
    if not math.isfinite(score.loss):
        return -math.inf
    return score.accuracy if isinstance(score, Certificate) else -score.loss


def in_words(score: Score) -> str:
    """Return a score as part of a sentence: `776 of 846 correct (91.73%), loss 0.3012`."""
    if isinstance(score, Certificate):
        return f"{score.correct} of {score.samples} correct ({score.accuracy:.2%}), loss {score.loss:.4f}"
    parts = [f"loss {score.loss:.4f} over {score.count:,}", metrics_in_words(score)]
    return f"{', '.join(filter(None, parts))}, {score.samples:,} samples"


def metrics_in_words(score: LossCertificate) -> str:
    """Return the metrics that are single numbers: `mse 0.0213, mae 0.118`."""
    numbers = ((name, value) for name, value in score.metrics.items() if isinstance(value, int | float))
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers)


def merit_in_words(task: Task, best: float) -> str:
    """Return a `selection_score` as it is shown: the accuracy, or the loss."""
    return f"{best:.2%}" if isinstance(task, Classification) else f"loss {-best:.4f}"
