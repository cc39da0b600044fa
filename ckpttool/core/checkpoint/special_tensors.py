"""Tensors that are not one strided view of a storage: sharded, sparse, quantised, nested, without values."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from ...errors import Refused
from ..inert_pickle import values as inert
from ..inert_pickle.values import FROM_TYPE, PARAMETER, Global, Record, in_brief, names_of, tensor_of
from ..lazy import NDArray, np
from ..tensors import ref
from ..tensors.values import CHUNK, in_pieces, require_bounded, stretches
from ..words import first_few

Shape = tuple[int, ...]

# Kinds of which a file usually holds one rank's piece.
SHARDED = ("DTensor", "ShardedTensor")

# The most names that a hint lists, each with its flag.
MAX_NAMED = 8

PLACEHOLDER = "ZeRO-3 placeholder"
WRITTEN_BY_ALL = (
    "the values are in the folder that DeepSpeed's save_checkpoint wrote: ckpttool merge FOLDER "
    "out.safetensors; or gather them before saving: stage3_gather_16bit_weights_on_model_save"
)
UNINITIALISED = "uninitialised"


@dataclass(frozen=True, slots=True)
class SpecialTensor:
    """A tensor that a file describes by other tensors and settings."""

    # `DTensor`, `ShardedTensor`, `sparse COO`, `quantised`, `nested`, `meta`, `uninitialised`, `ZeRO-3
    # placeholder`, or the name of a class that is not known here
    kind: str
    dtype: ref.DType | None = None  # the element type; None when the file does not say
    # the shape of the whole tensor; None when the file does not say, or rows differ in length
    shape: Shape | None = None
    # the tensors of the file that its values are made of, by what they are
    parts: Mapping[str, ref.TensorRef] = field(default_factory=dict)
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

    def as_tensor(self) -> ref.TensorRef:
        """Return a tensor of the same dtype and shape without values, to list with others."""
        nothing = ref.Storage(ref.Computed("", 0, lambda start, nbytes: iter(())), "UntypedStorage", "meta")
        dtype = self.dtype or replace(ref.DTYPES["uint8"], name=self.kind)
        return ref.TensorRef.contiguous(nothing, dtype, self.shape or (0,))


def placeholders(tree: object) -> dict[str, Shape]:
    """Return the shapes of the parameters that DeepSpeed keeps in other files, by their names in `module`."""
    # ZeRO stage 3 cuts each parameter over the ranks and writes an empty tensor in its place. `param_shapes`
    # has the names and shapes, also in the stages that write whole parameters.
    listed = [tree.get("param_shapes"), tree.get("frozen_param_shapes")] if isinstance(tree, dict) else []
    groups = chain.from_iterable(groups if isinstance(groups, list) else [groups] for groups in listed)
    pairs = [pair for group in groups if isinstance(group, dict) for pair in group.items()]
    shapes = ((name, shape_of(size)) for name, size in pairs if isinstance(name, str))
    return {name: shape for name, shape in shapes if shape is not None and 0 not in shape}


def placeholder(tensor: ref.TensorRef, shape: Shape | None) -> SpecialTensor:
    """Return the description of an empty tensor in the place of a parameter that ZeRO-3 keeps elsewhere."""
    return SpecialTensor(PLACEHOLDER, tensor.dtype, shape, local_shape=tensor.shape)


def attributes(value: object) -> Mapping[Any, Any]:
    """Return an object's state as a dict: a dict, the second of (dict, slots), or nothing."""
    state = value.state if isinstance(value, Record) else value
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1]
    return state if isinstance(state, dict) else {}


def torch_dtype(value: object) -> ref.DType | None:
    """Return the dtype that a name of torch's means, as `torch.float32`; None for any other value."""
    return ref.DTYPES.get(value.name) if isinstance(value, Global) and value.module == "torch" else None


