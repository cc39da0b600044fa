"""The formula of every scheme: number = (level of its code - zero) · scale, in float32, made when it is read.

Scales and zeros belong to blocks of the tensor: the whole, a row, a group of a row, a rectangle. What the
scheme's own library computes in float32 and rounds once comes out the same, bit for bit. Imports numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from ...errors import Refused
from ...lazy import NDArray, np
from ...tensors.dtypes import DTYPES
from ...tensors.ref import Computed, Storage, TensorRef
from ...tensors.values import boxes_of
from .fields import Field, Sizes, along

FLOAT = DTYPES["float32"]

Step = Callable[..., object]  # a ufunc of two arrays and `out`


@dataclass(frozen=True, slots=True)
class Integers:
    """Codes that are integers, of which the same is subtracted everywhere."""

    less: int = 0

    def __call__(self, codes: NDArray[Any], out: NDArray[Any]) -> None:
        """Put the numbers of codes into an array of the same shape."""
        np.subtract(codes, np.float32(self.less), out=out)


@dataclass(frozen=True, slots=True)
class Table:
    """The number that each code stands for."""

    levels: NDArray[Any]

    def __call__(self, codes: NDArray[Any], out: NDArray[Any]) -> None:
        """Put the numbers of codes into an array of the same shape."""
        # Two at once take half the time. With `clip` numpy makes no copy of the whole first.
        if codes.flags.c_contiguous and codes.size and codes.shape[-1] % 2 == 0:
            _in_pairs(self.levels.tobytes()).take(codes.view("<u2"), out=out.view("<c8"), mode="clip")
        else:
            self.levels.take(codes, out=out, mode="clip")


@lru_cache(16)
def _in_pairs(levels: bytes) -> NDArray[Any]:
    """Return the numbers of two codes at once, by the two bytes that hold them."""
    each = np.frombuffer(levels, "<f4")
    pairs = np.empty((len(each), 256, 2), "<f4")
    pairs[:, : len(each), 0] = each
    pairs[:, :, 1] = each[:, None]
    return pairs.view("<c8").reshape(-1)


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers that belong to one block of a tensor each."""

    name: str  # of the tensor that holds them
    field: Field  # as many axes as the tensor
    block: Sizes  # the size of a block along each axis
    index: Field | None = None  # the block of each element along the last axis, where they are in no order

    def apply(self, step: Step, values: NDArray[Any], begin: Sizes) -> None:
        """Combine a box of the tensor, which begins there, with the numbers of its blocks, in place."""
        last = len(begin) - 1
        first, sizes = self.blocks(begin, values.shape)
        numbers = self.numbers(first, sizes)
        widest = max(range(last + 1), key=lambda axis: (self.block[axis], -axis))
        for axis, (at, n, block) in enumerate(zip(begin, values.shape, self.block, strict=True)):
            if axis == last and self.index is not None:
                numbers = numbers.take(self.places(at, n), axis)
            elif axis != widest and numbers.shape[axis] > 1 and block > 1:
                numbers = numbers.take(np.arange(at, at + n) // block - first[axis], axis)
        if numbers.shape[widest] == 1 or self.index is not None:
            step(values, numbers, out=values)
        else:
            _step_along(widest, step, values, numbers, begin[widest], self.block[widest])

    def blocks(self, begin: Sizes, size: Sizes) -> tuple[Sizes, Sizes]:
        """Return the box of the blocks in which a box of the tensor lies."""
        first = [at // block for at, block in zip(begin, self.block, strict=True)]
        ends = [-(-(at + n) // b) for at, n, b in zip(begin, size, self.block, strict=True)]
        if self.index is not None:
            first[-1], ends[-1] = 0, self.field.shape[-1]
        return tuple(first), tuple(end - start for start, end in zip(first, ends, strict=True))

    def numbers(self, first: Sizes, sizes: Sizes) -> NDArray[Any]:
        """Return the numbers of a box of blocks, in float32. Raises Refused where one is none."""
        numbers = self.field.read(first, sizes).astype("<f4", copy=False)
        if not np.isfinite(numbers).all():
            raise self.refused("holds a NaN or an infinity, which no scale or zero is")
        return numbers

    def places(self, begin: int, size: int) -> NDArray[Any]:
        """Return the block of some elements along the last axis, by the index. Raises Refused for others."""
        assert self.index is not None
        places, blocks = self.index.read((begin,), (size,)), self.field.shape[-1]
        if size and (places.min() < 0 or places.max() >= blocks):
            raise self.refused(f"has {blocks} groups, and an index beside it names others")
        return places

    def refused(self, what: str) -> Refused:
        """Return the error that says what is wrong with the tensor that holds the numbers."""
        path = self.field.storages[0].data.path if self.field.storages else "-"
        return Refused(path, f"can't be dequantised: '{self.name[:200]}' {what}")


def _step_along(
    axis: int, step: Step, values: NDArray[Any], numbers: NDArray[Any], begin: int, block: int
) -> None:
    """Combine values with the number of each block along an axis: a part, whole blocks, and a part."""
    size = values.shape[axis]
    head = min(-begin % block, size)
    whole, done = (size - head) // block, int(head > 0)
    end = head + whole * block
    split = values[along(axis, head, end)]
    split = split.reshape(*split.shape[:axis], whole, block, *split.shape[axis + 1 :])  # a view
    blocks = numbers[along(axis, done, done + whole)]
    step(split, blocks.reshape(*blocks.shape[: axis + 1], 1, *blocks.shape[axis + 1 :]), out=split)
    for bounds, number in (((0, head), 0), ((end, size), done + whole)):
        if bounds[0] < bounds[1]:
            part = values[along(axis, *bounds)]
            step(part, numbers[along(axis, number, number + 1)], out=part)


@dataclass(frozen=True, slots=True)
class Formula:
    """What a tensor's numbers are made of."""

    codes: Field
    levels: Callable[[NDArray[Any], NDArray[Any]], object]  # (codes, out): put the numbers of codes into out
    scales: tuple[Grid | float, ...]  # multiplied one after another
    zero: Grid | None = None

    @property
    def grids(self) -> list[Grid]:
        """The zeros and scales that belong to blocks."""
        return [grid for grid in (self.zero, *self.scales) if isinstance(grid, Grid)]

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages that the numbers come from, that of the codes first."""
        return self.codes.storages + tuple(each for grid in self.grids for each in grid.field.storages)

    def tensor(self, shape: Sizes) -> TensorRef:
        """Return the tensor in float32, of a shape that holds as many elements as there are codes."""
        origin = self.storages[0]
        data = Computed.filling(origin.data.path, prod(shape) * FLOAT.itemsize, self._fill)
        return TensorRef.of_bytes(data, FLOAT, shape, *self.storages, location=origin.location)

    def field(self) -> Field:
        """Return the numbers as a field, from which others may be computed."""

        def read(begin: Sizes, size: Sizes) -> NDArray[Any]:
            out = np.empty(size, "<f4")
            self._put(out, begin)
            return out

        return Field(self.codes.shape, read, self.storages, FLOAT)

    def table(self, codes: NDArray[Any], first: Sizes, sizes: Sizes) -> NDArray[Any]:
        """Return what each of some codes stands for in each block of a box of blocks, in float32."""
        values = np.empty(len(codes), "<f4")
        self.levels(codes, values)
        with np.errstate(all="ignore"):
            if self.zero is not None:
                values = values - self.zero.numbers(first, sizes)[..., None]
            for scale in self.scales:
                if isinstance(scale, Grid):
                    values = values * scale.numbers(first, sizes)[..., None]
                else:
                    values = values * np.float32(scale)
        return values

    def _fill(self, start: int, out: memoryview) -> None:
        values = np.frombuffer(out, "<f4")
        for begin, size in boxes_of(self.codes.shape, start // FLOAT.itemsize, len(values)):
            self._put(values[: prod(size)].reshape(size), begin)
            values = values[prod(size) :]

    def _put(self, box: NDArray[Any], begin: Sizes) -> None:
        """Put the numbers of a box into an array of its size."""
        self.levels(self.codes.read(begin, box.shape), box)
        with np.errstate(all="ignore"):  # overflows are counted where the result is rounded
            if self.zero is not None:
                self.zero.apply(np.subtract, box, begin)
            for scale in self.scales:
                if isinstance(scale, Grid):
                    scale.apply(np.multiply, box, begin)
                else:
                    np.multiply(box, np.float32(scale), out=box)
