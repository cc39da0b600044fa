"""Tensors read with their last two axes swapped, in strips that serve many boxes.

A row of the swapped tensor lies scattered over the file: reading it costs a call for each column, however few
rows are read together. So a strip of rows is read, and a few are kept for all tensors. Imports numpy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import product
from threading import Lock
from typing import Any

from ...lazy import NDArray, np
from ...tensors.ref import TensorRef
from ...tensors.source import ByteRange
from .fields import Field, Sizes, carried, elements

STRIP, KEPT = 4 << 20, 12  # bytes of a strip, and how many are kept
FEWEST = 16  # rows of a strip: of longer rows each box is read alone
APART = 64  # bytes between rows in memory: a power of two from one to the next, and a column evicts itself


@dataclass(slots=True)
class _Strip:
    lock: Lock = field(default_factory=Lock)
    values: Any = None


class Strips:
    """The strips that were read last, of all tensors of a checkpoint. Several threads may ask at once."""

    def __init__(self) -> None:
        self._strips: OrderedDict[object, _Strip] = OrderedDict()
        self._lock = Lock()

    def turned(self, tensor: TensorRef) -> Field:
        """Return the elements of a tensor with its last two axes swapped."""
        whole, shape = elements(tensor), _turned(tensor.shape)
        rows = STRIP // max(shape[-1] * tensor.dtype.itemsize, 1)

        def read(begin: Sizes, size: Sizes) -> NDArray[Any]:
            if rows < FEWEST:
                return np.ascontiguousarray(whole.read(_turned(begin), _turned(size)).swapaxes(-1, -2))
            out = np.empty(size, carried(tensor.dtype))
            first, end = begin[-2], begin[-2] + size[-2]
            columns = slice(begin[-1], begin[-1] + size[-1])
            for outer in product(*map(range, size[:-2])):
                at, matrix = tuple(i + j for i, j in zip(begin, outer, strict=False)), out[outer]
                for start in range(first - first % rows, end, rows):
                    low, high = max(first, start), min(end, start + rows)
                    values = self._strip(whole, tensor, (*at, start), min(rows, shape[-2] - start))
                    matrix[low - first : high - first] = values[low - start : high - start, columns]
            return out

        return Field(shape, read, whole.storages, tensor.dtype)

    def _strip(self, whole: Field, tensor: TensorRef, at: Sizes, rows: int) -> Any:
        """Return rows of a swapped matrix from the last of these places on."""
        with self._lock:
            strip = self._strips.setdefault((tensor, at), _Strip())
            self._strips.move_to_end((tensor, at))
            if len(self._strips) > KEPT:
                self._strips.popitem(last=False)
        with strip.lock:  # the first of several threads reads it
            if strip.values is None:
                strip.values = _columns(whole, tensor, at, rows).T.copy()
        return strip.values


def _turned(sizes: Sizes) -> Sizes:
    return (*sizes[:-2], sizes[-1], sizes[-2])


def _columns(whole: Field, tensor: TensorRef, at: Sizes, count: int) -> NDArray[Any]:
    """Return some columns of a matrix, a call for each row: to map its page would cost more."""
    data: Any
    data, width, rows = tensor.storage.data, tensor.dtype.itemsize, tensor.shape[-2]
    nbytes = count * width
    raw = np.empty((rows, nbytes + APART), np.uint8)
    values: NDArray[Any] = raw[:, :nbytes].view(carried(tensor.dtype))
    is_here = isinstance(data, ByteRange) and data.source.is_local
    if count == tensor.shape[-1] or not (is_here and tensor.stride[-1] == 1) or tensor.is_swapped:
        box = whole.read((*at[:-1], 0, at[-1]), (*(1 for _ in at[:-1]), rows, count))
        values[...] = box.reshape(rows, count)
        return values
    view = memoryview(raw.reshape(-1))  # type: ignore[arg-type]
    outer = sum(i * step for i, step in zip(at[:-1], tensor.stride, strict=False))
    start, step = data.offset + (tensor.offset + outer + at[-1]) * width, nbytes + APART
    for row in range(rows):
        part = view[row * step : row * step + nbytes]
        data.source.fill(start + row * tensor.stride[-2] * width, part)
    return values
