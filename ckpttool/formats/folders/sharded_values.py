"""Tensors of torch that lie on several ranks, as the pickle of one describes its piece.

A DTensor has a device mesh and a placement for each axis of it. They are applied axis by axis to what the
last one left; each cuts the rank's index set along one dimension, which is kept here as a list of intervals.
A ShardedTensor states where its pieces begin. Sources: torch's `distributed/tensor/placement_types.py`,
`_dtensor_spec.py`, `distributed/device_mesh.py` (whose attributes changed in 2.9 and again in 2.10) and
`distributed/_shard/sharded_tensor/api.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from ...checkpoint.tensor_likes import shape_of
from ...errors import Damaged, Unsupported
from ...inert_pickle.values import FROM_TYPE, PARAMETER, Global, Record, in_brief, tensor_of
from ...tensors.dtypes import DTYPES, DType
from ...tensors.ref import MAX_AXES, TensorRef, is_count

DTENSOR, SHARDED_TENSOR = "DTensor", "ShardedTensor"

Intervals = list[tuple[int, int]]

MAX_CHUNKS = 1 << 20
"""The most intervals that a rank's piece may have along one dimension."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh as one rank sees it.

    Attributes:
        sizes: of each axis.
        names: of each axis; empty when they have none.
        coordinate: the rank's place on each axis.
        ranks: those of this mesh, which may be a part of a larger one.
        rank: the one that wrote it.
        world_size: the number of ranks of the outermost mesh, as far as the file says.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    coordinate: tuple[int, ...]
    ranks: tuple[int, ...]
    rank: int
    world_size: int

    def __str__(self) -> str:
        """The axes in words: `fsdp 2 x tp 2`."""
        names = self.names or ("",) * len(self.sizes)
        return " x ".join(f"{name} {size}".strip() for name, size in zip(names, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Sharded:
    """What one rank's file has of a tensor that lies on several ranks.

    Attributes:
        kind: `DTensor` or `ShardedTensor`.
        dtype, shape: of the whole.
        rank: who wrote it.
        world_size: how many ranks there were.
        ranks: those that have a part of the tensor, or a replica.
        pieces: begin and values of each box that the file has.
        mesh: the device mesh; None for a ShardedTensor.
    """

    kind: str
    dtype: DType
    shape: tuple[int, ...]
    rank: int
    world_size: int
    ranks: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, ...], TensorRef], ...]
    mesh: Mesh | None = None


