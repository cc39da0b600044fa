"""A tensor computed from another's rows: in float64, a few rows at a time, each value rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, TypeAlias

from ..lazy import NDArray, np
from .cast import FLOATS, CastReport, in_float64, nearest, reader
from .ref import Computed, DType, Storage, TensorRef
from .values import CHUNK

# Rows of float64 as a matrix, and the number of the first of them -> as many new ones
Change: TypeAlias = "Callable[[NDArray[Any], int], NDArray[Any]]"


def rows_of(tensor: TensorRef, begin: int, end: int) -> NDArray[Any]:
    """Return some rows in float64, as a matrix; a tensor without axes is one row."""
    shape, stride = (tensor.shape, tensor.stride) if tensor.shape else ((1,), (1,))
    at = tensor.offset + begin * stride[0]
    part = replace(tensor, shape=(end - begin, *shape[1:]), stride=stride, offset=at)
    is_float = tensor.dtype.name in FLOATS
    values = in_float64(part) if is_float else part.numpy(verify=False).astype("<f8")
    return values.reshape(end - begin, prod(shape[1:]))


def blocks_of(tensor: TensorRef) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield all rows, a few at a time, behind the number of the first of them."""
    count, step = (*tensor.shape, 1)[0], max(1, CHUNK // (8 * max(prod(tensor.shape[1:]), 1)))
    for begin in range(0, count, step):
        yield begin, rows_of(tensor, begin, min(begin + step, count))


def by_rows(
    path: str,
    tensor: TensorRef,
    change: Callable[[], Change],
    to: DType,
    report: CastReport,
    *origins: Storage,
) -> TensorRef:
    """Return a tensor whose rows are made of another's when they are read; `change` is then asked once.

    The report counts the finite numbers that become infinite or NaN.
    """
    row, changing = prod(tensor.shape[1:]) * to.itemsize, cache(change)

    def rows(begin: int, end: int) -> memoryview:
        values = rows_of(tensor, begin, end)
        finite = np.isfinite(values)
        with np.errstate(all="ignore"):
            rounded = nearest(changing()(values, begin).reshape(-1), to)
        made = reader(to)(rounded).reshape(finite.shape)
        report.note_non_finite(0, finite, made, begin * finite.shape[1])
        return memoryview(np.ascontiguousarray(rounded).view("u1"))  # type: ignore[arg-type]

    def make(start: int, nbytes: int) -> Iterator[memoryview]:
        if not nbytes:
            return
        first, end = start // row, -(-(start + nbytes) // row)
        step = max(1, CHUNK // row)
        for begin in range(first, end, step):
            raw, offset = rows(begin, min(begin + step, end)), begin * row
            yield raw[max(start - offset, 0) : min(start + nbytes - offset, len(raw))]

    data = Computed(path, tensor.numel * to.itemsize, make, is_divisible=True)
    location = tensor.storage.location
    return TensorRef.of_bytes(data, to, tensor.shape, tensor.storage, *origins, location=location)


def with_norms(tensor: TensorRef, norms: NDArray[Any], change: Change | None = None) -> Change:
    """Return what scales a tensor's rows, once changed, to Euclidean norms.

    Args:
        tensor: whose rows they are.
        norms: float64, of as many axes as the tensor: 1 along those that a norm is taken over.
        change: what is done to the rows before.
    """
    shape = tensor.shape or (1,)
    axes = tuple(axis for axis, size in enumerate(norms.shape) if size == 1)

    def changed(values: NDArray[Any], begin: int) -> NDArray[Any]:
        new = values if change is None else change(values, begin)
        return new.reshape(len(values), *shape[1:])

    def squares(values: NDArray[Any]) -> NDArray[Any]:
        total: NDArray[Any] = np.square(values).sum(axis=axes, keepdims=True)
        return total

    if 0 in axes:
        with np.errstate(all="ignore"):
            whole = sum(squares(changed(values, begin)) for begin, values in blocks_of(tensor))
            scales = norms / np.sqrt(whole)

    def scaled(values: NDArray[Any], begin: int) -> NDArray[Any]:
        new = changed(values, begin)
        here = scales if 0 in axes else norms[begin : begin + len(new)] / np.sqrt(squares(new))
        return new * here

    return scaled
