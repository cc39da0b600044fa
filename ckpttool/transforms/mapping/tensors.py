"""What rules do to tensors: views where a view does, and else values that are made when they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

from ...lazy import np
from ...tensors.cast import Caster, carrier, reader, target
from ...tensors.chunks import TensorPart, assembled
from ...tensors.dtypes import PLAIN_FLOATS
from ...tensors.losses import CastReport
from ...tensors.ref import MAX_AXES, TensorRef
from ...tensors.values import in_row_major, made_from, require_bounded, stream, stretches
from ..mean import nearest

Sizes = tuple[int, ...]

MAX_PARTS = 1 << 16  # tensors that one is cut into
MAX_EMPTY = 1 << 8  # the same of one without elements, of which a header can claim any number


class VerbMisfit(ValueError):
    """Tensors that a verb can't be applied to; the text follows their names."""


def axis_of(tensor: TensorRef, axis: int, *, more: int = 0) -> int:
    """Return an axis counted from 0, of one that may be counted from the end. Raises VerbMisfit."""
    count = len(tensor.shape) + more
    if not -count <= axis < count:
        raise VerbMisfit(f"has {len(tensor.shape)} axes, and none is number {axis}")
    return axis % count


def transposed(tensor: TensorRef, axes: Sizes) -> TensorRef:
    """Return the tensor with its axes in another order. Raises VerbMisfit."""
    if (new := tensor.permuted(axes)) is None:
        raise VerbMisfit(f"has shape {list(tensor.shape)}, whose axes {list(axes)} do not permute")
    return new


def reshaped(tensor: TensorRef, shape: Sizes) -> TensorRef:
    """Return the elements in another shape, in which one size may be -1. Raises VerbMisfit."""
    known = prod(size for size in shape if size != -1)
    fits = shape.count(-1) <= 1 and min(shape, default=0) >= -1 and len(shape) <= MAX_AXES
    if fits and -1 in shape:
        left = tensor.numel // known if known else 0
        shape = tuple(left if size == -1 else size for size in shape)
    if not fits or prod(shape) != tensor.numel:
        raise VerbMisfit(
            f"has {tensor.numel} elements in shape {list(tensor.shape)}, not those of {list(shape)}"
        )
    view = tensor.viewed(shape) or materialised(tensor).viewed(shape)
    assert view is not None  # elements in a row take any shape
    return view


def materialised(tensor: TensorRef) -> TensorRef:
    """Return a tensor of the same values in row-major order, which are put there when they are read."""
    require_bounded("a tensor of a rule", tensor)
    return in_row_major(tensor)


def scaled(tensor: TensorRef, factor: float) -> TensorRef:
    """Return a tensor times a number, computed in float64 and rounded once to its type. Raises VerbMisfit."""
    if (dtype := tensor.dtype).name not in PLAIN_FLOATS:
        raise VerbMisfit(f"is {dtype.name}, which is not scaled")
    require_bounded("a tensor of a rule", tensor)

    def make(start: int, nbytes: int) -> Iterator[memoryview]:
        first, count = start // dtype.itemsize, nbytes // dtype.itemsize
        for part in stretches(tensor, first, count):
            for piece in stream(part):
                values = reader(dtype)(np.frombuffer(piece, carrier(dtype))).astype("<f8")
                with np.errstate(all="ignore"):
                    values *= factor
                    yield memoryview(nearest(values, dtype).view("u1"))  # type: ignore[arg-type]

    return made_from(tensor, make)


def cast(tensor: TensorRef, to: str) -> tuple[TensorRef, CastReport]:
    """Return a floating-point tensor in another type, and what will have overflowed once it is written."""
    caster = Caster(target(to.lower()))
    return caster.cast(tensor), caster.report


