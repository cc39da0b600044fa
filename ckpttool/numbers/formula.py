"""Numbers from packed codes by a formula, and the arrays that it reads box by box.

A box is where it begins and its size along each axis. So any stretch of a tensor is made of the bytes that it
depends on alone, however large the tensor is. Imports numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from ..core.lazy import NDArray, np
from ..core.tensors.cast import FLOATS, carrier, reader
from ..core.tensors.ref import DTYPES, Computed, DType, Storage, TensorRef, numpy_type
from ..core.tensors.values import boxed, boxes_of, read_into
from ..errors import Refused

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """An array that is read box by box."""

    shape: Sizes
    read: Callable[[Sizes, Sizes], NDArray[Any]]  # begin and size of a box -> its elements
    storages: tuple[Storage, ...]  # where they come from
    dtype: DType  # the type of the elements in the file
    codes: int = 0  # how many different ones there may be, where they are bytes; 0 for what are no codes

    def each(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Field:
        """Return the field with every element changed."""
        return replace(self, read=lambda begin, size: change(self.read(begin, size)), codes=0)


def boxes_in(shape: Sizes, first: int, count: int, most: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Cut a row-major stretch of an array into boxes of few elements: where each begins, and its size."""
    for done in range(0, count, most):
        yield from boxes_of(shape, first + done, min(most, count - done))


def carried(dtype: DType) -> Any:
    """Return the numpy type of a field's elements: of floats that numpy lacks, the bits."""
    return carrier(dtype) if dtype.name in FLOATS else numpy_type(dtype)


def elements(tensor: TensorRef) -> Field:
    """Return the elements of a tensor."""

    def read(begin: Sizes, size: Sizes) -> NDArray[Any]:
        raw = np.empty(prod(size) * tensor.dtype.itemsize, np.uint8)
        read_into(memoryview(raw), boxed(tensor, begin, size))  # type: ignore[arg-type]
        values: NDArray[Any] = raw.view(carried(tensor.dtype)).reshape(size)
        return values

    codes = 256 if tensor.dtype.itemsize == 1 else 0
    return Field(tensor.shape, read, (tensor.storage,), tensor.dtype, codes)


def numbers(field: Field) -> Field:
    """Return the numbers of float or integer elements in float32; infinite where it can't hold them."""
    read = reader(field.dtype) if field.dtype.name in FLOATS else None

    def in_float32(values: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            return (read(values) if read else values).astype("<f4", copy=False)

    return field.each(in_float32)


HIGH_FIRST = (1, 0)  # the order of two codes in a byte whose first has the upper bits


@dataclass(frozen=True, slots=True)
class Packing:
    """How codes lie in unsigned words along an axis, from the lowest bits on."""

    bits: int
    axis: int
    words: int = 1  # that belong together: codes may lie across two of them
    order: Sizes | None = None  # the number of the code that each place holds; None for as they lie


def packed(words: Field, packing: Packing, length: int) -> Field:
    """Return the codes in words, `length` of them along the axis."""
    axis, width = packing.axis, words.dtype.itemsize
    held = packing.words * 8 * width // packing.bits

    def read(begin: Sizes, size: Sizes) -> NDArray[Any]:
        first, skipped = divmod(begin[axis], held)
        count = -(-(skipped + size[axis]) // held)
        start, many = first * packing.words, count * packing.words
        there = min(many, words.shape[axis] - start)  # the last words may not be all that belong together
        taken = words.read(_with(begin, axis, start), _with(size, axis, there)).view(f"<u{width}")
        codes = _unpacked(taken if there == many else _filled(taken, axis, many), packing, held)
        return codes[along(axis, skipped, skipped + size[axis])]

    return Field(_with(words.shape, axis, length), read, words.storages, words.dtype, 1 << packing.bits)


def along(axis: int, *bounds: int | None) -> tuple[slice, ...]:
    """Return the index of a slice along one axis."""
    return (*(slice(None),) * axis, slice(*bounds))


def _with(sizes: Sizes, axis: int, size: int) -> Sizes:
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def _filled(words: NDArray[Any], axis: int, count: int) -> NDArray[Any]:
    more = np.zeros(_with(words.shape, axis, count - words.shape[axis]), words.dtype)
    return np.concatenate([words, more], axis)


def _unpacked(words: NDArray[Any], packing: Packing, held: int) -> NDArray[Any]:
    """Return the codes in words, `held` in those that belong together, as bytes."""
    bits, axis, order = packing.bits, packing.axis, packing.order
    if axis == words.ndim - 1 and order in (None, HIGH_FIRST):
        if bits == 8:
            return words.view("u1")
        if bits == 4:
            pairs = words.view("u1").astype("<u2")
            other = pairs << 4 if order is None else pairs << 8
            if order is not None:
                pairs >>= 4
            pairs |= other
            pairs &= 0x0F0F
            return pairs.view("u1")
    width = 8 * words.itemsize
    codes = np.empty(_with(words.shape, axis, words.shape[axis] // packing.words * held), np.uint8)
    for place in range(held):
        word, shift = divmod(place * bits, width)
        code = words[along(axis, word, None, packing.words)] >> shift
        if shift + bits > width:
            code |= words[along(axis, word + 1, None, packing.words)] << (width - shift)
        number = place if order is None else order[place]
        codes[along(axis, number, None, held)] = code & ((1 << bits) - 1)
    return codes


# ---- The formula of every scheme: number = (level of its code - zero) · scale + bias, in float32
#
# Scales and zeros belong to blocks of the tensor: the whole, a row, a group of a row, a rectangle. What
# the scheme's own library computes in float32 and rounds once comes out the same, bit for bit; and so does
# what it computes in a narrower type, where each step is rounded.


FLOAT = DTYPES["float32"]

Step = Callable[..., Any]  # a ufunc of two arrays and `out`


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
    bias: Grid | None = None
    steps_in: DType = FLOAT  # the type in which the library computes

    @property
    def steps(self) -> list[tuple[Step, Grid | float]]:
        """What is done to the numbers of codes, one after another."""
        zero: list[tuple[Step, Grid | float]] = [(np.subtract, self.zero)] if self.zero else []
        scaled: list[tuple[Step, Grid | float]] = [(np.multiply, scale) for scale in self.scales]
        return zero + scaled + ([(np.add, self.bias)] if self.bias else [])

    @property
    def grids(self) -> list[Grid]:
        """The zeros, scales and biases that belong to blocks."""
        return [grid for _, grid in self.steps if isinstance(grid, Grid)]

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
            for step, by in self.steps:
                number = by.numbers(first, sizes)[..., None] if isinstance(by, Grid) else np.float32(by)
                values = self._rounded(step(values, number))
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
            for step, by in self.steps:
                if isinstance(by, Grid):
                    by.apply(step, box, begin)
                else:
                    step(box, np.float32(by), out=box)
                if self.steps_in is not FLOAT:
                    box[...] = self._rounded(box)

    def _rounded(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return what the library's own type makes of numbers."""
        return values if self.steps_in is FLOAT else values.astype(numpy_type(self.steps_in)).astype("<f4")
