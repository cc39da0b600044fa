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
from .values import WRAPPERS, Global, names_of, walk

# Names of ordinary files that are read as what they mean, or that are plain data.
UNDERSTOOD = {str(name) for name in WRAPPERS} | {
    str(name)
    for name in names_of(
        f"""
        torch: Size Tensor device {" ".join(DTYPES)}
        builtins __builtin__: set frozenset complex bytes bytearray slice range xrange
        _codecs: encode
        collections: OrderedDict
        """
    )
}

# Names of Python, torch and NumPy that run nothing by themselves: not reported as unknown.
KNOWN = UNDERSTOOD | {
    str(name)
    for name in names_of(
        f"""
        builtins __builtin__: bool dict float int list object str tuple unicode long
        copyreg copy_reg: _reconstructor __newobj__ __newobj_ex__
        collections: Counter defaultdict deque
        pathlib pathlib._local: Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath
        torch._utils: _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_qtensor
        torch._utils: _rebuild_sparse_tensor _rebuild_sparse_csr_tensor _rebuild_nested_tensor
        torch._utils: _rebuild_meta_tensor_no_storage _rebuild_device_tensor_from_numpy
        torch._utils: _rebuild_device_tensor_from_cpu_tensor _rebuild_wrapper_subclass
        torch.nn.parameter: Parameter Buffer UninitializedParameter UninitializedBuffer
        torch: strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc
        torch: contiguous_format channels_last channels_last_3d preserve_format Generator
        torch: per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric
        torch: per_channel_affine_float_qparams
        torch: FloatTensor DoubleTensor HalfTensor BFloat16Tensor ByteTensor CharTensor ShortTensor
        torch: IntTensor LongTensor BoolTensor
        torch torch.cuda: {" ".join(STORAGE_DTYPES)}
        torch.storage: UntypedStorage TypedStorage
        torch.serialization: _get_layout
        torch.distributed.remote_device: _remote_device
        numpy.core.multiarray numpy._core.multiarray: _reconstruct scalar
        numpy.core.numeric numpy._core.numeric: _frombuffer
        numpy.random._pickle: __randomstate_ctor __generator_ctor __bit_generator_ctor
        numpy.random._mt19937: MT19937
        numpy.random._pcg64: PCG64 PCG64DXSM
        numpy: ndarray dtype bool_ bool object_ str_ bytes_ float16 float32 float64 complex64 complex128
        numpy: int8 int16 int32 int64 uint8 uint16 uint32 uint64 longlong ulonglong datetime64
        numpy: timedelta64 void
        deepspeed.runtime.zero.config: ZeroStageEnum
        deepspeed.runtime.fp16.loss_scaler: LossScaler DynamicLossScaler
        deepspeed.utils.tensor_fragment: fragment_address
        """
    )
}

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
PLAIN_DATA = {
    str(name)
    for name in names_of(
        """
        argparse: Namespace
        types: SimpleNamespace
        datetime: date datetime time timedelta timezone
        decimal: Decimal
        fractions: Fraction
        uuid: UUID
        """
    )
}

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


def unknown_names(names: Iterable[Global]) -> list[str]:
    """Return the names not known to be harmless: first those that could run something, the worst first."""
    named = set(names)
    running = names_that_run(named)
    return [*running, *sorted({str(name) for name in named if not _is_known(name)} - {*running})]


def names_that_run(names: Iterable[Global]) -> list[str]:
    """Return the names that could run something when unpickled without `weights_only`, the worst first."""
    running = {str(name) for name in names if not _is_known(name) and str(name) not in PLAIN_DATA}
    return sorted(running, key=lambda name: (not is_dangerous(name), name))


def is_dangerous(name: str) -> bool:
    """Whether a name is of what pickles are known to run code by, rather than of a class not known here."""
    return not DANGEROUS.isdisjoint(name.split("."))


def names_in(tree: object) -> set[Global]:
    """Return every name in a tree."""
    return {value for value in walk(tree) if isinstance(value, Global)}


def _is_known(name: Global) -> bool:
    modules, classes = CLASSES
    return str(name) in KNOWN or bool(modules.fullmatch(name.module) and classes.fullmatch(name.name))
