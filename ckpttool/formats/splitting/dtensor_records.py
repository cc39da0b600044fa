"""DTensors as they are pickled: pieces of tensors with the mesh and the place of the rank that holds them.

The form is that of torch 2.15; a test compares it with what FSDP2 writes. Cached hashes are left out, as
they mean nothing in another process.
"""

from __future__ import annotations

import struct

from ...inert_pickle.values import Global, Record
from ...tensors.chunks import Part, assembled
from ...tensors.dtypes import DTYPES
from ...tensors.ref import Computed, Storage, TensorRef, contiguous_stride

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
        view = TensorRef(
            whole.storage,
            whole.dtype,
            shape,
            whole.stride,
            whole.offset + (begin * whole.stride[0] if 0 not in shape else 0),
            conj=whole.conj,
            neg=whole.neg,
        )
        if not view.is_stretch:
            return assembled(name, self.path, view.dtype, shape, [Part((0,) * len(shape), view)])
        kind, old = view.dtype.storage or "UntypedStorage", whole.storage
        storage = Storage(view.data, kind, old.location, byteorder=old.byteorder, origins=(old,))
        return TensorRef.contiguous(storage, view.dtype, shape)

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
        data = Computed(self.path, len(raw), lambda start, n: iter((memoryview(raw)[start : start + n],)))
        ranks = TensorRef.contiguous(Storage(data, "IntStorage"), DTYPES["int32"], (self.ranks,))
        several = self.ranks > 1  # torch drops axes of one
        sizes: dict[str, object] = {
            "shape": (self.ranks,) if several else (),
            "stride": (1,) if several else (),
        }
        line = _object(LAYOUT, "_FlatLayout", sizes)
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
