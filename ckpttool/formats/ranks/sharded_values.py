"""Tensors of torch that lie on several ranks, as the pickle of one describes its piece.

A DTensor has a device mesh and a placement for each axis of it. They are applied axis by axis, or in the
order that `shard_order` states, to what the last one left; each cuts the rank's index set along one
dimension, which is kept here as a list of intervals.
A ShardedTensor states where its pieces begin. Sources: torch's `distributed/tensor/placement_types.py`,
`_dtensor_spec.py` and `distributed/_shard/sharded_tensor/api.py`.

A pickled DTensor takes 2.6 kB, a `ShardedValue` with its piece 0.6 kB: `with_pieces` puts the one in the
other's place before the next rank's file is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import Entry, contents, dotted
from ...checkpoint.special_tensors import attributes, shape_of, torch_dtype
from ...errors import Damaged, Unsupported
from ...inert_pickle.values import FROM_TYPE, PARAMETER, Global, Record, in_brief, tensor_of
from ...tensors.dtypes import DType
from ...tensors.ref import MAX_AXES, TensorRef, is_count
from ...tensors.source import Source
from .device_meshes import MAX_CHUNKS, BadMesh, Intervals, Mesh, WorkBound, boxes, read_mesh, share

DTENSOR, SHARDED_TENSOR = "DTensor", "ShardedTensor"


@dataclass(frozen=True, slots=True)
class ShardedValue:
    """What one rank's file has of a tensor that lies on several ranks."""

    kind: str  # `DTensor` or `ShardedTensor`
    # of the whole.
    dtype: DType
    shape: tuple[int, ...]
    rank: int  # who wrote it
    world_size: int  # how many ranks there were
    ranks: frozenset[int]  # those that have a part of the tensor, or a replica
    pieces: tuple[tuple[tuple[int, ...], TensorRef], ...]  # begin and values of each box that the file has
    mesh: Mesh | None = None  # the device mesh; None for a ShardedTensor


