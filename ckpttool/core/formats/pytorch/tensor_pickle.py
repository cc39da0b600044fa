"""Read and write tensors and storages in a pickle as torch describes them, without torch.

A storage is a persistent id `('storage', class, key, location, numel)`; a tensor is a call of
`torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`, or of
`_v3`, which adds the dtype for element types that have no storage class of their own. Source: torch's
`serialization.py`, `_utils.py` and `storage.py`, 0.4 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...checkpoint.checkpoint import Remark
from ...checkpoint.special_tensors import READERS, require_sound
from ...inert_pickle.machine import PickleFault
from ...inert_pickle.reader import Pickle, read_pickle
from ...inert_pickle.values import FROM_TYPE, PARAMETER, Global, OrderedDict_, Record
from ...inert_pickle.writer import write_pickle
from ...tensors import ref
from . import fast_path

REBUILD_V1 = Global("torch._utils", "_rebuild_tensor")
REBUILD_V2 = Global("torch._utils", "_rebuild_tensor_v2")
REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3")


@dataclass(frozen=True, slots=True)
class StorageView:
    """A part of a storage in place of a storage (torch before 0.4), or a storage under another class."""

    storage: ref.Storage
    # in elements.
    offset: int
    numel: int
    kind: str | None = None  # the class whose elements are counted; that of the storage when None


AnyStorage = ref.Storage | StorageView

# Parts of a persistent id, in the zip format and before it: the sixth is the view, or None.
ZIP_PARTS, LEGACY_PARTS = 5, 6


def read_torch_pickle(
    data: bytes,
    storage: fast_path.FindStorage,
    storages: fast_path.FindStorages | None = None,
    *,
    parts: int,
    remarks: list[Remark],
) -> Pickle:
    """Read a pickle that torch wrote: its tensors become TensorRefs.

    `storages` finds many at once, where a file can have very many.
    """
    identities = _Identities(storage, parts, remarks)
    reducers = REDUCERS | {name: partial(_rebuild_parameter, name, remarks) for name in PARAMETER}
    reducers |= {name: partial(_without_hooks, name, remarks) for name in (REBUILD_V2, REBUILD_V3)}
    reducers |= {name: partial(_rebuild_from_type, name, remarks) for name in FROM_TYPE}
    if storages is None:
        return read_pickle(data, persistent_load=identities.find, reducers=reducers)
    pattern = fast_path.TensorPattern(REBUILD_V2, storages)

    def after(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Let what was matched before have its storages first, and its remarks, as without the shortcut."""

        def called(argument: Any) -> Any:
            pattern.find()
            return function(argument)

        return called

    reducers = {name: after(reducer) for name, reducer in reducers.items()}
    shortcuts = {REBUILD_V2: pattern}
    try:
        load = after(identities.find)
        pickle = read_pickle(data, persistent_load=load, reducers=reducers, shortcuts=shortcuts)
    except PickleFault:
        pattern.find()  # what is wrong with one of them was so before the fault that ended the reading
        raise
    pattern.find()
    return pickle


def _remark(remarks: list[Remark], name: str, message: str) -> None:
    """Remark on something once, however often it comes in a row."""
    if (remark := Remark(name, message)) not in remarks[-8:]:
        remarks.append(remark)


