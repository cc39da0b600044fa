"""Arrays that are read box by box: the elements of a tensor, or codes of a few bits that are packed in them.

A box is where it begins and its size along each axis. So any stretch of a tensor is made of the bytes that it
depends on alone, however large the tensor is. Imports numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ...lazy import NDArray, np
from ...tensors.cast import FLOATS, carrier, reader
from ...tensors.dtypes import DType, numpy_type
from ...tensors.ref import Storage, TensorRef
from ...tensors.values import boxed, boxes_of, read_into

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
