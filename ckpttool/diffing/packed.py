"""The packed tensors of a state, each as the plain tensor that it stands for.

The room `numbers` says which tensors are packed; without it, codes and scales are tensors like others. Those
of a GGUF are made plain by its reader.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.state import State
from ..core.lazy import NDArray, np
from ..core.tensors.cast import Caster
from ..core.tensors.ref import DTYPES, Computed, DType, Storage, TensorRef
from ..rooms import find
from .distances import in_words

KEPT = 4  # boxes that are kept of codes, and of scales: as many as a stretch is cut into


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A packed tensor.

    Attributes:
        shape: of the plain tensor.
        words: what it is, for people.
        made: makes the plain tensor in a type, and its edges: for each element where the last step of its
            code ends, if it is an outermost one, else NaN; None where the codes are not known.
        storages: where codes and scales lie.
        form: how it is packed; in one form equal parts are equal numbers.
        parts: codes, scales and the like by name; empty where they are no plain tensors.
    """

    shape: tuple[int, ...]
    words: str
    made: Callable[[DType], tuple[TensorRef, TensorRef | None]]
    storages: tuple[Storage, ...]
    form: object
    parts: Mapping[str, TensorRef]


Stored = TensorRef | PackedTensor


def words_of(tensor: Stored) -> str:
    """Return what a tensor is, in a few words."""
    return tensor.words if isinstance(tensor, PackedTensor) else in_words(tensor)


class Unpacked(NamedTuple):
    """A state in which each packed tensor has the name of its plain one."""

    tensors: Mapping[str, Stored]
    schemes: Mapping[str, int] = {}  # how tensors are packed, and how many are
    parts: frozenset[str] = frozenset()  # names in the state that are none of `tensors`
    extra: tuple[str, ...] = ()  # scales of activations and the like, which a plain model has not
    unclear: tuple[str, ...] = ()  # why some stay as they are stored


def unpacked(checkpoint: Checkpoint, state: State) -> Unpacked:
    """Return a state with its packed tensors, as far as they are known."""
    if checkpoint.packed:
        return Unpacked({name: _of_gguf(tensor) for name, tensor in state.tensors.items()}, checkpoint.packed)
    numbers: Any = find("numbers.recognise")
    found = numbers.recognise(checkpoint, state) if numbers else None
    if found is None or not (found.groups or found.faults):
        return Unpacked(state.tensors)
    groups = [each for each in found.groups if each.name in each.parts or each.name not in state.container]
    leads, gone = {each.parts[0]: each for each in groups}, {part for each in groups for part in each.parts}
    form = dict(checkpoint.metadata), found.settings.section
    tensors: dict[str, Stored] = {}
    for name in map(str, state.container):
        if (group := leads.get(name)) is not None:
            tensors[group.name] = _of_group(group, state, form)
        elif name in state.tensors and name not in gone:
            tensors[name] = state.tensors[name]
    schemes = Counter(each.scheme for each in groups)
    return Unpacked(tensors, schemes, frozenset(gone), found.unused, tuple(map(str, found.faults)))


def _of_gguf(tensor: TensorRef) -> Stored:
    if not isinstance(tensor.storage.data, Computed):
        return tensor
    origins, words = tensor.storage.origins, in_words(tensor)
    raws = (TensorRef.contiguous(raw, DTYPES["uint8"], (raw.nbytes,)) for raw in origins)
    parts = {str(number): raw for number, raw in enumerate(raws)}
    return PackedTensor(tensor.shape, words, lambda to: (Caster(to).cast(tensor), None), origins, "", parts)


def _of_group(group: Any, state: State, settings: object) -> PackedTensor:
    parts = {name: state.tensors[name] for name in group.parts if name in state.tensors}
    form, whole = (group.scheme, settings), parts if len(parts) == len(group.parts) else {}
    words, storages = f"{group.scheme} {list(group.shape)}", group.formula.storages
    return PackedTensor(group.shape, words, lambda to: _made(group, to), storages, form, whole)


def _made(group: Any, to: DType) -> tuple[TensorRef, TensorRef | None]:
    """Return the plain tensor of a group, and its edges; what both are made of is read once."""

    def of_grid(grid: Any) -> Any:
        return replace(grid, field=_kept(grid.field)) if hasattr(grid, "field") else grid

    old = group.formula
    scales = tuple(map(of_grid, old.scales))
    formula = replace(old, codes=_kept(old.codes), scales=scales, zero=of_grid(old.zero))
    levels = _Edges(old.levels, old.codes.codes)
    edges = replace(formula, levels=levels).tensor(group.shape) if old.codes.codes else None
    return replace(group, formula=formula).tensor(Caster(to)), edges


def _kept(field: Any) -> Any:
    """Return a field that takes a box out of those that were read last, where it lies in one."""
    boxes: deque[tuple[Any, Any, NDArray[Any]]] = deque(maxlen=KEPT)

    def read(begin: Sequence[int], size: Sequence[int]) -> NDArray[Any]:
        for at, there, held in boxes:
            inside = [(i - j, i - j + n) for i, n, j in zip(begin, size, at, strict=True)]
            if all(start >= 0 and end <= most for (start, end), most in zip(inside, there, strict=True)):
                return np.ascontiguousarray(held[tuple(slice(*each) for each in inside)])
        values: NDArray[Any] = field.read(begin, size)
        boxes.appendleft((begin, size, values))
        return values

    return replace(field, read=read)


class _Edges:
    """Where the last step of an outermost code ends, for each code; NaN for the others."""

    def __init__(self, levels: Callable[[NDArray[Any], NDArray[Any]], object], count: int) -> None:
        self._levels, self._count = levels, count

    def __call__(self, codes: NDArray[Any], out: NDArray[Any]) -> None:
        self._table(codes.dtype).take(codes.view(np.uint8), out=out, mode="clip")

    def _table(self, dtype: Any) -> NDArray[Any]:
        values = np.empty(self._count, "<f4")
        self._levels(np.arange(self._count, dtype=np.uint8).view(dtype), values)
        levels = np.unique(values[np.isfinite(values)])
        edges = np.full_like(values, np.nan)
        if len(levels) > 1:
            # Symmetric schemes leave the lowest level of integers unused: -128, and -8.
            above, below = values == levels[-1], values <= max(levels[0], -levels[-1])
            edges[above] = values[above] + (levels[-1] - levels[-2]) / 2
            edges[below] = values[below] - (levels[1] - levels[0]) / 2
        return edges
