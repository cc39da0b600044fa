"""Names in a pickle: those that are understood, those that are harmless, and those that could run something.

Any class or function that a pickle names is imported when it is unpickled without `weights_only`, and may be
called with any arguments, so every name counts as one that could run something unless it is listed here. A
name is listed when nothing it can be called with runs anything but other names of the same pickle: not
`torch.storage._load_from_bytes`, which unpickles its argument, nor `builtins.getattr`, which finds any
function by its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..tensors.dtypes import DTYPES, STORAGE_DTYPES
from .values import WRAPPERS, Global, walk

_BUILTINS = ("builtins", "__builtin__")


def _names(modules: Iterable[str], names: str) -> set[str]:
    return {f"{module}.{name}" for module in modules for name in names.split()}


UNDERSTOOD = {
    *(str(name) for name in WRAPPERS),
    *_names(["torch"], "Size Tensor device"),
    *_names(["torch"], " ".join(DTYPES)),
    *_names(_BUILTINS, "set frozenset complex bytes bytearray slice range xrange"),
    "_codecs.encode",
    "collections.OrderedDict",
}
"""Names of ordinary files that are read as what they mean, or that are plain data."""

KNOWN = UNDERSTOOD | {
    *_names(_BUILTINS, "bool dict float int list object str tuple unicode long"),
    *_names(["copyreg", "copy_reg"], "_reconstructor __newobj__ __newobj_ex__"),
    *_names(["collections"], "Counter defaultdict deque"),
    *_names(
        ["pathlib", "pathlib._local"], "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"
    ),
    *_names(
        ["torch._utils"],
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_qtensor _rebuild_sparse_tensor "
        "_rebuild_sparse_csr_tensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage "
        "_rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor _rebuild_wrapper_subclass",
    ),
    *_names(["torch.nn.parameter"], "Parameter Buffer UninitializedParameter UninitializedBuffer"),
    *_names(["torch"], "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc"),
    *_names(["torch"], "contiguous_format channels_last channels_last_3d preserve_format Generator"),
    *_names(["torch"], "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric"),
    *_names(["torch"], "per_channel_affine_float_qparams"),
    *_names(["torch", "torch.cuda"], " ".join(STORAGE_DTYPES)),
    *_names(
        ["torch"], "FloatTensor DoubleTensor HalfTensor BFloat16Tensor ByteTensor CharTensor ShortTensor"
    ),
    *_names(["torch"], "IntTensor LongTensor BoolTensor"),
    *_names(["torch.storage"], "UntypedStorage TypedStorage"),
    "torch.serialization._get_layout",
    "torch.distributed.remote_device._remote_device",
    *_names(
        ["numpy.core.multiarray", "numpy._core.multiarray"],
        "_reconstruct scalar",
    ),
    *_names(["numpy.random._pickle"], "__randomstate_ctor __generator_ctor __bit_generator_ctor"),
    *_names(["numpy.random._mt19937"], "MT19937"),
    *_names(["numpy.random._pcg64"], "PCG64 PCG64DXSM"),
    *_names(["deepspeed.runtime.zero.config"], "ZeroStageEnum"),
    *_names(["deepspeed.runtime.fp16.loss_scaler"], "LossScaler DynamicLossScaler"),
    *_names(["deepspeed.utils.tensor_fragment"], "fragment_address"),
    *_names(["numpy.core.numeric", "numpy._core.numeric"], "_frombuffer"),
    *_names(
        ["numpy"], "ndarray dtype bool_ bool object_ str_ bytes_ float16 float32 float64 complex64 complex128"
    ),
    *_names(["numpy"], "int8 int16 int32 int64 uint8 uint16 uint32 uint64 longlong ulonglong datetime64"),
    *_names(["numpy"], "timedelta64 void"),
}
"""Names of Python, torch and NumPy that run nothing by themselves: not reported as unknown."""

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
"""Modules and names of torch's own layers, optimizers and schedulers, as in whole pickled models, of NumPy's
element types, of the metadata of DCP and of tensors on several ranks."""

PLAIN_DATA = {
    *_names(["argparse"], "Namespace"),
    *_names(["types"], "SimpleNamespace"),
    *_names(["datetime"], "date datetime time timedelta timezone"),
    *_names(["decimal"], "Decimal"),
    *_names(["fractions"], "Fraction"),
    *_names(["uuid"], "UUID"),
}
"""Classes of the standard library that hold data and run nothing, but are not understood here."""

_BY_NAME = """
    os posix nt subprocess sys runpy importlib shutil socket ctypes pickle _pickle cPickle dill cloudpickle
    joblib marshal code codeop pty webbrowser multiprocessing asyncio threading _thread signal operator
    _operator functools _functools types commands popen2 platform timeit pdb bdb profile cProfile trace
    doctest pip pkgutil imp zipimport http urllib urllib2 requests ftplib smtplib tempfile io _io zipfile
    tarfile pydoc inspect ast builtins __builtin__ eval exec execfile system popen spawn getattr setattr
    __import__ compile open input load loads _load_from_bytes _load_global attrgetter methodcaller partial
    runstring
"""
DANGEROUS = frozenset(_BY_NAME.split())
"""Modules and functions by which pickles are known to run code: a name with one of these is shown first."""


def unknown_names(names: Iterable[Global]) -> list[str]:
    """Return those of some names that are neither understood nor known to be harmless.

    Args:
        names: names of a pickle.

    Returns:
        Names without repeats: first those that could run something, as `names_that_run` sorts them, then
        classes that only hold data.
    """
    named = set(names)
    running = names_that_run(named)
    return [*running, *sorted({str(name) for name in named if not _is_known(name)} - {*running})]


def names_that_run(names: Iterable[Global]) -> list[str]:
    """Return those of some names that could run something when they are unpickled without `weights_only`.

    Args:
        names: names of a pickle.

    Returns:
        Names without repeats, those by which pickles are known to run code first.
    """
    found = {str(name) for name in names if not _is_known(name) and str(name) not in PLAIN_DATA}
    return sorted(found, key=lambda name: (DANGEROUS.isdisjoint(name.split(".")), name))


def names_in(tree: object) -> set[Global]:
    """Return every name in a tree."""
    return {value for value in walk(tree) if isinstance(value, Global)}


def _is_known(name: Global) -> bool:
    modules, classes = CLASSES
    return str(name) in KNOWN or bool(modules.fullmatch(name.module) and classes.fullmatch(name.name))
