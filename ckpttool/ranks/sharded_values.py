"""The device mesh of a DTensor, as a pickle describes it.

Source: torch's `distributed/device_mesh.py`, whose attributes changed in 2.9 and again in 2.10.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.dotted_names import Entry, contents, dotted
from ..core.checkpoint.special_tensors import attributes, shape_of, torch_dtype
from ..core.inert_pickle.values import FROM_TYPE, PARAMETER, Global, Record, in_brief, tensor_of
from ..core.tensors.ref import MAX_AXES, DType, Source, TensorRef, contiguous_stride, is_count
from ..core.tensors.values import Index
from ..errors import Damaged, Unsupported

# The most ranks of a mesh, and the most intervals that a rank's piece may have along one dimension.
MAX_CHUNKS = 1 << 20

# Types of devices, as torch calls them.
DEVICE = re.compile(r"[a-z]{1,20}")


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh as one rank sees it."""

    sizes: tuple[int, ...]  # of each axis
    names: tuple[str, ...]  # of each axis; empty when they have none
    coordinate: tuple[int, ...]  # the rank's place on each axis
    ranks: frozenset[int]  # those of this mesh, which may be a part of a larger one
    rank: int  # the one that wrote it
    # how many ranks there were at least: those of the outermost mesh in the file, which need not be the first
    # ranks of the run.
    world_size: int
    device: str  # the type of the ranks' devices; empty where the file does not say it

    def __str__(self) -> str:
        """The axes in words: `fsdp 2 x tp 2`."""
        names = self.names or ("",) * len(self.sizes)
        return " x ".join(f"{name} {size}".strip() for name, size in zip(names, self.sizes, strict=True))


class WorkBound:
    """Bounds the steps that a file's descriptions cost by its bytes: their fields multiply, and repeat."""

    def __init__(self, source: Source) -> None:
        self.path, self._left = source.path, (1 << 20) + source.size

    def spend(self, steps: int) -> None:
        """Count steps before they are made; Damaged where the file can't mean as many."""
        self._left -= steps
        if self._left < 0:
            raise Damaged(self.path, "describes its tensors by more pieces than its bytes can hold")


class BadMesh(Exception):
    """The description of a mesh is malformed; the message says how."""


def read_mesh(value: object, work: WorkBound) -> Mesh:
    """Return a pickled DeviceMesh as one rank sees it."""
    if not isinstance(value, Record) or not value.type_name.endswith(".DeviceMesh"):
        raise BadMesh("is none")
    fields = attributes(value)
    axes, is_view = _axes(fields), "_flatten_rank_map" in fields
    root = fields.get("_root_mesh")
    outer = attributes(root).get("_flatten_rank_map") if isinstance(root, Record) else None
    flat = fields.get("_flatten_rank_map", fields.get("_flatten_mesh_list"))
    work.spend(sum(len(ranks) for ranks in (flat, outer) if isinstance(ranks, tuple | list)))
    listed = _counts(flat, "list of ranks")
    coordinate = _counts(fields.get("_coordinate_on_dim"), "coordinate")
    sizes = tuple(math.prod(shape) for shape, _ in axes)
    if len(coordinate) != len(sizes) or any(i >= n for i, n in zip(coordinate, sizes, strict=True)):
        raise BadMesh("has a coordinate outside its axes")
    if len({*listed}) < len(listed):
        raise BadMesh("lists a rank twice")
    count = math.prod(sizes)  # each rank is listed, so that the list bounds every loop
    if count > min(MAX_CHUNKS, len(listed)) or (count < len(listed) and not is_view):
        raise BadMesh(f"has {count} places for {len(listed)} ranks")
    ranks = listed
    if is_view:
        rank, ranks = _viewed(axes, coordinate, listed, fields.get("_rank"))
    elif (index := sum(map(_step, axes, coordinate))) < len(listed):
        rank = listed[index]
    else:
        raise BadMesh("has a coordinate outside its ranks")
    device = fields.get("_device_type", fields.get("device_type"))
    device = device if isinstance(device, str) and DEVICE.fullmatch(device) else ""
    world = max((*listed, *(outer if _is_counts(outer) else ()))) + 1
    return Mesh(sizes, _axis_names(fields, len(sizes)), coordinate, frozenset(ranks), rank, world, device)


def _axis_names(fields: Mapping[Any, Any], axes: int) -> tuple[str, ...]:
    names = fields.get("_mesh_dim_names", fields.get("mesh_dim_names")) or ()
    is_text = isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)
    if not is_text or (names and len(names) != axes):
        raise BadMesh("has other names than axes")
    return tuple(names)


# The shape and stride of an axis: numbers each, as an axis may be several flattened.
Axis = tuple[Index, Index]