class ShardedValues:
    """Reads the sharded tensors of one file."""

    def __init__(self, source: Source) -> None:
        self.path, self._work, self._name = source.path, WorkBound(source), ""
        self._meshes: dict[int, Mesh] = {}
        self._numbers: dict[tuple[int, ...], tuple[int, ...]] = {}

    def read(self, name: str, value: object) -> ShardedValue | None:
        """Return what a value has of a sharded tensor; None when it is anything else."""
        subclass = _subclass(value)
        if subclass is None:
            return None
        self._name = name[:80]
        kind, args, state = subclass
        dtype, shape = (torch_dtype(args[1]), shape_of(args[2])) if len(args) > 2 else (None, None)
        if shape is None or dtype is None:
            raise self._malformed()
        shape = self._once(shape)
        if kind == DTENSOR:
            return self._dtensor(dtype, shape, attributes(state))
        return self._sharded_tensor(dtype, shape, state)

    def _once(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return one object for equal tuples: many tensors have the same shape, cut in the same way."""
        return self._numbers.setdefault(numbers, numbers)

    def _malformed(self) -> Damaged:
        return Damaged(self.path, f"'{self._name}' is a sharded tensor whose description is malformed")

    def _require_shape(self, tensor: TensorRef, shape: tuple[int, ...], said_by: str) -> None:
        if tensor.shape != shape:
            what = f"has shape {list(tensor.shape)}, and its {said_by} says {list(shape)}"
            raise Damaged(self.path, f"its piece of '{self._name}' {what}")

    # DTensor

    def _dtensor(self, dtype: DType, shape: tuple[int, ...], state: Mapping[object, object]) -> ShardedValue:
        local, spec = tensor_of(state.get("_local_tensor")), attributes(state.get("_spec"))
        placements = spec.get("placements")
        if local is None or not isinstance(placements, tuple | list):
            raise self._malformed()
        mesh = self._mesh(spec.get("mesh"))
        if len(placements) != len(mesh.sizes):
            raise self._malformed()
        index_sets: list[Intervals] = [[(0, size)] for size in shape]
        for dim, cuts in self._cuts(placements, len(shape), spec.get("shard_order")).items():
            for axis, chunks in cuts.items():
                ranks, at = mesh.sizes[axis], mesh.coordinate[axis]
                index_sets[dim] = share(index_sets[dim], ranks, at, chunks, self._work)
        sizes = tuple(sum(stop - start for start, stop in intervals) for intervals in index_sets)
        self._require_shape(local, sizes, "placement")
        places = boxes(local, index_sets, self._work) if local.numel else ()
        pieces = tuple((self._once(begin), piece) for begin, piece in places)
        return ShardedValue(DTENSOR, dtype, shape, mesh.rank, mesh.world_size, mesh.ranks, pieces, mesh)

    def _cuts(self, placements: Sequence[object], dims: int, stated: object) -> dict[int, dict[int, int]]:
        """Return each dimension that is cut, with axis of the mesh -> chunks, in the order of cutting."""
        cuts_of: dict[int, dict[int, int]] = {}
        for axis, placement in enumerate(placements):
            if cut := self._cut_of(placement, dims):
                cuts_of.setdefault(cut[0], {})[axis] = cut[1]
        stated = stated if isinstance(stated, tuple | list) else ()
        if len(stated) > dims:
            raise self._malformed()
        order = dict(map(_order_of, stated))
        for dim, cuts in cuts_of.items():
            is_strided = any(chunks > 1 for chunks in cuts.values())  # which states an order by itself
            known = len(cuts) == 1 or is_strided or not order
            axes = [*cuts] if known else order.get(dim, [])
            if sorted(axes) != [*cuts] or (is_strided and order.get(dim, axes) != axes):
                raise self._malformed()
            cuts_of[dim] = {axis: cuts[axis] for axis in axes}
        return cuts_of

    def _cut_of(self, placement: object, dims: int) -> tuple[int, int] | None:
        """Return the dimension that a placement cuts, and in how many chunks first; None if it cuts none."""
        kind = placement.type_name.rpartition(".")[2] if isinstance(placement, Record) else ""
        settings = attributes(placement)
        if kind == "Replicate":
            return None
        if kind not in ("Shard", "_StridedShard"):
            shown = kind or in_brief(placement)[:40]
            what = f"is a DTensor placed as {shown}, which does not say where values belong"
            hint = "before saving: tensor.redistribute(placements=[Replicate()] * mesh.ndim)"
            raise Unsupported(self.path, f"'{self._name}' {what}", hint=hint)
        dim, chunks = settings.get("dim"), settings.get("split_factor", 1)
        if not is_count(dim) or dim >= dims or not is_count(chunks) or not 0 < chunks <= MAX_CHUNKS:
            raise self._malformed()
        return dim, chunks

    def _mesh(self, value: object) -> Mesh:
        if id(value) not in self._meshes:
            try:
                self._meshes[id(value)] = read_mesh(value, self._work)
            except BadMesh as fault:
                raise Damaged(self.path, f"'{self._name}' is a DTensor whose device mesh {fault}") from None
        return self._meshes[id(value)]

    # ShardedTensor

    def _sharded_tensor(self, dtype: DType, shape: tuple[int, ...], state: object) -> ShardedValue:
        match state:
            case (list() as shards, metadata, process_group, *_):
                group = attributes(process_group)
                listed = attributes(metadata).get("shards_metadata")
            case _:
                raise self._malformed()
        rank, world = group.get("global_rank"), group.get("global_world_size")
        if not is_count(rank) or not is_count(world) or not isinstance(listed, list):
            raise self._malformed()
        self._work.spend(len(shards) + len(listed))
        pieces = tuple(self._shard(attributes(shard)) for shard in shards)
        placements = (attributes(attributes(shard).get("placement")) for shard in listed)
        owners = [owner for placement in placements if is_count(owner := placement.get("_rank"))]
        if len(owners) < len(listed):
            raise self._malformed()
        return ShardedValue(SHARDED_TENSOR, dtype, shape, rank, world, frozenset(owners), pieces)

    def _shard(self, shard: Mapping[object, object]) -> tuple[tuple[int, ...], TensorRef]:
        place = attributes(shard.get("metadata"))
        tensor, begin = tensor_of(shard.get("tensor")), shape_of(place.get("shard_offsets"))
        size = shape_of(place.get("shard_sizes"))
        if tensor is None or begin is None or size is None:
            raise self._malformed()
        self._require_shape(tensor, size, "metadata")
        return begin, tensor


def _order_of(entry: object) -> tuple[int | None, list[int]]:
    """Return a dimension, and the axes of the mesh that cut it in their order, of a `ShardOrderEntry`."""
    match entry.args if isinstance(entry, Record) else None:
        case (dim, tuple() as axes) if len(axes) <= MAX_AXES:
            return (dim if is_count(dim) else None), [axis if is_count(axis) else -1 for axis in axes]
    return None, []


def unless_sharded(value: object) -> Iterable[Entry] | None:
    """Return the entries of a container as `contents`; None for a sharded tensor."""
    return None if isinstance(value, ShardedValue) or _subclass(value) else contents(value)


def with_pieces(file: Checkpoint) -> Checkpoint:
    """Put what a file has of each sharded tensor, a `ShardedValue`, in the place of the tensor."""
    reader, names = ShardedValues(file.source), dict[int, str]()
    for path, value in file.named(unless_sharded):
        if _subclass(value):
            names.setdefault(id(value), dotted(path))
    if not names:
        return file
    return file.rebuilt(lambda value: reader.read(names.get(id(value), ""), value) or value)


def _subclass(value: object) -> tuple[str, Sequence[object], object] | None:
    """Return the kind of a sharded tensor, the arguments that made it, its state; None for other values."""
    if isinstance(value, Record) and value.callable in PARAMETER and isinstance(value.args, tuple):
        value = value.args[0] if value.args else None
    if isinstance(value, Record) and value.callable in FROM_TYPE:
        match value.args:
            case (_, Global(module, "DTensor" | "ShardedTensor" as kind), tuple() as args, state):
                return (kind, args, state) if module.startswith("torch.distributed") else None
    return None
