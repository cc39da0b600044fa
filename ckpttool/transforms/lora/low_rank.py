"""Weights plus the product of two small matrices, computed as they are written and rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from ...tensors.cast import carrier, reader
from ...tensors.dtypes import DType
from ...tensors.ref import Computed, Storage, TensorRef
from ...tensors.values import CHUNK, stream
from ..mean import nearest

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Update:
    """What is added to a weight: `scale` times the product of two matrices.

    Attributes:
        a: of shape [rank, …], `lora_A`.
        b: of shape [rows, rank], perhaps with axes of one, `lora_B`.
        scale: the factor.
        turned: the product is transposed before it is added.
    """

    a: TensorRef
    b: TensorRef
    scale: float
    turned: bool = False

    @property
    def rank(self) -> int:
        """The inner size of the product."""
        return self.a.shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of what is added."""
        rows, columns = self.b.shape[0], prod(self.a.shape[1:])
        return (columns, rows) if self.turned else (rows, columns)

    def factors(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return both matrices in float64, in the order in which they are multiplied. Imports numpy."""
        a = _values(self.a).reshape(self.rank, -1)
        b = _values(self.b).reshape(-1, self.rank)
        return (a.T.copy(), b.T.copy()) if self.turned else (b, a)


def updated(path: str, weight: TensorRef, update: Update, to: DType) -> TensorRef:
    """Return a weight to which an update is added; nothing is read yet.

    Args:
        path: the file's name, for messages.
        weight: float64, float32, float16 or bfloat16, of one axis or more.
        update: of as many rows as the weight, and as many columns as its other axes have elements.
        to: the result's type, one of those.

    Returns:
        The tensor, of the same shape. A value is computed in float64 and rounded once.
    """
    row = prod(weight.shape[1:]) * to.itemsize
    held: list[tuple[Any, Any]] = []

    def make(start: int, nbytes: int) -> Iterator[memoryview]:
        if not nbytes:
            return
        if not held:
            held.append(update.factors())
        first, end = start // row, -(-(start + nbytes) // row)
        step = max(1, CHUNK // row)
        for begin in range(first, end, step):
            until = min(begin + step, end)
            raw = _rows(weight, begin, until, *held[0], update.scale, to)
            offset = begin * row
            yield raw[max(start - offset, 0) : min(start + nbytes - offset, len(raw))]

    data = Computed(path, weight.numel * to.itemsize, make, is_divisible=True)
    old = weight.storage
    origins = (old, update.a.storage, update.b.storage)
    storage = Storage(data, to.storage or "UntypedStorage", old.location, origins=origins)
    return TensorRef.contiguous(storage, to, weight.shape)


def _rows(
    weight: TensorRef, begin: int, end: int, left: Any, right: Any, scale: float, to: DType
) -> memoryview:
    """Return some rows of the result as bytes."""
    import numpy as np

    shape = (end - begin, *weight.shape[1:])
    part = replace(weight, shape=shape, offset=weight.offset + begin * weight.stride[0])
    values = _values(part).reshape(end - begin, -1)
    with np.errstate(all="ignore"):
        values += scale * (left[begin:end] @ right)
        found = nearest(values.reshape(-1), to)
    return memoryview(np.ascontiguousarray(found).view("u1"))  # type: ignore[arg-type]


def _values(tensor: TensorRef) -> NDArray[Any]:
    """Return all values in float64."""
    import numpy as np

    raw = b"".join(map(bytes, stream(tensor)))
    found: NDArray[Any] = reader(tensor.dtype)(np.frombuffer(raw, dtype=carrier(tensor.dtype))).astype("<f8")
    return found