def _axes(fields: Mapping[Any, Any]) -> list[Axis]:
    layout = attributes(fields.get("_layout"))
    listed = layout.get("axes")
    pairs: list[tuple[object, object]]
    shapes, strides, mesh = layout.get("shape"), layout.get("stride"), fields.get("mesh")
    if isinstance(listed, tuple | list):  # since torch 2.10
        pairs = [(axis.get("shape"), axis.get("stride")) for axis in map(attributes, listed)]
    elif isinstance(mesh, TensorRef):  # before 2.9
        pairs = [*zip(mesh.shape, contiguous_stride(mesh.shape), strict=True)]
    elif isinstance(shapes, tuple) and isinstance(strides, tuple):
        pairs = [*zip(shapes, strides, strict=False)]
    else:
        raise BadMesh("has no axes")
    if len(pairs) > MAX_AXES:
        raise BadMesh(f"has {len(pairs)} axes")
    if any(len(part) > MAX_AXES for pair in pairs for part in pair if isinstance(part, tuple | list)):
        raise BadMesh("has an axis of too many parts")
    axes = [(_counts(shape, "shape"), _counts(stride, "stride")) for shape, stride in pairs]
    if any(len(shape) != len(stride) or 0 in shape for shape, stride in axes):
        raise BadMesh("has an axis without a size or a stride")
    return axes


def _viewed(axes: Sequence[Axis], coordinate: Index, listed: Index, rank: object) -> tuple[int, Index]:
    """Return the rank that wrote a mesh, and all of the mesh, which is a view of a list of ranks."""
    if not is_count(rank) or rank not in listed:
        raise BadMesh("does not list the rank that wrote it")
    origin = listed.index(rank) - sum(map(_step, axes, coordinate))
    steps = ([_step(axis, i) for i in range(math.prod(axis[0]))] for axis in axes)
    places = [origin + sum(offsets) for offsets in itertools.product(*steps)]
    if min(places) < 0 or max(places) >= len(listed) or len({*places}) < len(places):
        raise BadMesh("has strides that lead outside its ranks, or to one of them twice")
    return rank, tuple(listed[place] for place in places)


def _step(axis: Axis, index: int) -> int:
    """Return how far an index along an axis leads in the list of ranks."""
    step = 0
    for size, stride in zip(reversed(axis[0]), reversed(axis[1]), strict=True):
        index, i = divmod(index, size)
        step += i * stride
    return step


def _counts(value: object, what: str) -> tuple[int, ...]:
    """Return a number or a list of them as a tuple."""
    if is_count(value):
        return (value,)
    if not _is_counts(value):
        raise BadMesh(f"has a malformed {what}")
    return tuple(value)


def _is_counts(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, tuple | list) and all(map(is_count, value))


Intervals = list[tuple[int, int]]