class _Identities:
    """Finds what persistent ids refer to, as torch does."""

    # torch keeps storages and views in one table by their keys: of two views under one key it takes the
    # first, whatever the second says, and of a view under the key of a storage the storage.

    def __init__(self, storage: fast_path.FindStorage, parts: int, remarks: list[Remark]) -> None:
        self.storage = storage
        self.parts = parts
        self.remarks = remarks
        self.storages: dict[str, AnyStorage] = {}
        self.views: dict[str, StorageView] = {}
        self.empty: dict[tuple[str, ref.DType], ref.Storage] = {}

    def find(self, identity: object) -> object:
        if isinstance(identity, tuple) and len(identity) == 4 and identity[0] == "module":
            return identity[1]  # a class with its source text, in whole models pickled by torch before 1.6
        key, form, view = fast_path.storage_id(identity)
        if isinstance(identity, tuple) and len(identity) != self.parts:
            what = f"has {len(identity)} parts in its id, which torch refuses here"
            _remark(self.remarks, f"storage '{key[:80]}'", what)
        if key in self.views:
            raise PickleFault(f"its pickle uses the key '{key[:80]}' for a storage and for a view of one")
        storage = self.of_class(key, form)
        self.storages.setdefault(key, storage)
        return storage if view is None else self.view(storage, form, *view)

    def of_class(self, key: str, form: fast_path.StorageForm) -> AnyStorage:
        """The storage of a key, seen under the class that the persistent id names."""
        storage, dtype = self.storage(key, form), fast_path.element_type(form.kind)
        if dtype is fast_path.element_type(storage.kind):
            return storage
        if storage.nbytes:
            return StorageView(storage, 0, form.numel, form.kind)
        # torch saves one under several classes: there are no bytes to share
        empty = ref.Storage(storage.data, form.kind, form.location, storage.crc32, storage.byteorder)
        return self.empty.setdefault((key, dtype), empty)

    def view(
        self, base: AnyStorage, form: fast_path.StorageForm, key: str, offset: int, numel: int
    ) -> AnyStorage:
        storage = base.storage if isinstance(base, StorageView) else base
        described = StorageView(storage, offset, numel, form.kind)
        known = self.storages.get(key) or self.views.setdefault(key, described)
        if known != described:
            what = "is described twice, differently: torch takes the first"
            _remark(self.remarks, f"storage view '{key[:80]}'", what)
        return known


def _rebuild_parameter(name: Global, remarks: list[Remark], args: tuple[Any, ...]) -> Record | None:
    """A Parameter around a Parameter, which torch makes one; None, so a plain Record, for any other."""
    _require_sound(name, args)
    inner = args[0]
    if not isinstance(inner, Record) or inner.callable not in PARAMETER or not isinstance(inner.args, tuple):
        return None
    what = "has a Parameter around a Parameter, which torch.save never writes; it is read as one"
    _remark(remarks, "data.pkl", what)
    return Record("reduce", name, (*inner.args[:1], *args[1:]))


def _require_sound(function: Global, args: tuple[Any, ...]) -> None:
    """Raise PickleFault for a call that torch refuses; otherwise it becomes a Record."""
    try:
        require_sound(function, args)
    except ref.BadTensor as fault:
        raise PickleFault(f"its pickle has a tensor {fault}") from None


def _rebuild_from_type(name: Global, remarks: list[Remark], args: tuple[Any, ...]) -> Record | None:
    """A tensor of another type or with attributes; None, and so a plain Record, unless it is strided."""
    _require_sound(name, args)
    function, kind, inner, state = args
    if not isinstance(function, Global) or function not in FEWEST:
        return None
    return Record("reduce", name, (_without_hooks(function, remarks, tuple(inner)), kind, state))


def _without_hooks(name: Global, remarks: list[Remark], args: tuple[Any, ...]) -> ref.TensorRef:
    """Read a tensor; no description of one can keep hooks, which are functions."""
    if len(args) > 5 and args[5]:
        what = "has tensors with hooks, which torch.save never writes; they are left out"
        _remark(remarks, "data.pkl", what)
    return _rebuild(name, args)


# Arguments of each function: storage, offset, shape and stride; whether gradients are required, and hooks;
# the dtype; flags may follow the latter two.
FEWEST = {REBUILD_V1: 4, REBUILD_V2: 6, REBUILD_V3: 7}


