"""The device mesh of a DTensor, as a pickle describes it.

Source: torch's `distributed/device_mesh.py`, whose attributes changed in 2.9 and again in 2.10.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from ...checkpoint.special_tensors import attributes
from ...inert_pickle.values import Record
from ...tensors.ref import MAX_AXES, TensorRef, is_count

# The most ranks of a mesh, and the most intervals that a rank's piece may have along one dimension.
MAX_CHUNKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh as one rank sees it."""

    sizes: tuple[int, ...]  # of each axis
    names: tuple[str, ...]  # of each axis; empty when they have none
    coordinate: tuple[int, ...]  # the rank's place on each axis
    ranks: tuple[int, ...]  # those of this mesh, which may be a part of a larger one
    rank: int  # the one that wrote it
    # how many ranks there were at least: those of the outermost mesh in the file, which need not be the first
    # ranks of the run.
    world_size: int

    def __str__(self) -> str:
        """The axes in words: `fsdp 2 x tp 2`."""
        names = self.names or ("",) * len(self.sizes)
        return " x ".join(f"{name} {size}".strip() for name, size in zip(names, self.sizes, strict=True))


def read_mesh(value: object) -> Mesh | None:
    """Return a pickled DeviceMesh as one rank sees it; None if it is malformed."""
    if not isinstance(value, Record) or not value.type_name.endswith(".DeviceMesh"):
        return None
    found = attributes(value)
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
    outer = attributes(root).get("_flatten_rank_map", flat) if isinstance(root, Record) else flat
    world = max((*flat, *(outer if _is_counts(outer) else ()))) + 1
    return Mesh(sizes, tuple(names), tuple(at), ranks[1], ranks[0], world)


Axis = tuple[tuple[int, ...], tuple[int, ...]]


def _axes(found: Mapping[Any, Any]) -> list[Axis] | None:
    """Return the shape and stride of each axis of a mesh, numbers each: an axis may be several flattened."""
    layout = attributes(found.get("_layout"))
    listed = layout.get("axes")
    if isinstance(listed, tuple | list):
        pairs = [(each.get("shape"), each.get("stride")) for each in map(attributes, listed)]
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
    """Return the rank that wrote a mesh, and all of the mesh, from the list of ranks it is a view of."""
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


Intervals = list[tuple[int, int]]


def share(held: Intervals, ranks: int, at: int, chunks: int) -> Intervals:
    """Return the share of one rank of an index set, as `torch.chunk` cuts it."""
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


def boxes(local: TensorRef, held: Sequence[Intervals]) -> Iterator[tuple[tuple[int, ...], TensorRef]]:
    """Cut a rank's values into boxes of the whole: each is begin and values."""
    if all(len(each) == 1 for each in held):
        yield tuple(start for [(start, _)] in held), local
        return
    places = [list(zip(_starts(each), each, strict=True)) for each in held]
    for box in itertools.product(*places):
        offset = local.offset + sum(here * step for (here, _), step in zip(box, local.stride, strict=True))
        shape = tuple(stop - start for _, (start, stop) in box)
        yield tuple(start for _, (start, _) in box), replace(local, shape=shape, offset=offset)


def _starts(held: Intervals) -> Iterator[int]:
    return itertools.accumulate((stop - start for start, stop in held[:-1]), initial=0)
