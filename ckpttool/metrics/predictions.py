"""Prediction files: what one rank found in an evaluation, written and read. Imports numpy when it is called.

A safetensors file of columns, `index`, `prediction` and `label` as int64 [n] and `loss` as float64 [n], a
row for each sample that the rank has scored. The metadata says what it is a part of.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import formats
from ..errors import Damaged, OutputExists, Unsupported
from ..files.commit import replacing
from ..files.copying import Output
from ..files.digest import digest
from ..formats.safetensors import format as safetensors
from ..tensors.dtypes import DTYPES
from ..tensors.ref import Computed, Storage, TensorRef
from ..tensors.values import require_bounded, stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

COLUMNS = {"index": "int64", "prediction": "int64", "label": "int64", "loss": "float64"}
ROWS = "rows"
"""The metadata that holds the digest of the columns, as `digest.digest` makes it."""

HINT = "a prediction file has index, prediction and label as int64 [n], and loss as float64 [n]"


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Samples and what a model made of them: numpy arrays of the same length, a row per sample.

    Attributes:
        index: int64, the number of the sample in its set.
        prediction, label: int64, classes.
        loss: float64.
    """

    index: NDArray[Any]
    prediction: NDArray[Any]
    label: NDArray[Any]
    loss: NDArray[Any]

    def __len__(self) -> int:
        return len(self.index)

    def columns(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in COLUMNS}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What all ranks of an evaluation have in common; None where a file does not say.

    Attributes:
        world_size: how many ranks there were.
        samples: how many samples the set has.
        checkpoint: the digest of the model's state, as `digest.digest` makes it.
        data: names the set.
        classes: their names, by label.
        device, threads: what was computed on; the number of threads changes the last bits.
    """

    world_size: int | None = None
    samples: int | None = None
    checkpoint: str | None = None
    data: str | None = None
    classes: tuple[str, ...] | None = None
    device: str | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class RankFile:
    """One prediction file, read. `rank` is None where it does not say."""

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
    """Writes one rank's predictions; the file appears whole or not at all.

    Raises:
        OutputExists: the file is there, and not `force`.
    """
    name = os.fspath(path)
    if os.path.lexists(name) and not force:
        raise OutputExists(f"{name}: already exists", hint="write it anyway with --force")
    tensors = {
        column: _as_tensor(name, values, COLUMNS[column]) for column, values in predictions.columns().items()
    }
    metadata = {**_as_metadata(evaluation, rank), ROWS: digest(tensors)}
    with replacing(name) as file:
        safetensors.write(name, tensors, metadata, Output(file))


def read(path: str | os.PathLike[str]) -> RankFile:
    """Reads a prediction file, of any format that `ckpttool.open` reads.

    Raises:
        Unreadable, Damaged: it can't be read, or not as what it says it is.
        Unsupported: it holds other tensors than predictions.
    """
    with formats.open(path) as checkpoint:
        tensors = dict(checkpoint.tensors())
        columns = {name: _column(checkpoint.path, tensors, name) for name in COLUMNS}
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            raise Unsupported(checkpoint.path, "its columns have different numbers of rows", hint=HINT)
        stated = checkpoint.metadata.get(ROWS)
        if stated is not None and stated != digest({name: tensors[name] for name in COLUMNS}):
            raise Damaged(checkpoint.path, "its rows are not those that were written: the digest differs")
        rank, evaluation = _of_metadata(checkpoint.path, checkpoint.metadata)
        return RankFile(checkpoint.path, rank, evaluation, Predictions(**columns))


def _as_tensor(path: str, values: NDArray[Any], dtype: str) -> TensorRef:
    import numpy as np

    data = memoryview(values.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    known = DTYPES[dtype]
    storage = Storage(
        Computed(path, len(data), lambda start, count: iter([data[start : start + count]])),
        str(known.storage),
    )
    return TensorRef.contiguous(storage, known, values.shape)


def _column(path: str, tensors: Mapping[str, TensorRef], name: str) -> NDArray[Any]:
    import numpy as np

    tensor = tensors.get(name)
    if tensor is None:
        raise Unsupported(path, f"is not a prediction file: it has no '{name}'", hint=HINT)
    if tensor.dtype.name != COLUMNS[name] or len(tensor.shape) != 1:
        found = f"{tensor.dtype.name} {list(tensor.shape)}"
        raise Unsupported(path, f"is not a prediction file: its '{name}' is {found}", hint=HINT)
    require_bounded(name, tensor)
    raw = b"".join(bytes(piece) for piece in stream(tensor))
    return np.frombuffer(raw, dtype=np.dtype(COLUMNS[name]).newbyteorder("<")).astype(COLUMNS[name])


def _as_metadata(evaluation: Evaluation, rank: int) -> dict[str, str]:
    """Each field as JSON, and those that are not known left out."""
    fields = {"rank": rank, **dataclasses.asdict(evaluation)}
    return {name: json.dumps(value) for name, value in fields.items() if value is not None}


def _of_metadata(path: str, metadata: Mapping[str, str]) -> tuple[int | None, Evaluation]:
    found: dict[str, Any] = {}
    kinds = {"rank": int, "world_size": int, "samples": int, "threads": int, "classes": list}
    for name in ("rank", *(field.name for field in dataclasses.fields(Evaluation))):
        if name not in metadata:
            continue
        try:
            found[name] = json.loads(metadata[name])
        except (ValueError, RecursionError):
            found[name] = None
        if type(found[name]) is not kinds.get(name, str):
            raise Unsupported(
                path, f"its metadata has no {name} as a prediction file has: {metadata[name][:40]}"
            )
    if "classes" in found:
        found["classes"] = tuple(map(str, found["classes"]))
    return found.pop("rank", None), Evaluation(**found)
