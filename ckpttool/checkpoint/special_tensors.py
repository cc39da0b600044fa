"""Tensors that are not one strided view of a storage: sharded, sparse, quantised, nested, without values."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ..errors import Refused
from ..inert_pickle.values import Global, Record
from ..lazy import NDArray, np
from ..tensors.checked import BadTensor
from ..tensors.dtypes import DTYPES, DType
from ..tensors.ref import MAX_AXES, MAX_BYTES, Computed, Storage, TensorRef, extent, is_count
from ..tensors.values import CHUNK, in_pieces, require_bounded, stretches
from ..words import first_few

Shape = tuple[int, ...]

# Kinds of which a file usually holds one rank's piece.
SHARDED = ("DTensor", "ShardedTensor")

# The most names that a hint lists, each with its flag.
MAX_NAMED = 8

PLACEHOLDER = "ZeRO-3 placeholder"
UNINITIALISED = "uninitialised"


@dataclass(frozen=True, slots=True)
class SpecialTensor:
    """A tensor that a file describes by other tensors and settings."""

    # `DTensor`, `ShardedTensor`, `sparse COO`, `quantised`, `nested`, `meta`, `uninitialised`, `ZeRO-3
    # placeholder`, or the name of a class that is not known here
    kind: str
    dtype: DType | None = None  # the element type; None when the file does not say
    # the shape of the whole tensor; None when the file does not say, or rows differ in length
    shape: Shape | None = None
    # the tensors of the file that its values are made of, by what they are
    parts: Mapping[str, TensorRef] = field(default_factory=dict)
    # settings that its values also depend on, as text that is the same for the same tensor: the scale of a
    # quantised tensor, the place of a shard
    form: str = ""
    # the shape of the piece that this file holds; None when it holds all of the tensor
    local_shape: Shape | None = None
    known: bool = True  # whether `parts` and `form` determine the values

    @property
    def nbytes(self) -> int:
        """Bytes of the parts that the file holds."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def is_piece(self) -> bool:
        """Whether other files hold the rest of the tensor, or may do so."""
        return self.local_shape is not None or (self.kind in SHARDED and not self.known)

    def __str__(self) -> str:
        # DTensor float32 [7, 5], here [3, 5], Shard(0), rank 1 of 2
        words = f"{self.kind}{f' {self.dtype.name}' if self.dtype else ''}"
        words += f" {list(self.shape)}" if self.shape is not None else ""
        here = None if self.local_shape is None else f"here {list(self.local_shape)}"
        return ", ".join(filter(None, (words, here, self.form)))

    def as_tensor(self) -> TensorRef:
        """Return a tensor of the same dtype and shape without values, to list with others."""
        nothing = Storage(Computed("", 0, lambda start, nbytes: iter(())), "UntypedStorage", "meta")
        dtype = self.dtype or replace(DTYPES["uint8"], name=self.kind)
        return TensorRef.contiguous(nothing, dtype, self.shape or (0,))


def placeholders(tree: object) -> dict[str, Shape]:
    """Return the shapes of the parameters that DeepSpeed keeps in other files, by their names in `module`."""
    # ZeRO stage 3 cuts each parameter over the ranks and writes an empty tensor in its place. `param_shapes`
    # has the names and shapes, also in the stages that write whole parameters.
    listed = [tree.get("param_shapes"), tree.get("frozen_param_shapes")] if isinstance(tree, dict) else []
    groups = chain.from_iterable(groups if isinstance(groups, list) else [groups] for groups in listed)
    pairs = [pair for group in groups if isinstance(group, dict) for pair in group.items()]
    shapes = ((name, shape_of(size)) for name, size in pairs if isinstance(name, str))
    return {name: shape for name, shape in shapes if shape is not None and 0 not in shape}


def placeholder(tensor: TensorRef, shape: Shape | None) -> SpecialTensor:
    """Return the description of an empty tensor in the place of a parameter that ZeRO-3 keeps elsewhere."""
    return SpecialTensor(PLACEHOLDER, tensor.dtype, shape, local_shape=tensor.shape)


def attributes(value: object) -> Mapping[Any, Any]:
    """Return an object's state as a dict: a dict, the second of (dict, slots), or nothing."""
    state = value.state if isinstance(value, Record) else value
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1]
    return state if isinstance(state, dict) else {}


def torch_dtype(value: object) -> DType | None:
    """Return the dtype that a name of torch's means, as `torch.float32`; None for any other value."""
    return DTYPES.get(value.name) if isinstance(value, Global) and value.module == "torch" else None


