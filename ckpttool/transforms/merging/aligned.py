"""Tensors of several files read in step: the same elements of each, as float64. Imports numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...lazy import NDArray, np
from ...tensors.cast import carrier, reader
from ...tensors.dtypes import DType, real_dtype
from ...tensors.ref import TensorRef
from ...tensors.values import read_into, stretches

BLOCK = 1 << 16  # numbers of each tensor in memory at a time


@dataclass(frozen=True, slots=True)
class Aligned:
    """Tensors of one shape, each a row of numbers in row-major order; a complex number is two."""

    tensors: Sequence[TensorRef]

    @property
    def count(self) -> int:
        """How many numbers each has."""
        return self.tensors[0].nbytes // real_dtype(self.tensors[0].dtype).itemsize

    def blocks(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, list[NDArray[Any]]]]:
        """Yield where blocks begin, always at multiples of BLOCK, and the numbers of each tensor in them.

        The blocks are those that hold the numbers from `first` to `end`.
        """
        end = self.count if end is None else end
        for start in range(first - first % BLOCK, end, BLOCK):
            count = min(BLOCK, self.count - start)
            yield start, [_numbers(tensor, start, count) for tensor in self.tensors]


def _numbers(tensor: TensorRef, first: int, count: int) -> NDArray[Any]:
    part = real_dtype(tensor.dtype)
    raw, done = memoryview(bytearray(count * part.itemsize)), 0
    of_number = tensor.dtype.itemsize // part.itemsize
    for piece in stretches(tensor, first // of_number, count // of_number):
        read_into(raw[done : done + piece.nbytes], piece)
        done += piece.nbytes
    return reader(part)(np.frombuffer(raw, dtype=carrier(part))).astype("<f8")


def bytes_of(values: NDArray[Any], dtype: DType, *, big_endian: bool) -> memoryview:
    """Return the elements of an array of the type's `carrier` as bytes in a file's order."""
    if big_endian and dtype.itemsize > 1:
        values = values.byteswap()
    return memoryview(values.view("u1"))  # type: ignore[arg-type]
