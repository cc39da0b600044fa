"""Prediction files, and the certificate computed from their rows. Imports numpy when called.

An evaluation, and whoever checks its prediction files later, compute the certificate by the same code. A
prediction file is a safetensors file of columns, `index`, `prediction` and `label` as int64 [n] and `loss`
as float64 [n], with a row for each sample that the rank has scored. Its metadata says which evaluation it is
part of.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count, islice
from typing import Any

from ..core import formats
from ..core.files.copying import Output
from ..core.files.digest import digest
from ..core.formats import safetensors
from ..core.formats.output import OutputPlace
from ..core.lazy import NDArray, np
from ..core.tensors.ref import DTYPES, Computed, TensorRef
from ..core.tensors.values import require_bounded, stream
from ..core.words import SCHEMA, finite
from ..distributed.plan import MOST_SHOWN, faults, index_digest, listed
from ..errors import CheckFailed, Damaged, Unreadable, Unsupported, UsageFault
from . import Accuracy, ClassScore, Loss, PerClass

COLUMNS = {"index": "int64", "prediction": "int64", "label": "int64", "loss": "float64"}
# The metadata key of the columns' digest, as `files.digest.digest` computes it.
ROWS = "rows"

ALONE = "name the files of ranks alone, as in eval/rank*.safetensors"
HINT = "a prediction file has index, prediction and label as int64 [n], and loss as float64 [n]"


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """A model's predictions: numpy arrays of the same length, a row per sample."""

    index: NDArray[Any]  # int64 [n], the position of the sample in its data set
    prediction: NDArray[Any]  # int64 [n], classes
    label: NDArray[Any]  # int64 [n], classes
    loss: NDArray[Any]  # float64 [n]

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What all ranks of an evaluation have in common; None where a file does not say."""

    world_size: int | None = None
    samples: int | None = None  # in the data set
    checkpoint: str | None = None  # the digest of the model's state, as `files.digest.digest` computes it
    data: str | None = None  # the name of the data set
    classes: tuple[str, ...] | None = None  # their names, by label
    # The last bits of losses depend on these three.
    device: str | None = None
    threads: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class PredictionFile:
    """The contents of a prediction file. `rank` is None if the file does not say."""

    path: str
    rank: int | None
    evaluation: Evaluation
    predictions: Predictions


def write(
    path: str | os.PathLike[str],
    predictions: Predictions,
    evaluation: Evaluation,
    rank: int,
    *,
    force: bool = False,
) -> None:
    """Write one rank's predictions; the file appears whole or not at all."""
    name = os.fspath(path)
    place = OutputPlace(name, force)
    place.require()
    tensors = {column: _as_tensor(name, getattr(predictions, column), COLUMNS[column]) for column in COLUMNS}
    stated = {"rank": rank, **asdict(evaluation)}
    metadata = {field: json.dumps(value) for field, value in stated.items() if value is not None}
    metadata[ROWS] = digest(tensors)
    with place.file() as file, Output(file) as out:
        safetensors.write(name, tensors, metadata, out)


def read(path: str | os.PathLike[str]) -> PredictionFile:
    """Read a prediction file, in any format that `ckpttool.open` reads."""
    if os.path.isdir(path):
        inside = shlex.quote(os.path.join(path, "")) + "*.safetensors"
        hint = f"name the files of all ranks: ckpttool gather-metrics {inside}"
        raise Unreadable(path, "is not a prediction file but a folder", hint=hint)
    try:
        opened = formats.open(path)
    except Unsupported as error:  # its own words are about checkpoints
        raise Unsupported(path, f"is not a prediction file; {ALONE}", hint=HINT) from error
    with opened as checkpoint:
        tensors = dict(checkpoint.tensors())
        columns = {name: _column(checkpoint.path, tensors, name) for name in COLUMNS}
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            raise Unsupported(checkpoint.path, "its columns have different numbers of rows", hint=HINT)
        stated = checkpoint.metadata.get(ROWS)
        if stated is not None and stated != digest({name: tensors[name] for name in COLUMNS}):
            raise Damaged(checkpoint.path, "its rows are not those that were written: the digest differs")
        rank, evaluation = _of_metadata(checkpoint.path, checkpoint.metadata)
        return PredictionFile(checkpoint.path, rank, evaluation, Predictions(**columns))


