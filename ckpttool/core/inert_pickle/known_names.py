"""Names in a pickle: those that are understood, those that are harmless, and those that could run something.

Any class or function that a pickle names is imported when it is unpickled without `weights_only`, and may be
called with any arguments, so every name counts as one that could run something unless it is listed here. A
name is listed when nothing it can be called with runs anything but other names of the same pickle: not
`torch.storage._load_from_bytes`, which unpickles its argument, nor `builtins.getattr`, which finds any
function by its text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from ..tensors.ref import DTYPES, STORAGE_DTYPES, TensorRef
from . import values as inert
from .values import PARAMETER, Global, OrderedDict_, Record, attributes_in, names_of, tensor_of, walk


def _texts(table: str) -> frozenset[str]:
    return frozenset(map(str, names_of(table)))


# Names of ordinary files that are read as what they mean, or that are plain data.
UNDERSTOOD = _texts(
    f"""
    torch: Size Tensor device {" ".join(DTYPES)}
    builtins __builtin__: set frozenset complex bytes bytearray slice range xrange
    _codecs: encode
    collections: OrderedDict
    """
) | frozenset(map(str, inert.WRAPPERS))

# Names of a DTensor, which are taken once `torch.distributed.tensor` is imported.
DTENSOR_NAMES = names_of(
    """
    torch.distributed._mesh_layout: _FlatLayout _MeshLayout
    torch.distributed.device_mesh: DeviceMesh
    torch.distributed.tensor: DTensor
    torch.distributed.tensor._dtensor_spec: DTensorSpec ShardOrderEntry TensorMeta
    torch.distributed.tensor.placement_types: Partial Replicate Shard _StridedShard
    """
)

# Names that a tensor's pickle may have.
TENSOR_NAMES = DTENSOR_NAMES | names_of(
    f"""
    torch: {" ".join(DTYPES)} {" ".join(STORAGE_DTYPES)} Size Tensor device
    torch: per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric
    torch: per_channel_affine_float_qparams
    torch._tensor: _rebuild_from_type_v2
    torch._utils: _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_qtensor
    torch._utils: _rebuild_parameter _rebuild_parameter_with_state _rebuild_sparse_tensor
    torch._utils: _rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass
    torch.nn.parameter: Parameter
    torch.serialization: _get_layout
    torch.storage: UntypedStorage
    """
)

# Names of Python, torch and NumPy that run nothing by themselves: not reported as unknown.
KNOWN = (UNDERSTOOD | frozenset(map(str, TENSOR_NAMES))) | _texts(
    f"""
    builtins __builtin__: bool dict float int list object str tuple unicode long
    copyreg copy_reg: _reconstructor __newobj__ __newobj_ex__
    collections: Counter defaultdict deque
    pathlib pathlib._local: Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath
    torch._utils: _rebuild_sparse_csr_tensor _rebuild_nested_tensor
    torch._utils: _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor
    torch.nn.parameter: Buffer UninitializedParameter UninitializedBuffer
    torch: strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc
    torch: contiguous_format channels_last channels_last_3d preserve_format Generator
    torch: FloatTensor DoubleTensor HalfTensor BFloat16Tensor ByteTensor CharTensor ShortTensor
    torch: IntTensor LongTensor BoolTensor
    torch.cuda: {" ".join(STORAGE_DTYPES)}
    torch.storage: TypedStorage
    torch.distributed.remote_device: _remote_device
    numpy.core.multiarray numpy._core.multiarray: _reconstruct scalar
    numpy.core.numeric numpy._core.numeric: _frombuffer
    numpy.random._pickle: __randomstate_ctor __generator_ctor __bit_generator_ctor
    numpy.random._mt19937: MT19937
    numpy.random._pcg64: PCG64 PCG64DXSM
    numpy: ndarray dtype bool_ bool object_ str_ bytes_ float16 float32 float64 complex64 complex128
    numpy: int8 int16 int32 int64 uint8 uint16 uint32 uint64 longlong ulonglong datetime64
    numpy: timedelta64 void
    joblib.numpy_pickle: NumpyArrayWrapper
    torch.jit._pickle: build_intlist build_tensorlist build_doublelist build_boollist restore_type_tag
    deepspeed.runtime.zero.config: ZeroStageEnum
    deepspeed.runtime.fp16.loss_scaler: LossScaler DynamicLossScaler
    deepspeed.utils.tensor_fragment: fragment_address
    """
)

# Modules and names of torch's own layers, optimizers and schedulers, as in whole pickled models, of NumPy's
# element types, of the metadata of DCP and of tensors on several ranks
CLASSES = (
    re.compile(
        r"torch\.nn\.modules\.[a-z_]+|torch\.optim\.[a-z_]+|numpy\.dtypes|"
        r"torch\.distributed\.checkpoint\.(metadata|filesystem)|torch\.distributed\._?tensor|"
        r"torch\.distributed\._?tensor\.(placement_types|_dtensor_spec|api|_api)|"
        r"torch\.distributed\.(device_mesh|_mesh_layout|remote_device)|"
        r"torch\.distributed\._shard\.(metadata|sharded_tensor\.(api|metadata|shard)|sharding_spec\.[a-z_]+)"
    ),
    re.compile(r"_?[A-Z]\w*"),
)

# Classes of the standard library that hold data and run nothing, but are not understood here.
PLAIN_DATA = _texts(
    """
    argparse: Namespace
    types: SimpleNamespace
    datetime: date datetime time timedelta timezone
    decimal: Decimal
    fractions: Fraction
    uuid: UUID
    """
)

_BY_NAME = """
    os posix nt subprocess sys runpy importlib shutil socket ctypes pickle _pickle cPickle dill cloudpickle
    joblib marshal code codeop pty webbrowser multiprocessing asyncio threading _thread signal operator
    _operator functools _functools types commands popen2 platform timeit pdb bdb profile cProfile trace
    doctest pip pkgutil imp zipimport http urllib urllib2 requests ftplib smtplib tempfile io _io zipfile
    tarfile pydoc inspect ast builtins __builtin__ eval exec execfile system popen spawn getattr setattr
    __import__ compile open input load loads _load_from_bytes _load_global attrgetter methodcaller partial
    runstring