def share(intervals: Intervals, ranks: int, at: int, chunks: int, work: WorkBound) -> Intervals:
    """Return the share of one rank of an index set, as `torch.chunk` cuts it."""
    size = sum(stop - start for start, stop in intervals)
    work.spend(min(size, chunks) * len(intervals))
    taken: Intervals = []
    length = -(-size // chunks)
    for first in range(0, size, length or 1):
        last = min(first + length, size)
        step = -(-(last - first) // ranks)
        start = min(first + at * step, last)
        taken += _between(intervals, start, min(start + step, last))
    return taken or [(0, 0)]


def _between(intervals: Intervals, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the intervals of the numbers from `start` to `stop` of an index set."""
    before = 0
    for first, last in intervals:
        low, high = max(start - before, 0) + first, min(stop - before, last - first) + first
        if low < high:
            yield low, high
        before += last - first


def boxes(
    local: TensorRef, index_sets: Sequence[Intervals], work: WorkBound
) -> Iterator[tuple[Index, TensorRef]]:
    """Cut a rank's values into boxes of the whole: each is begin and values."""
    work.spend(64 * (math.prod(map(len, index_sets)) - 1))  # a box takes about 300 bytes of memory
    if all(len(intervals) == 1 for intervals in index_sets):
        yield tuple(start for [(start, _)] in index_sets), local
        return
    sizes = ((stop - start for start, stop in intervals[:-1]) for intervals in index_sets)
    starts = (itertools.accumulate(lengths, initial=0) for lengths in sizes)
    places = [[*zip(at, intervals, strict=True)] for at, intervals in zip(starts, index_sets, strict=True)]
    for box in itertools.product(*places):
        at = sum(start * step for (start, _), step in zip(box, local.stride, strict=True))
        shape = tuple(stop - start for _, (start, stop) in box)
        yield tuple(start for _, (start, _) in box), replace(local, shape=shape, offset=local.offset + at)


# ---- Tensors of torch that lie on several ranks, as the pickle of one describes its piece.
#
# A DTensor has a device mesh and a placement for each axis of it. They are applied axis by axis, or in
# the order that `shard_order` states, to what the last one left; each cuts the rank's index set along one
# dimension, which is kept here as a list of intervals. A ShardedTensor states where its pieces begin.
# Sources: torch's `distributed/tensor/placement_types.py`, `_dtensor_spec.py` and
# `distributed/_shard/sharded_tensor/api.py`.
#
# A pickled DTensor takes 2.6 kB, a `ShardedValue` with its piece 0.6 kB: `with_pieces` puts the one in
# the other's place before the next rank's file is read.


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


# How an axis of the mesh places a tensor: the name of the placement's class, and its settings.
Placement = tuple[str, Mapping[Any, Any]]


def _placement(value: object) -> Placement:
    """Return a pickled placement; one that is none has no name that is known."""
    kind = value.type_name.rpartition(".")[2] if isinstance(value, Record) else f"{in_brief(value)[:40]}?"
    return kind, attributes(value)


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
            raise self.malformed()
        shape = self._once(shape)
        if kind == DTENSOR:
            return self._dtensor(dtype, shape, attributes(state))
        return self._sharded_tensor(dtype, shape, state)

    def _once(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return one object for equal tuples: many tensors have the same shape, cut in the same way."""
        return self._numbers.setdefault(numbers, numbers)

    def malformed(self) -> Damaged:
        """Return the error for the tensor that is being read."""
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
            raise self.malformed()
        placed = [_placement(placement) for placement in placements]
        return self.placed(dtype, shape, local, self._mesh(spec.get("mesh")), placed, spec.get("shard_order"))

    def placed(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        local: TensorRef,
        mesh: Mesh,
        placements: Sequence[Placement],
        order: object = None,
        *,
        name: str = "",
    ) -> ShardedValue:
        """Return a rank's values and where they lie in the whole, by a placement for each axis of a mesh."""
        self._name = name[:80] or self._name
        if len(placements) != len(mesh.sizes):
            raise self.malformed()
        index_sets: list[Intervals] = [[(0, size)] for size in shape]
        for dim, cuts in self._cuts(placements, len(shape), order).items():
            for axis, chunks in cuts.items():
                ranks, at = mesh.sizes[axis], mesh.coordinate[axis]
                index_sets[dim] = share(index_sets[dim], ranks, at, chunks, self._work)
        sizes = tuple(sum(stop - start for start, stop in intervals) for intervals in index_sets)
        self._require_shape(local, sizes, "placement")
        places = boxes(local, index_sets, self._work) if local.numel else ()
        pieces = tuple((self._once(begin), piece) for begin, piece in places)
        return ShardedValue(DTENSOR, dtype, shape, mesh.rank, mesh.world_size, mesh.ranks, pieces, mesh)

    def _cuts(self, placements: Sequence[Placement], dims: int, stated: object) -> dict[int, dict[int, int]]:
        """Return each dimension that is cut, with axis of the mesh -> chunks, in the order of cutting."""
        cuts_of: dict[int, dict[int, int]] = {}
        for axis, placement in enumerate(placements):
            if cut := self._cut_of(placement, dims):
                cuts_of.setdefault(cut[0], {})[axis] = cut[1]
        stated = stated if isinstance(stated, tuple | list) else ()
        if len(stated) > dims:
            raise self.malformed()
        order = dict(map(_order_of, stated))
        for dim, cuts in cuts_of.items():
            is_strided = any(chunks > 1 for chunks in cuts.values())  # which states an order by itself
            known = len(cuts) == 1 or is_strided or not order
            axes = [*cuts] if known else order.get(dim, [])
            if sorted(axes) != [*cuts] or (is_strided and order.get(dim, axes) != axes):
                raise self.malformed()
            cuts_of[dim] = {axis: cuts[axis] for axis in axes}
        return cuts_of

    def _cut_of(self, placement: Placement, dims: int) -> tuple[int, int] | None:
        """Return the dimension that a placement cuts, and in how many chunks first; None if it cuts none."""
        kind, settings = placement
        if kind == "Replicate":
            return None
        if kind not in ("Shard", "_StridedShard"):
            what = f"is a DTensor placed as {kind}, which does not say where values belong"
            hint = "before saving: tensor.redistribute(placements=[Replicate()] * mesh.ndim)"
            raise Unsupported(self.path, f"'{self._name}' {what}", hint=hint)
        dim, chunks = settings.get("dim"), settings.get("split_factor", 1)
        if not is_count(dim) or dim >= dims or not is_count(chunks) or not 0 < chunks <= MAX_CHUNKS:
            raise self.malformed()
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
                raise self.malformed()
        rank, world = group.get("global_rank"), group.get("global_world_size")
        if not is_count(rank) or not is_count(world) or not isinstance(listed, list):
            raise self.malformed()
        self._work.spend(len(shards) + len(listed))
        pieces = tuple(self._shard(attributes(shard)) for shard in shards)
        placements = (attributes(attributes(shard).get("placement")) for shard in listed)
        owners = [owner for placement in placements if is_count(owner := placement.get("_rank"))]
        if len(owners) < len(listed):
            raise self.malformed()
        return ShardedValue(SHARDED_TENSOR, dtype, shape, rank, world, frozenset(owners), pieces)

    def _shard(self, shard: Mapping[object, object]) -> tuple[tuple[int, ...], TensorRef]:
        place = attributes(shard.get("metadata"))
        tensor, begin = tensor_of(shard.get("tensor")), shape_of(place.get("shard_offsets"))
        size = shape_of(place.get("shard_sizes"))
        if tensor is None or begin is None or size is None:
            raise self.malformed()
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