def heads_reordered(tensor: TensorRef, heads: int, to: str, axis: int) -> TensorRef:
    """Return a tensor whose rows, those of each head, are in the order of another rotary embedding.

    In the order "pairs" (Meta, torchtitan) rows 2p and 2p + 1 of a head are rotated together; in "halves"
    (Hugging Face) rows p and p + size / 2. Raises VerbMisfit where the rows do not divide so.
    """
    axis = axis_of(tensor, axis)
    rows, step = tensor.shape[axis], tensor.stride[axis]
    if heads < 1 or rows % heads:
        raise VerbMisfit(f"has {rows} rows, which do not divide into {heads} heads")
    size = rows // heads
    if size % 2:
        raise VerbMisfit(f"has heads of {size} rows, which do not divide into pairs")
    inner = (
        ((2, step), (size // 2, 2 * step)) if to == "halves" else ((size // 2, step), (2, size // 2 * step))
    )
    cut = ((heads, size * step), *inner)
    shape = (*tensor.shape[:axis], *(n for n, _ in cut), *tensor.shape[axis + 1 :])
    stride = (*tensor.stride[:axis], *(s for _, s in cut), *tensor.stride[axis + 1 :])
    return reshaped(materialised(replace(tensor, shape=shape, stride=stride)), tensor.shape)


def concatenated(tensors: Sequence[TensorRef], axis: int, sizes: Sequence[int] | None) -> TensorRef:
    """Return tensors joined along an axis, of these sizes there, or all of one. Raises VerbMisfit."""
    first = tensors[0]
    axis = axis_of(first, axis)
    _require_alike(tensors, axis)
    there = [tensor.shape[axis] for tensor in tensors]
    wanted = list(sizes) if sizes is not None else there[:1] * len(there)
    if there != wanted:
        why = f"{wanted}" if sizes is not None else "one size: other sizes are given as `sizes`"
        raise VerbMisfit(f"has sizes {there} along axis {axis}, not {why}")
    starts = [0, *accumulate(there)]
    begins = [tuple(start if each == axis else 0 for each in range(len(first.shape))) for start in starts]
    shape = (*first.shape[:axis], starts[-1], *first.shape[axis + 1 :])
    return _joined([*zip(begins, tensors, strict=False)], shape)


def stacked(tensors: Sequence[TensorRef], axis: int) -> TensorRef:
    """Return tensors of one shape along a new axis. Raises VerbMisfit."""
    axis = axis_of(tensors[0], axis, more=1)
    _require_alike(tensors, None)

    def with_axis(tensor: TensorRef) -> TensorRef:
        shape, stride = ((*sizes[:axis], 1, *sizes[axis:]) for sizes in (tensor.shape, tensor.stride))
        return replace(tensor, shape=shape, stride=stride)

    parts = [with_axis(tensor) for tensor in tensors]
    shape = (*parts[0].shape[:axis], len(parts), *parts[0].shape[axis + 1 :])
    begins = (
        tuple(place if each == axis else 0 for each in range(len(shape))) for place in range(len(parts))
    )
    return _joined([*zip(begins, parts, strict=True)], shape)


def _require_alike(tensors: Sequence[TensorRef], but: int | None) -> None:
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype is not first.dtype:
            raise VerbMisfit(f"has types {first.dtype.name} and {tensor.dtype.name}, which are not joined")
        shapes = [[size for axis, size in enumerate(each.shape) if axis != but] for each in (first, tensor)]
        if shapes[0] != shapes[1] or len(tensor.shape) != len(first.shape):
            raise VerbMisfit(f"has shapes {list(first.shape)} and {list(tensor.shape)}, which are not joined")


def _joined(boxes: Sequence[tuple[Sizes, TensorRef]], shape: Sizes) -> TensorRef:
    if len(shape) > MAX_AXES:
        raise VerbMisfit(f"would have {len(shape)} axes, and torch has at most {MAX_AXES}")
    first = boxes[0][1]
    for _, tensor in boxes:
        require_bounded("a tensor of a rule", tensor)
    parts = [TensorPart(begin, tensor) for begin, tensor in boxes]
    whole = assembled("a tensor of a rule", first.storage.data.path, first.dtype, shape, parts)
    return replace(whole, storage=replace(whole.storage, location=first.storage.location))


def cut(tensor: TensorRef, axis: int, sizes: Sequence[int] | None, parts: int) -> tuple[TensorRef, ...]:
    """Return views of a tensor, cut along an axis in these sizes, or in equal ones. Raises VerbMisfit."""
    axis = axis_of(tensor, axis)
    length = tensor.shape[axis]
    if sizes is None and (not parts or length % parts):
        raise VerbMisfit(f"has {length} along axis {axis}, which do not divide by {parts}")
    wanted = [length // parts] * parts if sizes is None else list(sizes)
    if sum(wanted) != length or min(wanted, default=0) < 0:
        raise VerbMisfit(f"has {length} along axis {axis}, not {' + '.join(map(str, wanted))}")
    return tuple(
        replace(
            tensor,
            shape=(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]),
            offset=tensor.offset + (start * tensor.stride[axis] if tensor.numel else 0),
        )
        for start, size in zip(accumulate(wanted, initial=0), wanted, strict=False)
    )


def unstacked(tensor: TensorRef, axis: int) -> tuple[TensorRef, ...]:
    """Return the tensors along an axis, each without it. Raises VerbMisfit."""
    axis = axis_of(tensor, axis)
    most = MAX_PARTS if tensor.numel else MAX_EMPTY
    if not 1 <= tensor.shape[axis] <= most:
        raise VerbMisfit(f"has shape {list(tensor.shape)}, and is cut into 1 to {most} tensors")
    parts = cut(tensor, axis, None, tensor.shape[axis])
    return tuple(
        replace(part, shape=_without(part.shape, axis), stride=_without(part.stride, axis)) for part in parts
    )


def _without(sizes: Sizes, axis: int) -> Sizes:
    return sizes[:axis] + sizes[axis + 1 :]