"""
# Modules and functions by which pickles are known to run code: a name with one of these is shown first.
DANGEROUS = frozenset(_BY_NAME.split())


def unknown_names(names: Collection[Global]) -> list[str]:
    """Return the names not known to be harmless: first those that could run something, the worst first."""
    running = names_that_run(names)
    return [*running, *sorted({str(name) for name in names if not _is_known(name)} - {*running})]


def names_that_run(names: Iterable[Global]) -> list[str]:
    """Return the names that could run something when unpickled without `weights_only`, the worst first."""
    running = sorted({*filter(_could_run, names)}, key=lambda name: (not is_dangerous(name), str(name)))
    return [*map(str, running)]


def is_dangerous(name: Global) -> bool:
    """Whether a name is of what pickles are known to run code by, rather than of a class not known here."""
    # A package's own modules may be called `commands` or `types`.
    return _could_run(name) and not DANGEROUS.isdisjoint([name.module.split(".")[0], *name.name.split(".")])


def names_in(tree: object) -> set[Global]:
    """Return every name in a tree."""
    return {value for value in walk(tree) if isinstance(value, Global)}


def _could_run(name: Global) -> bool:
    return not _is_known(name) and str(name) not in PLAIN_DATA


def _is_known(name: Global) -> bool:
    modules, classes = CLASSES
    return str(name) in KNOWN or bool(modules.fullmatch(name.module) and classes.fullmatch(name.name))


# What `torch.load(weights_only=True)` takes, as far as checkpoints need it. Source: `_get_allowed_globals` in
# torch's `_weights_only_unpickler.py`, 2.6 to 2.15, and the classes that `torch.distributed.tensor` adds when
# it is imported.

MAX_INTEGER = 2040  # bits of an integer: longer ones take an opcode that torch's reader does not know

_DEVICES = (
    "cpu cuda ipu xpu mkldnn opengl opencl ideep hip ve fpga maia xla lazy vulkan mps meta hpu mtia "
    "privateuseone"
)
DEVICES = frozenset(_DEVICES.split())
_LAYOUTS = "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc _mkldnn jagged"
LAYOUTS = frozenset(f"torch.{name}" for name in _LAYOUTS.split())

DTYPE_NAMES = frozenset(Global("torch", name) for name in DTYPES)
FROM_TYPE_V2 = Global("torch._tensor", "_rebuild_from_type_v2")

# Every name that a file of tensors and plain values needs.
NAMES = TENSOR_NAMES | names_of("builtins __builtin__: complex")

# Every name that is taken before `torch.distributed.tensor` is imported.
TAKEN = (NAMES - DTENSOR_NAMES) | names_of(
    """
    builtins __builtin__: bytearray set
    _codecs: encode
    collections: Counter OrderedDict
    """
)


def is_value(record: Record) -> bool:
    """Return whether an object is a complex number, a size, a device or a layout of torch."""
    if record.how != "reduce" or record.has_state or record.elements or record.items:
        return False
    match record.callable, record.args:
        case Global("builtins" | "__builtin__", "complex"), (_, _) as parts:
            return {*map(type, parts)} <= {int, float}
        case Global("torch", "Size"), (tuple(sizes),):
            return {*map(type, sizes)} <= {int}
        case Global("torch", "device"), (str(name), *index):
            numbered = len(index) == 1 and type(index[0]) is int and 0 <= index[0] < 128
            return name in DEVICES and (not index or numbered)
        case Global("torch.serialization", "_get_layout"), (str(layout),):
            return layout in LAYOUTS
    return False


def is_tensor_taken(record: Record) -> bool:
    """Return whether the pickle of a tensor names only what is taken, in attributes and hooks too."""
    if record.how != "reduce" or not names_in(record) <= TENSOR_NAMES:
        return False
    if record.callable in PARAMETER and not _is_parameter(record.args):
        return False
    if tensor_of(record) is not None and wraps(record).left_out:
        return False
    return not any(_is_odd(value) for value in walk(record))


def _is_parameter(args: Any) -> bool:
    """Return whether these are a Parameter's tensor, requires_grad, hooks and, in some, attributes."""
    if not isinstance(args, tuple) or len(args) not in (3, 4):
        return False
    _, requires_grad, hooks, *state = args
    return type(requires_grad) is bool and not hooks and all(type(attributes) is dict for attributes in state)