def shape_of(value: object) -> Shape | None:
    """Return a tuple, list or torch.Size as a shape; None when it is not one that a tensor can have."""
    match value:
        case Record(callable=Global("torch", "Size"), args=tuple(args)):
            value = args[0] if args else ()
    if not isinstance(value, tuple | list) or len(value) > ref.MAX_AXES:
        return None
    sizes = tuple(size for size in value if ref.is_count(size))
    return sizes if len(sizes) == len(value) and ref.extent(sizes) <= ref.MAX_BYTES else None


def _ways_out(path: str, likes: Mapping[str, SpecialTensor], holds: bool) -> str:
    """Return the next command for tensors that are no plain ones."""
    folder, path = shlex.quote(os.path.dirname(path) or "."), shlex.quote(path)
    kinds = {like.kind for like in likes.values() if like.is_piece}
    if PLACEHOLDER in kinds:
        if not any(like.shape for like in likes.values()):  # which no file of DeepSpeed's own says
            return WRITTEN_BY_ALL
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
            raise ref.BadTensor("that is sparse, in a call whose arguments torch refuses")
    made = None
    match parts:
        case [ref.TensorRef() as indices, ref.TensorRef() as values, size, *settings] if kind == "COO":
            made = _coo(indices, values, shape_of(size), settings)
        case [ref.TensorRef() as starts, ref.TensorRef() as plain, ref.TensorRef() as values, size] if (
            kind in COMPRESSED
        ):
            made = _compressed(kind, starts, plain, values, shape_of(size))
    if made is None:
        raise ref.BadTensor(f"of layout {layout[:40]} whose parts do not fit each other")
    return made


