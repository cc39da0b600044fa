"""DTensors as they are pickled: pieces of tensors with the mesh and the place of the rank that holds them.

The form is that of torch 2.15; a test compares it with what FSDP2 writes. Cached hashes are left out, as
they mean nothing in another process.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...checkpoint.dotted_names import Path, dotted, leave_out
from ...checkpoint.optimizer_view import OptimizerView
from ...checkpoint.rebuilt_tensors import plain_tensor, special_tensor
from ...errors import Refused
from ...inert_pickle.values import Global, Record, remade, tensor_of, walk
from ...tensors.chunks import TensorPart, assembled
from ...tensors.dtypes import DTYPES
from ...tensors.ref import Computed, TensorRef, contiguous_stride

TENSOR = "torch.distributed.tensor"
LAYOUT = "torch.distributed._mesh_layout"
DTENSOR = Global(TENSOR, "DTensor")


class Shards:
    """The pieces of one rank, on a mesh of one axis, cut along the first dimension as FSDP2 does."""

    def __init__(self, path: str, rank: int, ranks: int, device: str, axis: str | None) -> None:
        self.path, self.rank, self.ranks = path, rank, ranks
        self._mesh = self._new_mesh(device, axis)
        self._made: dict[tuple[object, ...], Record] = {}

    def record(self, name: str, whole: TensorRef) -> Record:
        """Return a tensor's piece as the DTensor that this rank would save; one object for tied names."""
        if whole.view not in self._made:
            self._made[whole.view] = self._new(whole, self._piece(name, whole))
        return self._made[whole.view]

    def _piece(self, name: str, whole: TensorRef) -> TensorRef:
        """Return this rank's rows, of ceil(rows / ranks) each; the last ranks may have fewer, or none."""
        rows = -(-whole.shape[0] // self.ranks)
        begin = min(self.rank * rows, whole.shape[0])
        shape = (min(rows, whole.shape[0] - begin), *whole.shape[1:])
        offset = whole.offset + (begin * whole.stride[0] if 0 not in shape else 0)
        view = replace(whole, shape=shape, offset=offset, requires_grad=False)
        if not view.is_stretch:
            return assembled(name, self.path, view.dtype, shape, [TensorPart((0,) * len(shape), view)])
        old = whole.storage
        where = {"location": old.location, "byteorder": old.byteorder}
        return TensorRef.of_bytes(view.data, view.dtype, shape, old, **where)

    def _new(self, whole: TensorRef, local: TensorRef) -> Record:
        dtype, stride = Global("torch", whole.dtype.name), contiguous_stride(whole.shape)
        size = Record("reduce", Global("torch", "Size"), (whole.shape,))
        spec = {
            "mesh": self._mesh,
            "placements": (_object(f"{TENSOR}.placement_types", "Shard", {"dim": 0}),),
            "tensor_meta": Record("newobj", _spec("TensorMeta"), (size, stride, dtype)),
            "shard_order": (Record("newobj", _spec("ShardOrderEntry"), (0, (0,))),),
            "use_strided_shard_as_shard_order": False,
            "_hash": None,
        }
        layout = Record("reduce", Global("torch.serialization", "_get_layout"), ("torch.strided",))
        device = Record("reduce", Global("torch", "device"), ("cpu",))
        args = (DTENSOR, dtype, whole.shape, stride, 0, layout, device, False)
        state = {"_local_tensor": local, "_spec": _object(f"{TENSOR}._dtensor_spec", "DTensorSpec", spec)}
        return Record(
            "reduce",
            Global("torch._tensor", "_rebuild_from_type_v2"),
            (Global("torch._utils", "_rebuild_wrapper_subclass"), DTENSOR, args, (None, state)),
        )

    def _new_mesh(self, device: str, axis: str | None) -> Record:
        raw = struct.pack(f"<{self.ranks}i", *range(self.ranks))
        data = Computed.in_memory(self.path, raw)
        ranks = TensorRef.of_bytes(data, DTYPES["int32"], (self.ranks,))
        # torch drops axes of one.
        sizes: dict[str, object] = {"shape": (self.ranks,), "stride": (1,)}
        line = _object(LAYOUT, "_FlatLayout", sizes if self.ranks > 1 else {"shape": (), "stride": ()})
        state = {
            "_device_type": device,
            "_layout": _object(LAYOUT, "_MeshLayout", {"axes": (line,)}),
            "_rank_map": ranks,
            "_mesh_dim_names": None if axis is None else (axis,),
            "_root_mesh": None,
            "_preserve_rank_order": False,
            "_flatten_rank_map": tuple(range(self.ranks)),
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": ["0"],
            "_rank": self.rank,
            "_coordinate_on_dim": (self.rank,),
        }
        return _object("torch.distributed.device_mesh", "DeviceMesh", state)


def _spec(name: str) -> Global:
    return Global(f"{TENSOR}._dtensor_spec", name)


def _object(module: str, name: str, state: dict[str, object]) -> Record:
    return Record("newobj", Global(module, name), (), state=state, has_state=True)


Shape = tuple[int, ...]


class SplitOptimizer:
    """An optimizer's state, and which of its tensors are cut."""

    def __init__(
        self,
        file: str,
        path: Path,
        value: dict[Any, Any],
        tensors: Mapping[str, TensorRef],
        sharded: Collection[str],
        *,
        asked: bool,
    ) -> None:
        self.file, self.path, self.view = file, path, OptimizerView(value)
        state, names, cut = self.view.nested["state"], self.view.names, {*sharded}
        if not isinstance(state, dict):
            raise self._refused(f"'{dotted(path)}' has a {type(state).__name__} for its `state`")
        self.whole: set[object] = set()
        unnamed: list[object] = []
        spare = Counter(tensors[name].shape for name in sharded)
        for key in state:
            name = key if key in tensors else names.get(str(key))
            if name not in tensors:
                unnamed.append(key)
            elif name not in cut:
                self.whole.add(key)
            else:
                self._require_shape(key, tensors[name].shape)
                spare[tensors[name].shape] -= 1
        # As many parameters as are cut, of the same shapes: what stays whole is none of the optimizer's.
        parameters = {tensors[name].view for name in sharded}
        if asked and unnamed and len(parameters) != sum(map(len, self.view.keys)):
            what = f"the optimizer does not say whether its parameter {unnamed[0]!s:.80} stays whole"
            hint = "name its parameters first: ckpttool optimizer IN OUT --to names --order state, if it"
            raise Refused(file, what, hint=f"{hint} lists them in the state's order, else with --model SPEC")
        for key in unnamed:
            self._require_one_of(key, spare)
        known = set() if unnamed else {*names.values(), *map(str, state)}
        views = {tensors[name].view for name in known & tensors.keys()}  # a tied parameter has two names
        self.without = tuple(name for name in sharded if views and tensors[name].view not in views)
        """Names of the model's that are cut, and that the optimizer, which names its parameters, has not."""

    def _require_shape(self, key: object, shape: Shape) -> None:
        for kept, tensor in self._shaped(key):
            if tensor.shape != shape:
                raise self._of_unknown_cut(key, kept, tensor, f", and the parameter has {list(shape)}")

    def _require_one_of(self, key: object, spare: Counter[Shape]) -> None:
        """Check what is kept of an unknown parameter: one shape, that of a parameter which is no other's."""
        first: TensorRef | None = None
        for kept, tensor in self._shaped(key):
            if first is not None and tensor.shape != first.shape:
                raise self._of_unknown_cut(key, kept, tensor, f", and something else in {list(first.shape)}")
            if first is None and spare[tensor.shape] < 1:
                fewer = "fewer parameters have" if tensor.shape in spare else "no parameter has"
                raise self._of_unknown_cut(key, kept, tensor, f", which {fewer}")
            first = tensor
        if first is not None:
            spare[first.shape] -= 1

    def _of_unknown_cut(self, key: object, kept: object, tensor: TensorRef, why: str) -> Refused:
        what = f"keeps '{kept!s:.80}' of parameter {key!s:.80} in shape {list(tensor.shape)}"
        return self._refused(f"{what}{why}: how ranks cut it is unknown")

    def _refused(self, why: str) -> Refused:
        return Refused(self.file, f"the optimizer {why}", hint=leave_out(self.file, dotted(self.path)))

    def _shaped(self, key: object) -> Iterator[tuple[object, TensorRef]]:
        """Yield what is kept of a parameter in tensors with axes, which are cut."""
        entry = self.view.state[key]
        for kept, value in entry.items() if isinstance(entry, dict) else [("all", entry)]:
            tensor = plain_tensor(value)
            if tensor is None or not isinstance(entry, dict):
                if uncut := next(filter(None, map(_uncut, walk(value))), ""):
                    what = f"keeps {uncut} in '{kept!s:.80}' of parameter {key!s:.80}"
                    raise self._refused(f"{what}: how ranks cut it is unknown")
            elif tensor.shape:
                yield kept, tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are cut."""
        keys = (key for key in self.view.state if key not in self.whole)
        return sum(tensor.nbytes for key in keys for _, tensor in self._shaped(key))

    def of_rank(self, shards: Shards) -> dict[Any, Any]:
        """Return one rank's optimizer, keyed as this one."""

        def piece(name: str, value: object) -> object:
            tensor = plain_tensor(value)
            return shards.record(name, tensor) if tensor is not None and tensor.shape else value

        def of_parameter(key: object, entry: Any) -> object:
            if not isinstance(entry, dict) or key in self.whole:
                return entry
            pieces = ((kept, piece(f"{key!s:.80}.{kept}", value)) for kept, value in entry.items())
            return remade(entry, pieces)

        entries = {key: of_parameter(key, entry) for key, entry in self.view.state.items()}
        new = self.view.nested | {"state": remade(self.view.state, entries.items())}
        return remade(self.view.nested, new.items())


def _uncut(value: object) -> str:
    """Return what a value is in words, if it is a tensor that is more than a number; else `""`."""
    tensor = tensor_of(value)
    if tensor is not None:
        return f"a tensor of shape {list(tensor.shape)}" if tensor.shape else ""
    like = special_tensor(value)
    return f"a tensor that is {like.kind}" if like is not None else ""