def _rebuild(name: Global, args: tuple[Any, ...]) -> ref.TensorRef:
    """A tensor whose every element lies in its storage."""
    fewest, most = FEWEST[name], FEWEST[name] + (name != REBUILD_V1)
    if not fewest <= len(args) <= most or (fewest > 4 and type(args[4]) is not bool):
        raise PickleFault("its pickle has a malformed tensor")
    dtype = None
    if name == REBUILD_V3:
        if not isinstance(args[6], Global):
            raise PickleFault("its pickle has a malformed tensor")
        dtype = ref.DTYPES.get(args[6].name) if args[6].module == "torch" else None
        if dtype is None:
            raise PickleFault(f"its pickle has a tensor of unknown dtype {args[6]}")
    storage, offset, shape, stride, *more = args
    if not isinstance(storage, ref.Storage | StorageView):
        raise PickleFault("its pickle has a tensor without a storage")
    bits = args[fewest] if len(args) > fewest else None
    if bits and (not isinstance(bits, dict) or not bits.keys() <= {"conj", "neg"}):
        raise PickleFault("its pickle has a tensor with unknown flags")
    conj, neg = ((bits or {}).get(flag) is True for flag in ("conj", "neg"))
    try:
        return tensor_of_storage(storage, dtype, shape, stride, offset, bool(more and more[0]), conj, neg)
    except ref.BadTensor as fault:
        raise PickleFault(f"its pickle has a tensor {fault}") from None


REDUCERS: dict[Global, Callable[[tuple[Any, ...]], object]] = {
    REBUILD_V1: partial(_rebuild, REBUILD_V1),
    **{name: partial(_require_sound, name) for name in READERS if isinstance(name, Global)},
}


def tensor_of_storage(
    storage: AnyStorage, dtype: ref.DType | None, shape: Any, stride: Any, offset: Any, *flags: bool
) -> ref.TensorRef:
    """Return a tensor as `checked_tensor` does; that of a view lies in the storage itself."""
    if isinstance(storage, ref.Storage):
        return ref.checked_tensor(
            storage, dtype or fast_path.element_type(storage.kind), shape, stride, offset, *flags
        )
    kind, root = storage.kind or storage.storage.kind, storage.storage
    limit = (storage.offset + storage.numel) * fast_path.itemsize(kind)
    begin = offset + storage.offset if ref.is_count(offset) else offset
    return ref.checked_tensor(
        root, dtype or fast_path.element_type(kind), shape, stride, begin, *flags, limit=limit
    )


def _reduce_tensor(tensor: ref.TensorRef) -> tuple[Global, tuple[object, ...]]:
    """Return the callable and the arguments that rebuild a tensor, as torch writes them."""
    if tensor.dtype.name not in ref.DTYPES:
        raise ValueError(f"a tensor has the type {tensor.dtype.safetensors}, unknown to torch")
    # Copies of shape and stride, as torch writes a tuple for each tensor and the reader shares them.
    shape, stride, hooks = (*tensor.shape,), (*tensor.stride,), OrderedDict_()
    bits = {name: True for name, on in (("conj", tensor.conj), ("neg", tensor.neg)) if on}
    is_typed = ref.STORAGE_DTYPES.get(tensor.storage.kind) is tensor.dtype
    more = [] if is_typed else [Global("torch", tensor.dtype.name)]
    args = (tensor.storage, tensor.offset, shape, stride, tensor.requires_grad, hooks)
    return REBUILD_V2 if is_typed else REBUILD_V3, (*args, *more, *filter(None, [bits]))


def written_device(storage: ref.Storage, device: str | None) -> str:
    """Return the device that a storage is tagged with in a pickle."""
    return storage.location if device is None or storage.location == "meta" else device


def write_torch_pickle(value: object, protocol: int, device: str | None) -> tuple[bytes, list[ref.Storage]]:
    """Return the pickle of a value, and its storages in the order of their keys."""
    storages: list[ref.Storage] = []
    keys: dict[int, str] = {}

    def key_of(storage: ref.Storage) -> str:
        """Number storages in the order in which they are first referred to, as torch does."""
        if id(storage) not in keys:
            keys[id(storage)] = str(len(storages))
            storages.append(storage)
        return keys[id(storage)]

    def persistent_id(storage: ref.Storage) -> tuple[object, ...]:
        kind = fast_path.UNTYPED if storage.kind == fast_path.UNTYPED.name else Global("torch", storage.kind)
        numel = storage.nbytes // fast_path.itemsize(storage.kind)
        return "storage", kind, key_of(storage), written_device(storage, device), numel

    data = write_pickle(
        value,
        protocol=protocol,
        persistent_id=persistent_id,
        reduce_tensor=_reduce_tensor,
        shortcut=fast_path.WrittenTensors(key_of),
    )
    return data, storages