class ShardedValues:
    """Reads the sharded tensors of one file.

    Args:
        path: the file, for messages.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._meshes: dict[int, Mesh] = {}

    def read(self, name: str, value: object) -> Sharded | None:
        """Return what a value has of a sharded tensor; None when it is anything else.

        Args:
            name: the value's, for messages.
            value: of the file's tree.

        Raises:
            Damaged: the description is malformed, or does not fit the values.
            Unsupported: a placement that says no place, such as Partial.
        """
        found = _subclass(value)
        if found is None:
            return None
        kind, args, state = found
        shape, dtype = (
            shape_of(args[2]) if len(args) > 2 else None,
            _dtype(args[1]) if len(args) > 1 else None,
        )
        if shape is None or dtype is None:
            raise self._malformed(name)
        if kind == DTENSOR:
            return self._dtensor(name, dtype, shape, _attributes(state))
        return self._sharded_tensor(name, dtype, shape, state)

    def _malformed(self, name: str) -> Damaged:
        return Damaged(self.path, f"'{name[:80]}' is a sharded tensor whose description is malformed")

    # DTensor

    def _dtensor(
        self, name: str, dtype: DType, shape: tuple[int, ...], state: Mapping[object, object]
    ) -> Sharded:
        local, spec = tensor_of(state.get("_local_tensor")), _attributes(state.get("_spec"))
        placements = spec.get("placements")
        if local is None or not isinstance(placements, tuple | list):
            raise self._malformed(name)
        mesh = self._mesh(name, spec.get("mesh"))
        if len(placements) != len(mesh.sizes):
            raise self._malformed(name)
        held: list[Intervals] = [[(0, size)] for size in shape]
        for placement, size, at in zip(placements, mesh.sizes, mesh.coordinate, strict=True):
            cut = self._cut_of(name, placement, len(shape))
            if cut is not None:
                dim, chunks = cut
                held[dim] = _share(held[dim], size, at, chunks)
        sizes = tuple(sum(stop - start for start, stop in each) for each in held)
        if local.shape != sizes:
            what = f"has shape {list(local.shape)}, and its placement says {list(sizes)}"
            raise Damaged(self.path, f"its piece of '{name[:80]}' {what}")
        pieces = tuple(_boxes(local, held)) if local.numel else ()
        return Sharded(DTENSOR, dtype, shape, mesh.rank, mesh.world_size, mesh.ranks, pieces, mesh)

    def _cut_of(self, name: str, placement: object, dims: int) -> tuple[int, int] | None:
        """Return the dimension that a placement cuts, and in how many chunks first; None if it cuts none."""
        kind = placement.type_name.rpartition(".")[2] if isinstance(placement, Record) else ""
        settings = _attributes(placement)
        if kind == "Replicate":
            return None
        if kind not in ("Shard", "_StridedShard"):
            shown = kind or in_brief(placement)[:40]
            raise Unsupported(
                self.path,
                f"'{name[:80]}' is a DTensor placed as {shown}, which does not say where values belong",
                hint="redistribute it before saving: tensor.redistribute(placements=[Replicate(), …])",
            )
        dim, chunks = settings.get("dim"), settings.get("split_factor", 1)
        if not is_count(dim) or dim >= dims or not is_count(chunks) or not 0 < chunks <= MAX_CHUNKS:
            raise self._malformed(name)
        return dim, chunks

    def _mesh(self, name: str, value: object) -> Mesh:
        if id(value) not in self._meshes:
            found = _read_mesh(value)
            if found is None:
                raise Damaged(self.path, f"'{name[:80]}' is a DTensor whose device mesh is malformed")
            self._meshes[id(value)] = found
        return self._meshes[id(value)]

    # ShardedTensor

    def _sharded_tensor(self, name: str, dtype: DType, shape: tuple[int, ...], state: object) -> Sharded:
        if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
            raise self._malformed(name)
        group = _attributes(state[2])
        rank, world = group.get("global_rank"), group.get("global_world_size")
        listed = _attributes(state[1]).get("shards_metadata")
        if not is_count(rank) or not is_count(world) or not isinstance(listed, list):
            raise self._malformed(name)
        pieces = tuple(self._shard(name, _attributes(shard)) for shard in state[0])
        return Sharded(SHARDED_TENSOR, dtype, shape, rank, world, self._owners(name, listed), pieces)

    def _shard(self, name: str, shard: Mapping[object, object]) -> tuple[tuple[int, ...], TensorRef]:
        place = _attributes(shard.get("metadata"))
        tensor, begin, size = tensor_of(shard.get("tensor")), *map(shape_of, map(place.get, PLACE))
        if tensor is None or begin is None or size is None:
            raise self._malformed(name)
        if tensor.shape != size:
            what = f"has shape {list(tensor.shape)}, and its metadata says {list(size)}"
            raise Damaged(self.path, f"its piece of '{name[:80]}' {what}")
        return begin, tensor

    def _owners(self, name: str, listed: Sequence[object]) -> tuple[int, ...]:
        ranks = []
        for each in map(_attributes, listed):
            device = _attributes(each.get("placement"))
            if not is_count(rank := device.get("_rank")):
                raise self._malformed(name)
            ranks.append(rank)
        return tuple(ranks)


PLACE = ("shard_offsets", "shard_sizes")


def is_sharded(value: object) -> bool:
    """Return whether a value is a DTensor or ShardedTensor, of which a file has one rank's piece."""
    return _subclass(value) is not None


def _subclass(value: object) -> tuple[str, Sequence[object], object] | None:
    """Return the kind of a sharded tensor, the arguments that made it, its state; None for other values."""
    if (
        isinstance(value, Record)
        and value.callable in PARAMETER
        and isinstance(value.args, tuple)
        and value.args
    ):
        value = value.args[0]
    if not isinstance(value, Record) or value.callable not in FROM_TYPE or not isinstance(value.args, tuple):
        return None
    if len(value.args) != 4:
        return None
    _, kind, args, state = value.args
    if not isinstance(kind, Global) or not kind.module.startswith("torch.distributed"):
        return None
    if kind.name not in (DTENSOR, SHARDED_TENSOR) or not isinstance(args, tuple):
        return None
    return kind.name, args, state


