"""The device mesh of a DTensor, as a pickle describes it.

Source: torch's `distributed/device_mesh.py`, whose attributes changed in 2.9 and again in 2.10.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from ...checkpoint.special_tensors import attributes
from ...errors import Damaged
from ...inert_pickle.values import Record
from ...tensors.chunks import Index
from ...tensors.ref import MAX_AXES, TensorRef, contiguous_stride, is_count
from ...tensors.source import Source

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
