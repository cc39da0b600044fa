"""Sparse tensors: what torch asks of their shapes, and of their indices once these are read.

Source: `_validate_sparse_coo_tensor_args` and `_validate_sparse_compressed_tensor_args` of torch, by which
`torch.load(weights_only=True)` checks every sparse tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..inert_pickle.values import Global, Record
from ..tensors.ref import BadTensor, TensorRef
from ..tensors.values import CHUNK, in_pieces, require_bounded, stretches
from .special_tensors import Shape, SpecialTensor, shape_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

COMPRESSED = ("CSR", "CSC", "BSR", "BSC")
MAX_REPEATED = 1 << 24  # bytes by which indices may outgrow their storage: honest ones never do
INTEGERS = {"uint8": "u1", "int8": "i1", "int16": "<i2", "int32": "<i4", "int64": "<i8"}


def read_sparse(args: tuple[object, ...]) -> SpecialTensor:
    """Read `_rebuild_sparse_tensor(layout, parts)`; raise BadTensor for shapes that torch refuses."""
    match args:
        case ((Record(args=(str(layout),)) | Global(name=str(layout))), (tuple() | list() as parts)):
            kind = layout.removeprefix("torch.").removeprefix("sparse_").upper()
        case _:
            raise BadTensor("that is sparse, in a call whose arguments torch refuses")
    made = None
    match parts:
        case [TensorRef() as indices, TensorRef() as values, size, *settings] if kind == "COO":
            made = _coo(indices, values, shape_of(size), settings)
        case [TensorRef() as starts, TensorRef() as plain, TensorRef() as values, size] if kind in COMPRESSED:
            made = _compressed(kind, starts, plain, values, shape_of(size))
    if made is None:
        raise BadTensor(f"of layout {layout[:40]} whose parts do not fit each other")
    return made


def _coo(
    indices: TensorRef, values: TensorRef, size: Shape | None, settings: list[object]
) -> SpecialTensor | None:
    if size is None or len(indices.shape) != 2 or not values.shape or indices.dtype.name not in INTEGERS:
        return None
    axes, count = indices.shape
    fits = axes <= len(size) and values.shape == (count, *size[axes:])
    if not fits or len(settings) > 1 or not all(flag is None or type(flag) is bool for flag in settings):
        return None
    form = "coalesced" if settings == [True] else ""
    return SpecialTensor("sparse COO", values.dtype, size, {"indices": indices, "values": values}, form)


def _compressed(
    kind: str, starts: TensorRef, plain: TensorRef, values: TensorRef, size: Shape | None
) -> SpecialTensor | None:
    batch = plain.shape[:-1]
    axes, blocks = len(batch), 2 if kind[0] == "B" else 0
    if size is None or not plain.shape or not starts.shape or len(size) < axes + 2:
        return None
    if starts.dtype is not plain.dtype or starts.dtype.name not in ("int32", "int64"):
        return None
    block = values.shape[axes + 1 : axes + 1 + blocks] if blocks else (1, 1)
    sizes = size[axes : axes + 2]
    if len(block) != 2 or 0 in block or any(n % b for n, b in zip(sizes, block, strict=True)):
        return None
    rows, columns = (n // b for n, b in zip(sizes, block, strict=True))
    number = rows if kind.endswith("SR") else columns
    wanted = (*plain.shape, *(block if blocks else ()), *size[axes + 2 :])
    if size[:axes] != batch or starts.shape != (*batch, number + 1) or values.shape != wanted:
        return None
    parts = {"compressed indices": starts, "plain indices": plain, "values": values}
    return SpecialTensor(f"sparse {kind}", values.dtype, size, parts)


def index_fault(name: str, tensor: SpecialTensor) -> str | None:
    """Read a sparse tensor's indices; return what torch does not take, to follow "has ", or None."""
    if not tensor.kind.startswith("sparse ") or not tensor.known:
        return None
    for part, indices in tensor.parts.items():
        if part != "values":
            require_bounded(name, indices, MAX_REPEATED)
    if tensor.kind == "sparse COO":
        return _fault_of_coo(tensor)
    return _fault_of_compressed(tensor)


def _numbers(indices: TensorRef) -> Iterator[NDArray[Any]]:
    import numpy as np

    for piece in in_pieces(indices, CHUNK):
        yield np.frombuffer(piece, INTEGERS[indices.dtype.name]).astype("<i8", copy=False)


def _fault_of_coo(tensor: SpecialTensor) -> str | None:
    indices, shape = tensor.parts["indices"], tensor.shape or ()
    axes, count = indices.shape
    rows = [row for axis in range(axes) for row in stretches(indices, axis * count, count)]
    last = -1
    for columns in zip(*map(_numbers, rows), strict=True):
        place = columns[0] * 0
        for size, numbers in zip(shape, columns, strict=False):
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < size:
                wrong = numbers[(numbers < 0) | (numbers >= size)][0]
                return f"an index of {wrong} along an axis of {size}"
            place = place * size + numbers
        if tensor.form == "coalesced" and len(place):
            if place[0] <= last or (place[1:] <= place[:-1]).any():
                return "indices out of order, though it is said to be coalesced"
            last = place[-1]
    return None


def _fault_of_compressed(tensor: SpecialTensor) -> str | None:
    import numpy as np

    starts, plain, values = (tensor.parts[part] for part in ("compressed indices", "plain indices", "values"))
    axes, count, ends = len(plain.shape) - 1, plain.shape[-1], starts.shape[-1]
    size = (tensor.shape or ())[axes : axes + 2]
    by_row = tensor.kind.endswith("SR")
    block = values.shape[axes + 1 + by_row] if tensor.kind[7] == "B" else 1
    most = size[by_row] // block
    for item in range(starts.numel // ends):
        pieces = [*(p for view in stretches(starts, item * ends, ends) for p in _numbers(view))]
        bounds = np.concatenate(pieces)
        steps = np.diff(bounds)
        if bounds[0] != 0 or bounds[-1] != count or (steps < 0).any() or (steps > most).any():
            return "compressed indices that do not count up from 0 to the number of values"
        at, last = 0, -1
        for numbers in (n for view in stretches(plain, item * count, count) for n in _numbers(view)):
            if not 0 <= numbers.min() <= numbers.max() < most:
                wrong = numbers[(numbers < 0) | (numbers >= most)][0]
                return f"an index of {wrong} along an axis of {most}"
            rises = np.diff(numbers, prepend=last) > 0
            first, end = np.searchsorted(bounds, (at, at + len(numbers)))
            rises[bounds[first:end] - at] = True  # a new row begins
            if not rises.all():
                return "indices out of order within a row or column"
            at, last = at + len(numbers), numbers[-1]
    return None