def _coo(
    indices: ref.TensorRef, values: ref.TensorRef, size: Shape | None, settings: list[object]
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
    kind: str, starts: ref.TensorRef, plain: ref.TensorRef, values: ref.TensorRef, size: Shape | None
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


def _numbers_of_row(indices: ref.TensorRef, row: int) -> Iterator[NDArray[Any]]:
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


# ---- The calls by which a pickle rebuilds such tensors. They are read, never run.
#
# torch pickles such a tensor as a call that puts it together from plain tensors and settings. Sources:
# torch's `_tensor.py`, `_utils.py`, `distributed/tensor/_dtensor_spec.py`,
# `distributed/_shard/sharded_tensor/api.py`.


# The ends of the names of classes that are taken for tensors, though they are not known here.
ENDINGS = ("Tensor", "Parameter", "Buffer")

# The most calls nested in each other that are read, such as a Parameter of a subclass of a sparse tensor.
LEVELS = 8

# The most values searched for tensors inside an object of an unknown class.
MAX_INSIDE = 10_000

PLAIN = names_of("torch._utils: _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3")
WRAPPER_SUBCLASS = Global("torch._utils", "_rebuild_wrapper_subclass")


def special_tensor(value: object, levels: int = LEVELS) -> SpecialTensor | None:
    """Return the description of a value that is a tensor but not a plain one; None for any other value."""
    if not isinstance(value, Record) or tensor_of(value) is not None or not levels:
        return None
    args = value.args if isinstance(value.args, tuple) else ()
    if value.callable in PARAMETER:
        return _of_parameter(args[0], levels - 1) if args else None
    if value.callable in FROM_TYPE and len(args) == 4:
        return _of_subclass(value, *args, levels=levels - 1)
    if value.callable in READERS:
        kind, read = READERS[value.callable]
        try:
            return read(args) or _unknown(kind, value)
        except ref.BadTensor:
            return _unknown(kind, value)
    name = value.type_name.rpartition(".")[2]
    unknown = _unknown(name, value) if name.endswith(ENDINGS) else None
    return unknown if unknown and unknown.parts else None


def rebuilds(function: object) -> bool:
    """Return whether a function is one of torch's own that make tensors."""
    kinds: tuple[Collection[object], ...] = (READERS, FROM_TYPE, PARAMETER, PLAIN)
    return isinstance(function, Global) and any(function in kind for kind in kinds)


def require_sound(function: object, args: tuple[object, ...]) -> None:
    """Raise BadTensor for a call of torch's own functions that torch refuses."""
    if function in READERS:
        READERS[function][1](args)
    elif function in FROM_TYPE:
        if len(args) != 4 or not isinstance(args[2], tuple | list):
            raise ref.BadTensor("of a class, in a call whose arguments torch refuses")
        require_sound(args[0], tuple(args[2]))
    elif function in PARAMETER:
        _require_parameter(args, has_state=isinstance(function, Global) and function.name.endswith("_state"))


def _require_parameter(args: tuple[object, ...], has_state: bool) -> None:
    """Check `_rebuild_parameter(tensor, requires_grad, hooks)`, or with a state behind these."""
    if len(args) != 3 + has_state or type(args[1]) is not bool:
        raise ref.BadTensor("in a Parameter, in a call whose arguments torch refuses")
    inner, tensor = args[0], tensor_of(args[0])
    if not isinstance(inner, ref.TensorRef | Record):
        raise ref.BadTensor(f"in a Parameter that is none, but a {inert.container_name(inner)}")
    if tensor is not None and args[1] and not ref.has_gradients(tensor.dtype):
        raise ref.BadTensor(f"of {tensor.dtype.name} in a Parameter that requires gradients")
    if has_state and inert.attributes_in(args[3]) is None:
        raise ref.BadTensor("in a Parameter whose attributes are none")


def plain_tensor(value: object) -> ref.TensorRef | None:
    """Return the plain tensor with all of a value: of a Parameter, subclass or whole DTensor too."""
    tensor = tensor_of(value)
    if tensor is None and isinstance(value, Record) and (like := special_tensor(value)):
        return like.parts["local"] if like.kind == "DTensor" and not like.is_piece else None
    return tensor


def with_plain_tensor(value: object, tensor: ref.TensorRef) -> object:
    """Return a value with its plain tensor replaced: a Parameter stays one, a whole DTensor becomes plain."""
    return inert.with_tensor(value, tensor) if tensor_of(value) is not None else tensor


def _of_parameter(inner: object, levels: int) -> SpecialTensor | None:
    """Read what a Parameter is made of; an object of an unknown class is one that torch may make a tensor."""
    tensor = special_tensor(inner, levels)
    if tensor is None and levels and isinstance(inner, Record) and inner.callable not in PARAMETER:
        return _unknown(inner.type_name.rpartition(".")[2], inner)
    return tensor


def _of_subclass(
    value: Record, function: object, kind: object, args: object, state: object, *, levels: int
) -> SpecialTensor:
    """Read `_rebuild_from_type_v2(function, kind, args, state)`: a tensor made by a function, of a class."""
    values = args if isinstance(args, tuple) else ()
    tensor = None
    if isinstance(kind, Global) and kind in SHARDED_TYPES:
        tensor = SHARDED_TYPES[kind](values, state)
    elif isinstance(function, Global):
        tensor = special_tensor(Record("reduce", function, args), levels)
    if tensor is None:
        name = kind.name.rpartition(".")[2] if isinstance(kind, Global) else "object"
        tensor = _unknown(name, value)
        if function == WRAPPER_SUBCLASS and len(values) > 2:
            tensor = replace(tensor, dtype=torch_dtype(values[1]), shape=shape_of(values[2]))
    return tensor


def _unknown(kind: str, value: Record) -> SpecialTensor:
    """Return a tensor of which only the class is known, with the plain tensors inside it."""
    inside = [item for item in islice(inert.walk(value), MAX_INSIDE) if isinstance(item, ref.TensorRef)]
    return SpecialTensor(kind, parts={str(i): tensor for i, tensor in enumerate(inside)}, known=False)


def _quantised(args: tuple[object, ...]) -> SpecialTensor:
    """Read `_rebuild_qtensor(storage, offset, size, stride, (scheme, …), requires_grad, hooks)`."""
    match args:
        case (ref.Storage() as storage, offset, size, stride, (tuple() | list() as quantizer), False, _):
            dtype, shape = ref.STORAGE_DTYPES.get(storage.kind), shape_of(size)
        case _:
            raise ref.BadTensor("that is quantised, in a call whose arguments torch refuses")
    if dtype is None or shape is None or not dtype.name.startswith("q"):
        raise ref.BadTensor("that is quantised, and whose storage or size is not")
    parts: dict[str, ref.TensorRef] = {}
    settings: dict[str, object]
    match quantizer:
        case (Global("torch", "per_tensor_affine" as scheme), int() | float() as scale, int() as zero) if (
            ref.is_count(abs(zero))
        ):
            settings = {"scale": scale, "zero point": zero}
        case (Global("torch", str(scheme)), scale, zero, int() as axis) if scheme in PER_CHANNEL:
            settings = {"scale": scale, "zero point": zero, "axis": axis}
            parts = {name: each for name, each in settings.items() if isinstance(each, ref.TensorRef)}
            if not (0 <= axis < len(shape) and _are_of_channels(scale, zero, shape[axis])):
                raise ref.BadTensor("whose quantizer does not fit its channels")
        case _:
            raise ref.BadTensor("whose quantizer is none")
    if dtype.name in PACKED:  # several elements in a byte: no view says so
        packed = -(-ref.extent(shape) // PACKED[dtype.name]) if 0 not in shape else 0
        values = ref.checked_tensor(storage, ref.DTYPES["uint8"], (packed,), (1,), offset)
        settings["stride"] = in_brief(stride)
    else:
        steps = tuple(stride) if isinstance(stride, list) else stride
        values = ref.checked_tensor(storage, dtype, shape, steps, offset)
    said = [f"{name} {in_brief(each)}" for name, each in settings.items() if name not in parts]
    return SpecialTensor("quantised", dtype, shape, {"values": values, **parts}, ", ".join([scheme, *said]))


PER_CHANNEL = ("per_channel_affine", "per_channel_affine_float_qparams")
PACKED = {"quint4x2": 2, "quint2x4": 4}  # elements in a byte


def _are_of_channels(scale: object, zero: object, channels: int) -> bool:
    if isinstance(scale, ref.TensorRef) and isinstance(zero, ref.TensorRef):
        return scale.shape == zero.shape == (channels,)
    if not isinstance(scale, list) or not isinstance(zero, list):
        return False
    return len(scale) == len(zero) == channels and all(type(n) in (int, float) for n in [*scale, *zero])


def _nested(args: tuple[object, ...]) -> SpecialTensor:
    """Read `_rebuild_nested_tensor(buffer, sizes, strides, offsets)`."""
    tensors = [part for part in args if isinstance(part, ref.TensorRef)]
    if not len(args) == len(tensors) == 4:
        raise ref.BadTensor("that is nested, in a call whose arguments torch refuses")
    parts = dict(zip(("values", "sizes", "strides", "offsets"), tensors, strict=True))
    return SpecialTensor("nested", parts["values"].dtype, None, parts)


def _jagged(args: tuple[object, ...]) -> SpecialTensor | None:
    """Read `_rebuild_njt({values, offsets, lengths, _ragged_idx, …})`, a nested tensor of layout jagged."""
    given = args[0] if args and isinstance(args[0], dict) else {}
    tensors = {name: tensor_of(given.get(name)) for name in ("values", "offsets", "lengths")}
    parts = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if "values" not in parts:
        return None
    form = f"ragged axis {given.get('_ragged_idx')}"
    return SpecialTensor("nested", parts["values"].dtype, None, parts, form)


def _meta(args: tuple[object, ...]) -> SpecialTensor:
    """Read `_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)`."""
    match args:
        case (dtype, size, stride, bool(grad)):
            made, steps = SpecialTensor("meta", torch_dtype(dtype), shape_of(size)), shape_of(stride)
        case _:
            raise ref.BadTensor("without values, in a call whose arguments torch refuses")
    if made.dtype is None or made.shape is None or steps is None or len(steps) != len(made.shape):
        raise ref.BadTensor("without values, of no type, size or stride")
    if grad and not ref.has_gradients(made.dtype):
        raise ref.BadTensor(f"of {made.dtype.name} that requires gradients")
    return made


# The functions and classes that make a tensor, with what it is called and how their arguments are read.
_NAMES: dict[str, tuple[str, Callable[[tuple[object, ...]], SpecialTensor | None]]] = {
    "torch._utils: _rebuild_sparse_tensor _rebuild_sparse_csr_tensor": ("sparse", read_sparse),
    "torch._utils: _rebuild_qtensor": ("quantised", _quantised),
    "torch._utils: _rebuild_nested_tensor": ("nested", _nested),
    "torch.nested._internal.nested_tensor: _rebuild_njt": ("nested", _jagged),
    "torch._utils: _rebuild_meta_tensor_no_storage": ("meta", _meta),
    "torch._utils: _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor "
    "_rebuild_xla_tensor": ("device tensor", lambda args: None),
    "torch.nn.parameter: UninitializedParameter UninitializedBuffer": (
        UNINITIALISED,
        lambda args: SpecialTensor(UNINITIALISED),
    ),
}
READERS = {name: reader for names, reader in _NAMES.items() for name in names_of(names)}


def _dtensor(args: tuple[object, ...], state: object) -> SpecialTensor | None:
    """Read a DTensor: a local tensor, and the mesh and placements that say which piece of the whole it is."""
    fields = attributes(state)
    local, spec = tensor_of(fields.get("_local_tensor")), attributes(fields.get("_spec"))
    shape, placements = shape_of(args[2]) if len(args) > 2 else None, spec.get("placements")
    if local is None or shape is None or not isinstance(placements, tuple | list):
        return None
    words = list(map(_placement, placements))
    is_whole = local.shape == shape and not any(word.startswith("Partial") for word in words)
    mesh = attributes(spec.get("mesh"))
    rank, ranks = mesh.get("_rank"), mesh.get("_flatten_rank_map")
    if type(rank) is int:
        words.append(f"rank {rank}" + (f" of {len(ranks)}" if isinstance(ranks, tuple) else ""))
    local_shape = None if is_whole else local.shape
    return SpecialTensor("DTensor", local.dtype, shape, {"local": local}, ", ".join(words), local_shape)


def _placement(value: object) -> str:
    """Return a placement as torch writes it: `Shard(0)`."""
    name = value.type_name.rpartition(".")[2] if isinstance(value, Record) else in_brief(value)
    return f"{name}({', '.join(map(in_brief, attributes(value).values()))})"


def _sharded(args: tuple[object, ...], state: object) -> SpecialTensor | None:
    """Read a ShardedTensor: the local shards, with the place of each in the whole."""
    shape = shape_of(args[2]) if len(args) > 2 else None
    if shape is None or not isinstance(state, tuple) or not state or not isinstance(state[0], list):
        return None
    parts: dict[str, ref.TensorRef] = {}
    places = []
    for shard in map(attributes, state[0]):
        tensor = tensor_of(shard.get("tensor"))
        offsets = attributes(shard.get("metadata")).get("shard_offsets")
        if tensor is None or not isinstance(offsets, list | tuple):
            return None
        parts[f"shard {len(parts)}"] = tensor
        places.append(f"at {list(map(in_brief, offsets))}".replace("'", ""))
    shapes = [tensor.shape for tensor in parts.values()]
    local = shapes[0] if len(shapes) == 1 else (sum(tensor.numel for tensor in parts.values()),)
    dtype = torch_dtype(args[1]) or next((tensor.dtype for tensor in parts.values()), None)
    local_shape = None if shapes == [shape] else local
    return SpecialTensor("ShardedTensor", dtype, shape, parts, ", ".join(places), local_shape)


_DTENSOR_MODULES = "torch.distributed.tensor torch.distributed._tensor.api torch.distributed.tensor._api"

# The classes of tensors that lie on several ranks, with how their state is read.
SHARDED_TYPES: dict[object, Callable[[tuple[object, ...], object], SpecialTensor | None]] = {
    **dict.fromkeys(names_of(f"{_DTENSOR_MODULES}: DTensor"), _dtensor),
    Global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"): _sharded,
}
