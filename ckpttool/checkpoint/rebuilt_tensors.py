"""The calls by which a pickle rebuilds tensors that are not plain ones, read without running them.

torch pickles such a tensor as a call that puts it together from plain tensors and settings. Sources: torch's
`_tensor.py`, `_utils.py`, `distributed/tensor/_dtensor_spec.py`, `distributed/_shard/sharded_tensor/api.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from ..inert_pickle.values import FROM_TYPE, PARAMETER, Global, Record, in_brief, tensor_of, walk, with_tensor
from ..tensors.dtypes import STORAGE_DTYPES
from ..tensors.ref import BadTensor, Storage, TensorRef, checked_tensor
from .special_tensors import SpecialTensor, attributes, shape_of, torch_dtype

# The ends of the names of classes that are taken for tensors, though they are not known here.
ENDINGS = ("Tensor", "Parameter", "Buffer")

# The most calls nested in each other that are read, such as a Parameter of a subclass of a sparse tensor.
LEVELS = 8

# The most values searched for tensors inside an object of an unknown class.
MAX_INSIDE = 10_000

WRAPPER_SUBCLASS = Global("torch._utils", "_rebuild_wrapper_subclass")


def special_tensor(value: object, levels: int = LEVELS) -> SpecialTensor | None:
    """Return the description of a value that is a tensor but not a plain one; None for any other value."""
    if not isinstance(value, Record) or tensor_of(value) is not None or not levels:
        return None
    args = value.args if isinstance(value.args, tuple) else ()
    if value.callable in PARAMETER:
        return special_tensor(args[0], levels - 1) if args else None
    if value.callable in FROM_TYPE and len(args) == 4:
        return _of_subclass(value, *args, levels=levels - 1)
    if value.callable in READERS:
        kind, read = READERS[value.callable]
        return read(args) or _unknown(kind, value)
    name = value.type_name.rpartition(".")[2]
    found = _unknown(name, value) if name.endswith(ENDINGS) else None
    return found if found is not None and found.parts else None


def plain_tensor(value: object) -> TensorRef | None:
    """Return the plain tensor that has all values of a value; None when there is none."""
    tensor = tensor_of(value)
    if tensor is not None or not isinstance(value, Record):
        return tensor
    like = special_tensor(value)
    is_whole = like is not None and like.kind == "DTensor" and not like.is_piece
    return like.parts["local"] if like is not None and is_whole else None


def with_plain_tensor(value: object, tensor: TensorRef) -> object:
    """Return a value around another plain tensor: a Parameter stays one, a whole DTensor becomes plain."""
    return with_tensor(value, tensor) if tensor_of(value) is not None else tensor


def _of_subclass(
    value: Record, function: object, kind: object, args: object, state: object, *, levels: int
) -> SpecialTensor:
    """Read `_rebuild_from_type_v2(function, kind, args, state)`: a tensor made by a function, of a class."""
    values = args if isinstance(args, tuple) else ()
    whole = SHARDED_TYPES.get(kind) if isinstance(kind, Global) else None
    if whole:
        found = whole(values, state)
    else:
        found = (
            special_tensor(Record("reduce", function, args), levels) if isinstance(function, Global) else None
        )
    if found is None:
        name = kind.name.rpartition(".")[2] if isinstance(kind, Global) else "object"
        found = _unknown(name, value)
        if function == WRAPPER_SUBCLASS and len(values) > 2:
            found = replace(found, dtype=torch_dtype(values[1]), shape=shape_of(values[2]))
    return found


def _unknown(kind: str, value: Record) -> SpecialTensor:
    """Return a tensor of which only the class is known, with the plain tensors inside it."""
    inside = [each for each in islice(walk(value), MAX_INSIDE) if isinstance(each, TensorRef)]
    return SpecialTensor(kind, parts={str(i): each for i, each in enumerate(inside)}, known=False)


def _sparse(args: tuple[object, ...]) -> SpecialTensor | None:
    """Read `_rebuild_sparse_tensor(layout, (indices, values, size, …))`, or its compressed forms."""
    match args:
        case (Record(args=(str(layout),)), (TensorRef() as at, TensorRef() as values, size, *rest)) if (
            layout.endswith("_coo")
        ):
            parts, settings = {"indices": at, "values": values}, rest[:1]
        case (
            Record(args=(str(layout),)),
            (TensorRef() as at, TensorRef() as plain, TensorRef() as values, size),
        ):
            parts, settings = {"compressed indices": at, "plain indices": plain, "values": values}, []
        case _:
            return None
    kind = f"sparse {layout.removeprefix('torch.sparse_').upper()}"
    form = "coalesced" if settings == [True] else ""
    return SpecialTensor(kind, values.dtype, shape_of(size), parts, form)


def _quantised(args: tuple[object, ...]) -> SpecialTensor | None:
    """Read `_rebuild_qtensor(storage, offset, size, stride, (scheme, scale, zero point[, axis]), …)`."""
    match args:
        case (Storage() as storage, offset, size, stride, (Global() as scheme, scale, zero, *axis), *_):
            dtype, shape = STORAGE_DTYPES.get(storage.kind), shape_of(size)
        case _:
            return None
    if dtype is None or shape is None:
        return None
    try:
        values = checked_tensor(storage, dtype, shape, stride, offset)
    except BadTensor:
        return None
    settings = {"scale": scale, "zero point": zero, "axis": axis[0] if axis else None}
    parts = {name: each for name, each in settings.items() if isinstance(each, TensorRef)}
    scalars = [f"{n} {each!r}" for n, each in settings.items() if isinstance(each, int | float)]
    form = ", ".join([scheme.name, *scalars])
    return SpecialTensor("quantised", dtype, shape, {"values": values, **parts}, form)


def _nested(args: tuple[object, ...]) -> SpecialTensor | None:
    """Read `_rebuild_nested_tensor(buffer, sizes, strides, offsets)`."""
    match args:
        case (
            TensorRef() as buffer,
            TensorRef() as sizes,
            TensorRef() as strides,
            TensorRef() as offsets,
            *_,
        ):
            parts = {"values": buffer, "sizes": sizes, "strides": strides, "offsets": offsets}
            return SpecialTensor("nested", buffer.dtype, None, parts)
    return None


def _jagged(args: tuple[object, ...]) -> SpecialTensor | None:
    """Read `_rebuild_njt({values, offsets, lengths, _ragged_idx, …})`, a nested tensor of layout jagged."""
    given = args[0] if args and isinstance(args[0], dict) else {}
    found = {name: tensor_of(given.get(name)) for name in ("values", "offsets", "lengths")}
    parts = {name: tensor for name, tensor in found.items() if tensor is not None}
    if "values" not in parts:
        return None
    return SpecialTensor(
        "nested", parts["values"].dtype, None, parts, f"ragged axis {given.get('_ragged_idx')}"
    )


def _meta(args: tuple[object, ...]) -> SpecialTensor | None:
    """Read `_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)`."""
    return SpecialTensor("meta", torch_dtype(args[0]), shape_of(args[1])) if len(args) > 1 else None


def _uninitialised(args: tuple[object, ...]) -> SpecialTensor:
    return SpecialTensor("uninitialised")


# The functions and classes that make a tensor, with what it is called and how their arguments are read.
READERS: dict[object, tuple[str, Callable[[tuple[object, ...]], SpecialTensor | None]]] = {
    Global("torch._utils", "_rebuild_sparse_tensor"): ("sparse", _sparse),
    Global("torch._utils", "_rebuild_sparse_csr_tensor"): ("sparse", _sparse),
    Global("torch._utils", "_rebuild_qtensor"): ("quantised", _quantised),
    Global("torch._utils", "_rebuild_nested_tensor"): ("nested", _nested),
    Global("torch.nested._internal.nested_tensor", "_rebuild_njt"): ("nested", _jagged),
    Global("torch._utils", "_rebuild_meta_tensor_no_storage"): ("meta", _meta),
    Global("torch._utils", "_rebuild_device_tensor_from_numpy"): ("device tensor", lambda args: None),
    Global("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): ("device tensor", lambda args: None),
    Global("torch._utils", "_rebuild_xla_tensor"): ("device tensor", lambda args: None),
    Global("torch.nn.parameter", "UninitializedParameter"): ("uninitialised", _uninitialised),
    Global("torch.nn.parameter", "UninitializedBuffer"): ("uninitialised", _uninitialised),
}


def _dtensor(args: tuple[object, ...], state: object) -> SpecialTensor | None:
    """Read a DTensor: a local tensor, and the mesh and placements that say which piece of the whole it is."""
    own = attributes(state)
    local, spec = tensor_of(own.get("_local_tensor")), attributes(own.get("_spec"))
    shape, placements = shape_of(args[2]) if len(args) > 2 else None, spec.get("placements")
    if local is None or shape is None or not isinstance(placements, tuple | list):
        return None
    words = [_placement(each) for each in placements]
    whole = local.shape == shape and not any(word.startswith("Partial") for word in words)
    mesh = attributes(spec.get("mesh"))
    rank, ranks = mesh.get("_rank"), mesh.get("_flatten_rank_map")
    here = f"rank {rank}" if type(rank) is int else None
    of = f" of {len(ranks)}" if here and isinstance(ranks, tuple) else ""
    form = ", ".join([*words, *([here + of] if here else [])])
    return SpecialTensor(
        "DTensor", local.dtype, shape, {"local": local}, form, None if whole else local.shape
    )


def _placement(value: object) -> str:
    """Return a placement as torch writes it: `Shard(0)`."""
    name = value.type_name.rpartition(".")[2] if isinstance(value, Record) else in_brief(value)
    settings = attributes(value).values()
    return f"{name}({', '.join(in_brief(each) for each in settings)})"


def _sharded(args: tuple[object, ...], state: object) -> SpecialTensor | None:
    """Read a ShardedTensor: the local shards, with the place of each in the whole."""
    shape = shape_of(args[2]) if len(args) > 2 else None
    if shape is None or not isinstance(state, tuple) or not state or not isinstance(state[0], list):
        return None
    parts: dict[str, TensorRef] = {}
    places = []
    for shard in map(attributes, state[0]):
        tensor, offsets = (
            tensor_of(shard.get("tensor")),
            attributes(shard.get("metadata")).get("shard_offsets"),
        )
        if tensor is None or not isinstance(offsets, list | tuple):
            return None
        parts[f"shard {len(parts)}"] = tensor
        places.append(f"at {list(map(in_brief, offsets))}".replace("'", ""))
    shapes = [tensor.shape for tensor in parts.values()]
    local = shapes[0] if len(shapes) == 1 else (sum(tensor.numel for tensor in parts.values()),)
    dtype = torch_dtype(args[1]) or next((tensor.dtype for tensor in parts.values()), None)
    return SpecialTensor(
        "ShardedTensor", dtype, shape, parts, ", ".join(places), None if shapes == [shape] else local
    )


# The classes of tensors that lie on several ranks, with how their state is read.
SHARDED_TYPES: dict[object, Callable[[tuple[object, ...], object], SpecialTensor | None]] = {
    Global("torch.distributed.tensor", "DTensor"): _dtensor,
    Global("torch.distributed._tensor.api", "DTensor"): _dtensor,
    Global("torch.distributed.tensor._api", "DTensor"): _dtensor,
    Global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"): _sharded,
}