def _is_odd(value: object) -> bool:
    """Return whether a value has a type that is not taken, or attributes that begin with two underscores."""
    if isinstance(value, dict):
        return any(isinstance(key, str) and key.startswith("__") for key in value) or (
            isinstance(value, OrderedDict_) and value.attributes is not None
        )
    if isinstance(value, int):
        return value.bit_length() >= MAX_INTEGER
    return isinstance(value, frozenset) or (isinstance(value, Record) and bool(value.elements or value.items))


_PROPERTIES = (
    "H T _backward_hooks _base _cdata _grad _grad_fn _has_grad_dtype_override "
    "_has_symbolic_sizes_strides _post_accumulate_grad_hooks _python_dispatch _version data device "
    "dtype grad grad_dtype grad_fn imag is_cpu is_cuda is_ipu is_leaf is_maia is_meta is_mkldnn is_mps "
    "is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout mH "
    "mT name names nbytes ndim output_nr real requires_grad retains_grad shape volatile"
)
# Attributes that torch's own class of tensors computes: setting one fails, or changes the tensor.
PROPERTIES = frozenset(_PROPERTIES.split())


class Wrapping(NamedTuple):
    """What a pickle says of a tensor besides its values."""

    kind: object  # the class of the tensor; None for a Parameter
    requires_grad: bool | None  # of a Parameter
    attributes: dict[str, object]  # those that a tensor of torch's own class can have too
    left_out: tuple[str, ...]  # the names of all others; `__setstate__` for a state that is no attributes


def wraps(record: Record) -> Wrapping:
    """Return what the pickle of a tensor in one of WRAPPERS says besides its values."""
    args: tuple[Any, ...] = record.args if isinstance(record.args, tuple) else ()
    first, second, third = (*args[1:], None, None, None)[:3]
    is_parameter = record.callable in PARAMETER
    attributes = attributes_in(third if is_parameter else second)
    settable = {name: value for name, value in (attributes or {}).items() if _is_settable(name)}
    left_out = [str(name) for name in attributes or () if name not in settable]
    if attributes is None:
        left_out.append("__setstate__")
    if is_parameter and second:
        left_out.append("_backward_hooks")
    kind, requires_grad = (None, first is not False) if is_parameter else (first, None)
    return Wrapping(kind, requires_grad, settable, tuple(left_out))


def wrapped(tensor: TensorRef, requires_grad: bool | None, attributes: dict[str, object]) -> object:
    """Return the pickle of a tensor, or of a Parameter unless `requires_grad` is None, with attributes."""
    if requires_grad is not None:
        name = "_rebuild_parameter_with_state" if attributes else "_rebuild_parameter"
        args = (tensor, requires_grad, OrderedDict_(), *([attributes] if attributes else []))
        return Record("reduce", Global("torch._utils", name), args)
    if attributes:
        return Record("reduce", FROM_TYPE_V2, (tensor, Global("torch", "Tensor"), attributes))
    return tensor


def _is_settable(name: object) -> bool:
    return isinstance(name, str) and not name.startswith("__") and name not in PROPERTIES