def _share(held: Intervals, ranks: int, at: int, chunks: int) -> Intervals:
    """Return the share of one rank of an index set, as `torch.chunk` cuts it.

    Args:
        held: the intervals of the set, in their order.
        ranks: how many ranks share it.
        at: this rank's number among them.
        chunks: how many chunks the set is cut into first; each is then shared by itself.
    """
    taken: Intervals = []
    for first, last in _chunks(sum(stop - start for start, stop in held), chunks):
        step = -(-(last - first) // ranks)
        start = min(first + at * step, last)
        taken += _between(held, start, min(start + step, last))
    return taken or [(0, 0)]


def _chunks(size: int, count: int) -> Iterator[tuple[int, int]]:
    step = -(-size // count)
    return ((start, min(start + step, size)) for start in range(0, size, step or 1))


def _between(held: Intervals, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the intervals of the numbers from `start` to `stop` of an index set."""
    before = 0
    for first, last in held:
        low, high = max(start - before, 0) + first, min(stop - before, last - first) + first
        if low < high:
            yield low, high
        before += last - first


def _boxes(local: TensorRef, held: Sequence[Intervals]) -> Iterator[tuple[tuple[int, ...], TensorRef]]:
    """Cut a rank's values into boxes of the whole: each is begin and values."""
    places = [list(zip(_starts(each), each, strict=True)) for each in held]
    for box in itertools.product(*places):
        offset = local.offset + sum(here * step for (here, _), step in zip(box, local.stride, strict=True))
        shape = tuple(stop - start for _, (start, stop) in box)
        yield tuple(start for _, (start, _) in box), replace(local, shape=shape, offset=offset)


def _starts(held: Intervals) -> Iterator[int]:
    return itertools.accumulate((stop - start for start, stop in held[:-1]), initial=0)


def _read_mesh(value: object) -> Mesh | None:
    """Read a DeviceMesh; None if it is malformed."""
    if not isinstance(value, Record) or not value.type_name.endswith(".DeviceMesh"):
        return None
    found = _attributes(value)
    axes, is_whole = _axes(found), "_flatten_rank_map" not in found
    flat = found.get("_flatten_rank_map", found.get("_flatten_mesh_list"))
    at = found.get("_coordinate_on_dim")
    names = found.get("_mesh_dim_names", found.get("mesh_dim_names")) or ()
    if axes is None or not _is_counts(flat) or not _is_counts(at) or not isinstance(names, tuple | list):
        return None
    sizes = tuple(math.prod(shape) for shape, _ in axes)
    if len(at) != len(sizes) or any(i >= n for i, n in zip(at, sizes, strict=True)):
        return None
    if names and (len(names) != len(sizes) or not all(isinstance(name, str) for name in names)):
        return None
    if math.prod(sizes) > MAX_CHUNKS or (is_whole and math.prod(sizes) != len(flat)):
        return None
    ranks = _ranks(axes, tuple(at), tuple(flat), found.get("_rank"), is_whole=is_whole)
    if ranks is None:
        return None
    root = found.get("_root_mesh")
    outer = _attributes(root).get("_flatten_rank_map", flat) if isinstance(root, Record) else flat
    world = len(outer) if isinstance(outer, tuple | list) else len(flat)
    return Mesh(sizes, tuple(names), tuple(at), ranks[1], ranks[0], world)


Axis = tuple[tuple[int, ...], tuple[int, ...]]


def _axes(found: Mapping[Any, Any]) -> list[Axis] | None:
    """Return the shape and stride of each axis of a mesh, numbers each: an axis may be several flattened."""
    layout = _attributes(found.get("_layout"))
    listed = layout.get("axes")
    if isinstance(listed, tuple | list):
        pairs = [(each.get("shape"), each.get("stride")) for each in map(_attributes, listed)]
    elif isinstance(found.get("mesh"), TensorRef):
        mesh = found["mesh"]
        steps = [math.prod(mesh.shape[d + 1 :]) for d in range(len(mesh.shape))]
        pairs = [(size, step) for size, step in zip(mesh.shape, steps, strict=True)]
    elif isinstance(layout.get("shape"), tuple) and isinstance(layout.get("stride"), tuple):
        pairs = list(zip(layout["shape"], layout["stride"], strict=False))
    else:
        return None
    axes = [(_numbers(shape), _numbers(stride)) for shape, stride in pairs]
    checked = [(s, t) for s, t in axes if s is not None and t is not None and len(s) == len(t) and 0 not in s]
    return checked if len(checked) == len(pairs) and len(pairs) <= MAX_AXES else None


def _ranks(
    axes: Sequence[Axis], at: tuple[int, ...], flat: tuple[int, ...], rank: object, *, is_whole: bool
) -> tuple[int, tuple[int, ...]] | None:
    """Return the rank that wrote a mesh, and all of the mesh, from the list of ranks it is a view of.

    Args:
        axes: of the mesh.
        at: the coordinate of the rank.
        flat: the ranks of the mesh itself, or of the outermost one.
        rank: the rank as the file says; older ones do not.
        is_whole: `flat` lists the ranks of this mesh.
    """
    here = sum(map(_step, axes, at))
    if is_whole:
        return (flat[here], flat) if here < len(flat) else None
    if not is_count(rank) or rank not in flat:
        return None
    origin = flat.index(rank) - here
    offsets = itertools.product(*([_step(axis, i) for i in range(math.prod(axis[0]))] for axis in axes))
    places = [origin + sum(each) for each in offsets]
    return (rank, tuple(flat[p] for p in places)) if all(0 <= p < len(flat) for p in places) else None


def _step(axis: Axis, index: int) -> int:
    """Return how far an index along an axis leads in the list of ranks."""
    step = 0
    for size, stride in zip(reversed(axis[0]), reversed(axis[1]), strict=True):
        index, i = divmod(index, size)
        step += i * stride
    return step


def _numbers(value: object) -> tuple[int, ...] | None:
    if is_count(value):
        return (value,)
    return tuple(value) if _is_counts(value) else None


def _is_counts(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, tuple | list) and all(map(is_count, value))


def _attributes(value: object) -> Mapping[Any, Any]:
    """Return an object's state as a dict: a dict, the second of (dict, slots), or nothing."""
    state = value.state if isinstance(value, Record) else value
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1]
    return state if isinstance(state, dict) else {}


def _dtype(value: object) -> DType | None:
    return DTYPES.get(value.name) if isinstance(value, Global) and value.module == "torch" else None