def _as_tensor(path: str, values: NDArray[Any], dtype: str) -> TensorRef:
    raw = values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    return TensorRef.of_bytes(Computed.in_memory(path, raw), DTYPES[dtype], values.shape)


def _column(path: str, tensors: Mapping[str, TensorRef], name: str) -> NDArray[Any]:
    if (tensor := tensors.get(name)) is None:
        raise Unsupported(path, f"is not a prediction file: it has no '{name}'", hint=HINT)
    if tensor.dtype.name != COLUMNS[name] or len(tensor.shape) != 1:
        what = f"{tensor.dtype.name} {list(tensor.shape)}"
        raise Unsupported(path, f"is not a prediction file: its '{name}' is {what}", hint=HINT)
    require_bounded(name, tensor)
    raw = b"".join(bytes(piece) for piece in stream(tensor))
    return np.frombuffer(raw, dtype=np.dtype(COLUMNS[name]).newbyteorder("<")).astype(COLUMNS[name])


def _of_metadata(path: str, metadata: Mapping[str, str]) -> tuple[int | None, Evaluation]:
    values: dict[str, Any] = {}
    integers = ("rank", "world_size", "samples", "threads", "batch_size")
    kinds = {"classes": list, **dict.fromkeys(integers, int)}
    for name in ("rank", *(field.name for field in fields(Evaluation))):
        if name not in metadata:
            continue
        try:
            values[name] = json.loads(metadata[name])
        except (ValueError, RecursionError):
            values[name] = None
        if type(values[name]) is not kinds.get(name, str):
            what = f"its metadata has no {name} as a prediction file has: {metadata[name][:40]}"
            raise Unsupported(path, what)
    if "classes" in values:
        values["classes"] = tuple(map(str, values["classes"]))
    return values.pop("rank", None), Evaluation(**values)


# ---- The certificate


# The most classes without names that are counted: as many as the largest vocabularies have tokens.
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
    samples = len(joined)
    certified = evaluation, samples, loss.compute(), tuple(rank_samples), index_digest(samples)
    return Certificate(*certified, accuracy.correct, per_class.compute(), classes)


def _numbered(
    labels: NDArray[Any], predictions: NDArray[Any]
) -> tuple[tuple[str, ...], NDArray[Any], NDArray[Any]]:
    """Return the classes that are labels or predicted, and both columns as places among these."""
    # Not all up to the largest: one label of 2^40 would take 24 TB. Numbers below 0 are no classes.
    classes, places = np.unique(np.concatenate([labels, predictions]), return_inverse=True)
    below_0 = int(np.searchsorted(classes, 0))
    if (found := len(classes) - below_0) > MAX_CLASSES:
        what = f"labels and predictions are {found} different classes; at most {MAX_CLASSES} are counted"
        hint = "are the columns in the right order? label and prediction are numbers of classes"
        raise CheckFailed(what, hint=hint)
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
                other = f"is of a different evaluation than {first.path}"
                what = f"{file.path}: {other}: its {field.name} is {there}, not {here}"
                raise CheckFailed(what, hint="give the files of one evaluation")
    return first.evaluation


def _missing_ranks(files: Sequence[PredictionFile], world_size: int | None) -> list[str]:
    """Name the ranks that have no file or several."""
    of_rank: dict[int, list[str]] = {}
    for file in files:
        if file.rank is not None:
            of_rank.setdefault(file.rank, []).append(file.path)
    repeated = ((rank, ", ".join(paths)) for rank, paths in of_rank.items() if paths[1:])
    said = [f"rank {rank} has several files: {paths}" for rank, paths in repeated]
    missing = (world_size or 0) - sum(rank < (world_size or 0) for rank in of_rank)
    if missing > 0:
        first = islice((rank for rank in count() if rank not in of_rank), min(missing, MOST_SHOWN))
        verb, names = "is" if missing == 1 else "are", listed(first, missing - MOST_SHOWN)
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