def shape_of(value: object) -> Shape | None:
    """Return a tuple, list or torch.Size as a shape; None when it is not one that a tensor can have."""
    match value:
        case Record(callable=Global("torch", "Size"), args=tuple(args)):
            value = args[0] if args else ()
    if not isinstance(value, tuple | list) or len(value) > MAX_AXES:
        return None
    sizes = tuple(size for size in value if is_count(size))
    return sizes if len(sizes) == len(value) and extent(sizes) <= MAX_BYTES else None


def _ways_out(path: str, likes: Mapping[str, SpecialTensor], holds: bool) -> str:
    """Return the next command for tensors that are no plain ones."""
    folder, path = shlex.quote(os.path.dirname(path) or "."), shlex.quote(path)
    kinds = {like.kind for like in likes.values() if like.is_piece}
    if PLACEHOLDER in kinds:
        return f"the values are in the files of all ranks: ckpttool merge {folder} out.safetensors"
    if kinds:
        keep = f"or keep this rank's piece: ckpttool convert {path} out.pt"
        return f"join the files of all ranks: ckpttool merge FOLDER out.pt; {keep}"
    globs = [shlex.quote(glob.escape(name)) for name in likes] if len(likes) <= MAX_NAMED else ["GLOB"]
    names = " ".join(f"--exclude {name}" for name in globs)
    keep = "" if holds else f"keep them: ckpttool convert {path} out.pt; or "
    return f"{keep}leave them out: ckpttool convert {path} plain.pt {names}"


def require_plain(path: str, likes: Mapping[str, SpecialTensor], why: str, *, holds: bool = True) -> None:
    """Refuse tensors that are not plain ones: `why` says what can't be done with them."""
    # `holds`: the output's format could hold them, so that another format is no way out.
    if likes:
        named = first_few([f"'{name[:80]}' ({like})" for name, like in likes.items()], 3)
        raise Refused(path, f"{named} {why}", hint=_ways_out(path, likes, holds))


# Sparse tensors: what torch asks of their shapes, and of their indices once these are read. Source:
# `_validate_sparse_coo_tensor_args` and `_validate_sparse_compressed_tensor_args` of torch, by which
# `torch.load(weights_only=True)` checks every sparse tensor.

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
    return _fault_of_coo(tensor) if tensor.kind == "sparse COO" else _fault_of_compressed(tensor)


def _numbers_of_row(indices: TensorRef, row: int) -> Iterator[NDArray[Any]]:
    """Yield the numbers along the last axis, of the row with this number if all others were one."""
    length = indices.shape[-1]
    for view in stretches(indices, row * length, length):
        for piece in in_pieces(view, CHUNK):
            yield np.frombuffer(piece, INTEGERS[indices.dtype.name]).astype("<i8", copy=False)


def _index_past_the_end(numbers: NDArray[Any], size: int) -> str | None:
    wrong = numbers[(numbers < 0) | (numbers >= size)]
    return f"an index of {wrong[0]} along an axis of {size}" if len(wrong) else None


def _fault_of_coo(tensor: SpecialTensor) -> str | None:
    indices, shape = tensor.parts["indices"], tensor.shape or ()
    last = -1
    for columns in zip(*(_numbers_of_row(indices, axis) for axis in range(indices.shape[0])), strict=True):
        place = columns[0] * 0
        for size, numbers in zip(shape, columns, strict=False):
            if fault := _index_past_the_end(numbers, size):
                return fault
            place = place * size + numbers
        if tensor.form == "coalesced" and len(place):
            if place[0] <= last or (place[1:] <= place[:-1]).any():
                return "indices out of order, though it is said to be coalesced"
            last = place[-1]
    return None


def _fault_of_compressed(tensor: SpecialTensor) -> str | None:
    starts, plain, values = (tensor.parts[part] for part in ("compressed indices", "plain indices", "values"))
    axes, count = len(plain.shape) - 1, plain.shape[-1]
    size = (tensor.shape or ())[axes : axes + 2]
    by_row = tensor.kind.endswith("SR")
    block = values.shape[axes + 1 + by_row] if tensor.kind[7] == "B" else 1
    most = size[by_row] // block
    for item in range(starts.numel // starts.shape[-1]):
        bounds = np.concatenate([*_numbers_of_row(starts, item)])
        steps = np.diff(bounds)
        if bounds[0] != 0 or bounds[-1] != count or (steps < 0).any() or (steps > most).any():
            return "compressed indices that do not count up from 0 to the number of values"
        at, last = 0, -1
        for numbers in _numbers_of_row(plain, item):
            if fault := _index_past_the_end(numbers, most):
                return fault
            rises = np.diff(numbers, prepend=last) > 0
            first, end = np.searchsorted(bounds, (at, at + len(numbers)))
            rises[bounds[first:end] - at] = True  # a new row begins
            if not rises.all():
                return "indices out of order within a row or column"
            at, last = at + len(numbers), numbers[-1]
    return None
