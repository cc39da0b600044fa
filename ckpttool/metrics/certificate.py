"""The certificate of an evaluation: exact metrics over every sample, once. Imports numpy when called.

An evaluation, and whoever checks its prediction files later, compute the same certificate by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count, islice
from typing import Any

from ..contract import SCHEMA, finite
from ..distributed.exactly_once import MOST_SHOWN, faults, index_digest, listed
from ..errors import CheckFailed, UsageFault
from ..lazy import NDArray, np
from . import Accuracy, ClassScore, Loss, PerClass
from .predictions import COLUMNS, Evaluation, PredictionFile, Predictions

# Classes that are counted where nothing names them: as many as the largest vocabularies have tokens.
MAX_CLASSES = 1 << 18

# What is stated of each class.
OF_CLASS = ("correct", "samples", "predicted", "precision", "recall", "f1")


@dataclass(frozen=True, slots=True)
class _Certified:
    """What a certificate rests on."""

    evaluation: Evaluation
    samples: int
    loss: float  # the mean, rounded once from the exact sum of samples' losses, or of batches' sums
    rank_samples: tuple[int, ...]  # how many each rank scored
    index_digest: str  # SHA-256 of the set of samples

    @property
    def ranks(self) -> int:
        return len(self.rank_samples)

    def score(self) -> dict[str, Any]:
        """Return the results as JSON values, NaN and inf as None. Only `ranks` depends on their number."""
        raise NotImplementedError

    def statement(self) -> dict[str, Any]:
        """Return the whole certificate as JSON values, as in eval.json."""
        return {
            "schema": SCHEMA,
            **self.score(),
            "rank_samples": list(self.rank_samples),
            "every_sample_once": True,
            "index_digest": self.index_digest,
            "digest": self.evaluation.checkpoint,
            **{name: getattr(self.evaluation, name) for name in ("data", "device", "threads", "batch_size")},
        }


@dataclass(frozen=True, slots=True)
class Certificate(_Certified):
    """The result of an evaluation of classes, in which every sample appears exactly once."""

    correct: int
    per_class: tuple[ClassScore, ...]  # by label, as `classes`
    classes: tuple[str, ...]

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples if self.samples else 0.0

    def score(self) -> dict[str, Any]:
        return {
            "correct": self.correct,
            "samples": self.samples,
            "accuracy": self.accuracy,
            "loss": finite(self.loss),
            "per_class": [
                {"class": name, **{column: finite(getattr(score, column)) for column in OF_CLASS}}
                for name, score in zip(self.classes, self.per_class, strict=True)
            ],
            "ranks": self.ranks,
        }


@dataclass(frozen=True, slots=True)
class LossCertificate(_Certified):
    """The result of an evaluation with any loss and metrics, in which every sample appears exactly once."""

    count: int | float  # what the loss is a mean over: samples, tokens, pixels, or weights
    metrics: Mapping[str, Any]  # what each metric's `compute` returned, over all ranks

    def score(self) -> dict[str, Any]:
        return {
            "loss": finite(self.loss),
            "samples": self.samples,
            "count": self.count,
            "metrics": finite(self.metrics),
            "ranks": self.ranks,
        }


def certify(joined: Predictions, evaluation: Evaluation, rank_samples: Sequence[int]) -> Certificate:
    """Compute the certificate of predictions in which every sample is known to appear once."""
    labels, predictions = joined.label, joined.prediction
    if (classes := evaluation.classes) is None:
        classes, labels, predictions = _numbered(labels, predictions)
    wrong = joined.index[(labels < 0) | (labels >= len(classes))]
    if len(wrong):
        raise CheckFailed(f"sample {wrong[0]} has a label that is not one of the {len(classes)} classes")
    accuracy, loss, per_class = Accuracy(), Loss(), PerClass(len(classes))
    accuracy.update(predictions, labels)
    loss.update(joined.loss)
    per_class.update(predictions, labels)
    return Certificate(
        evaluation,
        len(joined),
        loss.compute(),
        tuple(rank_samples),
        index_digest(len(joined)),
        accuracy.correct,
        per_class.compute(),
        classes,
    )


def _numbered(
    labels: NDArray[Any], predictions: NDArray[Any]
) -> tuple[tuple[str, ...], NDArray[Any], NDArray[Any]]:
    """Return the classes that are labels or predicted, and both columns as places among these."""
    # Not all up to the largest: one label of 2^40 would take 24 TB. Numbers below 0 are no classes.
    classes, places = np.unique(np.concatenate([labels, predictions]), return_inverse=True)
    below_0 = int(np.searchsorted(classes, 0))
    if len(classes) - below_0 > MAX_CLASSES:
        raise CheckFailed(
            f"labels and predictions are {len(classes) - below_0} different classes; at most {MAX_CLASSES} "
            "are counted",
            hint="are the columns in the right order? label and prediction are numbers of classes",
        )
    places = places.reshape(-1) - below_0
    return tuple(map(str, classes[below_0:].tolist())), places[: len(labels)], places[len(labels) :]


def recompute(files: Sequence[PredictionFile], samples: int | None = None) -> Certificate:
    """Compute the certificate of an evaluation from its prediction files."""
    ordered = sorted(files, key=lambda file: math.inf if file.rank is None else file.rank)
    evaluation = _common(ordered)
    wanted = evaluation.samples if samples is None else samples
    if wanted is None:
        reason = f"{ordered[0].path}: does not say how many samples there are"
        raise UsageFault(reason, hint="give the number as --samples")
    if evaluation.samples not in (None, wanted):
        raise CheckFailed(f"{ordered[0].path}: is of {evaluation.samples} samples, not {wanted}")
    said = [*_missing_ranks(ordered, evaluation.world_size), *_faults(ordered, wanted)]
    if said:
        raise CheckFailed("; ".join(said), hint="give the file of every rank, each once")
    index = np.concatenate([file.predictions.index for file in ordered])
    joined = {}
    for name in COLUMNS:
        column = np.concatenate([getattr(file.predictions, name) for file in ordered])
        joined[name] = np.empty_like(column)
        joined[name][index] = column
    return certify(Predictions(**joined), evaluation, [len(file.predictions) for file in ordered])


def _common(files: Sequence[PredictionFile]) -> Evaluation:
    """Return the evaluation that all files belong to. Raises CheckFailed if they differ."""
    first = files[0]
    for file in files[1:]:
        for field in fields(Evaluation):
            here, there = getattr(first.evaluation, field.name), getattr(file.evaluation, field.name)
            if here != there:
                raise CheckFailed(
                    f"{file.path}: is of a different evaluation than {first.path}: "
                    f"its {field.name} is {there}, not {here}",
                    hint="give the files of one evaluation",
                )
    return first.evaluation


def _missing_ranks(files: Sequence[PredictionFile], world_size: int | None) -> list[str]:
    """Name the ranks that have no file or several."""
    of_rank: dict[int, list[str]] = {}
    for file in files:
        if file.rank is not None:
            of_rank.setdefault(file.rank, []).append(file.path)
    said = [
        f"rank {rank} has several files: {', '.join(paths)}" for rank, paths in of_rank.items() if paths[1:]
    ]
    missing = (world_size or 0) - sum(rank < (world_size or 0) for rank in of_rank)
    if missing > 0:
        first = islice((rank for rank in count() if rank not in of_rank), min(missing, MOST_SHOWN))
        verb = "is" if missing == 1 else "are"
        names = listed(first, missing - MOST_SHOWN)
        said.append(f"rank{'s' * (missing > 1)} {names} of {world_size} {verb} missing")
    return said


def _faults(files: Sequence[PredictionFile], samples: int) -> list[str]:
    """Describe samples that do not appear exactly once. A file given twice counts twice."""
    parts: dict[str, Any] = {}
    for file in files:
        name = file.path
        while name in parts:
            name += " again"
        parts[name] = file.predictions.index
    return faults(parts, samples)
