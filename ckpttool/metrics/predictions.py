"""Prediction files: one rank's rows of an evaluation, written and read. Imports numpy when called.

A prediction file is a safetensors file of columns, `index`, `prediction` and `label` as int64 [n] and `loss`
as float64 [n], with a row for each sample that the rank has scored. Its metadata says which evaluation it is
part of.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import formats
from ..errors import Damaged, Unreadable, Unsupported
from ..files.copying import Output
from ..files.digest import digest
from ..formats import safetensors
from ..formats.output import OutputPlace
from ..lazy import NDArray, np
from ..tensors.dtypes import DTYPES
from ..tensors.ref import Computed, TensorRef
from ..tensors.values import require_bounded, stream

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    def columns(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in COLUMNS}


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
    tensors = {
        column: _as_tensor(name, values, COLUMNS[column]) for column, values in predictions.columns().items()
    }
    metadata = {**_as_metadata(evaluation, rank), ROWS: digest(tensors)}
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
    tensor = tensors.get(name)
    if tensor is None:
        raise Unsupported(path, f"is not a prediction file: it has no '{name}'", hint=HINT)
    if tensor.dtype.name != COLUMNS[name] or len(tensor.shape) != 1:
        what = f"{tensor.dtype.name} {list(tensor.shape)}"
        raise Unsupported(path, f"is not a prediction file: its '{name}' is {what}", hint=HINT)
    require_bounded(name, tensor)
    raw = b"".join(bytes(piece) for piece in stream(tensor))
    return np.frombuffer(raw, dtype=np.dtype(COLUMNS[name]).newbyteorder("<")).astype(COLUMNS[name])


def _as_metadata(evaluation: Evaluation, rank: int) -> dict[str, str]:
    """Return each known field as JSON."""
    fields = {"rank": rank, **dataclasses.asdict(evaluation)}
    return {name: json.dumps(value) for name, value in fields.items() if value is not None}


def _of_metadata(path: str, metadata: Mapping[str, str]) -> tuple[int | None, Evaluation]:
    values: dict[str, Any] = {}
    integers = ("rank", "world_size", "samples", "threads", "batch_size")
    kinds = {"classes": list, **dict.fromkeys(integers, int)}
    for name in ("rank", *(field.name for field in dataclasses.fields(Evaluation))):
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
