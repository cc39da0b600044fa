"""What `torch.load(weights_only=True)` takes, so far as a checkpoint has need of it.

Source: `_get_allowed_globals` in torch's `_weights_only_unpickler.py`, 2.6 to 2.15, and the classes that
`torch.distributed.tensor` adds when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..tensors.dtypes import DTYPES, STORAGE_DTYPES
from .known_names import names_in
from .values import PARAMETER, Global, OrderedDict_, Record, walk

MAX_INTEGER = 2040
"""Bits of an integer: longer ones take an opcode that torch's reader does not know."""

_DEVICES = (
    "cpu cuda ipu xpu mkldnn opengl opencl ideep hip ve fpga maia xla lazy vulkan mps meta hpu mtia "
    "privateuseone"
)
DEVICES = frozenset(_DEVICES.split())
_LAYOUTS = "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc _mkldnn jagged"
LAYOUTS = frozenset(f"torch.{name}" for name in _LAYOUTS.split())

DTYPE_NAMES = frozenset(Global("torch", name) for name in DTYPES)

_REBUILD = (
    "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state "
    "_rebuild_qtensor _rebuild_sparse_tensor _rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass"
)
_SCHEMES = (
    "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric "
    "per_channel_affine_float_qparams"
)

DTENSOR_NAMES = frozenset(
    Global(f"torch.distributed.{module}", name)
    for module, names in {
        "_mesh_layout": "_FlatLayout _MeshLayout",
        "device_mesh": "DeviceMesh",
        "tensor": "DTensor",
        "tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
        "tensor.placement_types": "Partial Replicate Shard _StridedShard",
    }.items()
    for name in names.split()
)
"""Names of a DTensor, which are taken once `torch.distributed.tensor` is imported."""

TENSOR_NAMES = (
    DTYPE_NAMES
    | DTENSOR_NAMES
    | {Global("torch._utils", name) for name in _REBUILD.split()}
    | {Global("torch", name) for name in _SCHEMES.split()}
    | {Global("torch", name) for name in STORAGE_DTYPES}
    | {
        Global("torch", "Size"),
        Global("torch", "Tensor"),
        Global("torch", "device"),
        Global("torch._tensor", "_rebuild_from_type_v2"),
        Global("torch.nn.parameter", "Parameter"),
        Global("torch.serialization", "_get_layout"),
        Global("torch.storage", "UntypedStorage"),
    }
)
"""Names that a tensor's pickle may have."""


def _is_complex(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and all(type(part) in (int, float) for part in args)


def _is_size(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and type(args[0]) is tuple and all(type(size) is int for size in args[0])


def _is_device(args: tuple[Any, ...]) -> bool:
    name, *index = args or (None,)
    numbered = not index or (len(index) == 1 and type(index[0]) is int and 0 <= index[0] < 128)
    return isinstance(name, str) and name in DEVICES and numbered


def _is_layout(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and isinstance(args[0], str) and args[0] in LAYOUTS


VALUES: dict[Global, Callable[[tuple[Any, ...]], bool]] = {
    Global("builtins", "complex"): _is_complex,
    Global("__builtin__", "complex"): _is_complex,
    Global("torch", "Size"): _is_size,
    Global("torch", "device"): _is_device,
    Global("torch.serialization", "_get_layout"): _is_layout,
}
"""Calls that make a value which is no tensor, with what tells whether their arguments are sound."""

NAMES = TENSOR_NAMES | VALUES.keys()
"""Every name that a file of tensors and plain values needs."""

TAKEN = (NAMES - DTENSOR_NAMES) | {
    *(Global(module, name) for module in ("builtins", "__builtin__") for name in ("bytearray", "set")),
    Global("_codecs", "encode"),
    Global("collections", "Counter"),
    Global("collections", "OrderedDict"),
}
"""Every name that is taken before `torch.distributed.tensor` is imported."""


def is_value(record: Record) -> bool:
    """Return whether an object is a complex number, a size, a device or a layout of torch."""
    return (
        record.how == "reduce"
        and isinstance(record.callable, Global)
        and record.callable in VALUES
        and isinstance(record.args, tuple)
        and VALUES[record.callable](record.args)
        and not (record.has_state or record.elements or record.items)
    )


def is_tensor_taken(record: Record) -> bool:
    """Return whether the pickle of a tensor names nothing but what is taken, in attributes and hooks neither.

    Args:
        record: an object that `tensor_of` or `tensor_like` says to be a tensor.
    """
    if record.how != "reduce" or not names_in(record) <= TENSOR_NAMES:
        return False
    if record.callable in PARAMETER and not _is_parameter(record.args):
        return False
    return not any(_is_odd(value) for value in walk(record))


def _is_parameter(args: Any) -> bool:
    """Return whether these are a Parameter's tensor, requires_grad, hooks and, in some, attributes."""
    if not isinstance(args, tuple) or len(args) not in (3, 4):
        return False
    _, requires_grad, hooks, *state = args
    return type(requires_grad) is bool and not hooks and all(type(each) is dict for each in state)


def _is_odd(value: object) -> bool:
    """Return whether a value has a type that is not taken, or attributes that begin with two underscores."""
    if isinstance(value, dict):
        return any(isinstance(key, str) and key.startswith("__") for key in value) or (
            isinstance(value, OrderedDict_) and value.attributes is not None
        )
    return isinstance(value, frozenset) or (isinstance(value, Record) and bool(value.elements or value.items))
