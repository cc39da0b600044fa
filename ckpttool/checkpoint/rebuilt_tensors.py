"""The calls by which a pickle rebuilds tensors that are not plain ones, read without running them.

torch pickles such a tensor as a call that puts it together from plain tensors and settings. Sources: torch's
`_tensor.py`, `_utils.py`, `distributed/tensor/_dtensor_spec.py`, `distributed/_shard/sharded_tensor/api.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import islice

from ..inert_pickle import values as inert
from ..inert_pickle.values import FROM_TYPE, PARAMETER, Global, Record, in_brief, names_of, tensor_of
from ..tensors.checked import BadTensor, checked_tensor
from ..tensors.dtypes import DTYPES, STORAGE_DTYPES, has_gradients
from ..tensors.ref import Storage, TensorRef, extent, is_count
from .special_tensors import UNINITIALISED, SpecialTensor, attributes, read_sparse, shape_of, torch_dtype

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
        except BadTensor:
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
            raise BadTensor("of a class, in a call whose arguments torch refuses")
        require_sound(args[0], tuple(args[2]))
    elif function in PARAMETER:
        _require_parameter(args, has_state=isinstance(function, Global) and function.name.endswith("_state"))


def _require_parameter(args: tuple[object, ...], has_state: bool) -> None:
    """Check `_rebuild_parameter(tensor, requires_grad, hooks)`, or with a state behind these."""
    if len(args) != 3 + has_state or type(args[1]) is not bool:
        raise BadTensor("in a Parameter, in a call whose arguments torch refuses")
    inner, tensor = args[0], tensor_of(args[0])
    if not isinstance(inner, TensorRef | Record):
        raise BadTensor(f"in a Parameter that is none, but a {inert.container_name(inner)}")
    if tensor is not None and args[1] and not has_gradients(tensor.dtype):
        raise BadTensor(f"of {tensor.dtype.name} in a Parameter that requires gradients")
    if has_state and inert.attributes_in(args[3]) is None:
        raise BadTensor("in a Parameter whose attributes are none")


def plain_tensor(value: object) -> TensorRef | None:
    """Return the plain tensor with all of a value: of a Parameter, subclass or whole DTensor too."""
    tensor = tensor_of(value)
    if tensor is None and isinstance(value, Record) and (like := special_tensor(value)):
        return like.parts["local"] if like.kind == "DTensor" and not like.is_piece else None
    return tensor


def with_plain_tensor(value: object, tensor: TensorRef) -> object:
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
    inside = [item for item in islice(inert.walk(value), MAX_INSIDE) if isinstance(item, TensorRef)]
    return SpecialTensor(kind, parts={str(i): tensor for i, tensor in enumerate(inside)}, known=False)


def _quantised(args: tuple[object, ...]) -> SpecialTensor:
    """Read `_rebuild_qtensor(storage, offset, size, stride, (scheme, …), requires_grad, hooks)`."""
    match args:
        case (Storage() as storage, offset, size, stride, (tuple() | list() as quantizer), False, _):
            dtype, shape = STORAGE_DTYPES.get(storage.kind), shape_of(size)
        case _:
            raise BadTensor("that is quantised, in a call whose arguments torch refuses")
    if dtype is None or shape is None or not dtype.name.startswith("q"):
        raise BadTensor("that is quantised, and whose storage or size is not")
    parts: dict[str, TensorRef] = {}
    settings: dict[str, object]
    match quantizer:
        case (Global("torch", "per_tensor_affine" as scheme), int() | float() as scale, int() as zero) if (
            is_count(abs(zero))
        ):
            settings = {"scale": scale, "zero point": zero}
        case (Global("torch", str(scheme)), scale, zero, int() as axis) if scheme in PER_CHANNEL:
            settings = {"scale": scale, "zero point": zero, "axis": axis}
            parts = {name: each for name, each in settings.items() if isinstance(each, TensorRef)}
            if not (0 <= axis < len(shape) and _are_of_channels(scale, zero, shape[axis])):
                raise BadTensor("whose quantizer does not fit its channels")
        case _:
            raise BadTensor("whose quantizer is none")
    if dtype.name in PACKED:  # several elements in a byte: no view says so
        packed = -(-extent(shape) // PACKED[dtype.name]) if 0 not in shape else 0
        values = checked_tensor(storage, DTYPES["uint8"], (packed,), (1,), offset)
        settings["stride"] = in_brief(stride)
    else:
        steps = tuple(stride) if isinstance(stride, list) else stride
        values = checked_tensor(storage, dtype, shape, steps, offset)
    said = [f"{name} {in_brief(each)}" for name, each in settings.items() if name not in parts]
    return SpecialTensor("quantised", dtype, shape, {"values": values, **parts}, ", ".join([scheme, *said]))


PER_CHANNEL = ("per_channel_affine", "per_channel_affine_float_qparams")
PACKED = {"quint4x2": 2, "quint2x4": 4}  # elements in a byte


def _are_of_channels(scale: object, zero: object, channels: int) -> bool:
    if isinstance(scale, TensorRef) and isinstance(zero, TensorRef):
        return scale.shape == zero.shape == (channels,)
    if not isinstance(scale, list) or not isinstance(zero, list):
        return False
    return len(scale) == len(zero) == channels and all(type(n) in (int, float) for n in [*scale, *zero])


def _nested(args: tuple[object, ...]) -> SpecialTensor:
    """Read `_rebuild_nested_tensor(buffer, sizes, strides, offsets)`."""
    tensors = [part for part in args if isinstance(part, TensorRef)]
    if not len(args) == len(tensors) == 4:
        raise BadTensor("that is nested, in a call whose arguments torch refuses")
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
            raise BadTensor("without values, in a call whose arguments torch refuses")
    if made.dtype is None or made.shape is None or steps is None or len(steps) != len(made.shape):
        raise BadTensor("without values, of no type, size or stride")
    if grad and not has_gradients(made.dtype):
        raise BadTensor(f"of {made.dtype.name} that requires gradients")
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
    parts: dict[str, TensorRef] = {}
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
