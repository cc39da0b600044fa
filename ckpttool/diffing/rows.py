"""The differences between two checkpoints in rows: one per tensor while they are few, else per module."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from ..core.words import number, printable
from .compare_values import Norms

if TYPE_CHECKING:
    from .compare_values import Change, Comparison
    from .distances import Distance

ROWS = 40  # The most rows of tensors; of more, modules are shown
FEW = 8  # With fewer modules, the most different ones of the level below tell more

TENSOR = re.compile(r"(?P<dtype>\w+) (?P<shape>\[[\d, ]*\])")  # a plain tensor, as a `Change` has it

# A mark (`~` in both files, `-` only in A, `+` only in B), a name, and what differs
Item = tuple[str, str, "Change | None"]


# What the figures of a row are: of differences, and of what packing or rounding cost
FIGURES, COSTS = ("differ", "relative", "cosine", "largest"), ("NMSE", "largest", "saturated", "zeroed")


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One row."""

    mark: str  # `~`, `-` or `+`
    name: str  # of a tensor or value, or of a module with `.*` behind it
    text: str = ""  # what differs, in words
    cells: tuple[str, ...] = ()  # figures, or nothing
    relative: float = math.inf  # what `relative` returns, of the tensors together


def items_of(comparison: Comparison) -> list[Item]:
    """Return everything that differs, in the order of the files."""
    changed: list[Item] = [("~", change.name, change) for change in comparison.changed]
    only = (("-", comparison.only_a), ("+", comparison.only_b))
    return [*changed, *((mark, name, None) for mark, names in only for name in names)]


def figures(items: list[Item]) -> tuple[str, ...]:
    """Return what the figures of the rows are."""
    return COSTS if any(change is not None and change.loss for _, _, change in items) else FIGURES


def rows_of(items: list[Item]) -> list[DiffRow]:
    """Return a row for each item while they are at most ROWS, else for each module."""
    said = figures(items)
    if len(items) <= ROWS:
        return [_row(item, said) for item in items]
    # Modules are named by as many parts as make at most ROWS rows, or by one more part if that would make
    # fewer than FEW.
    deepest = max(name.count(".") for _, name, _ in items)
    finer, chosen = [[item] for item in items], deepest
    for depth in range(deepest, 0, -1):
        groups = _grouped(items, depth)
        if len(groups) < FEW:
            break
        finer, chosen = groups, depth
        if len(groups) <= ROWS:
            break
    shared: dict[str, list[str]] = {}  # what all names in a module begin with, whichever file they are in
    for _, name, _ in items:
        path = name.split(".")[:-1]
        module = ".".join(path[:chosen])
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(shared.get(module, path), path, strict=False))
        shared[module] = [part for part, _ in pairs]
    return [
        _group(group, shared, chosen, said) if len(group) > 1 else _row(group[0], said) for group in finer
    ]


def _grouped(items: list[Item], depth: int) -> list[list[Item]]:
    """Return items by the first `depth` parts of their module; what lies in no module is alone."""
    groups: dict[tuple[object, ...], list[Item]] = {}
    for mark, name, change in items:
        module = ".".join(name.split(".")[:-1][:depth])
        measured = change is not None and change.norms is not None
        groups.setdefault((mark, module or name, measured), []).append((mark, name, change))
    return list(groups.values())


def _row(item: Item, said: tuple[str, ...]) -> DiffRow:
    mark, name, change = item
    if change is None:
        return DiffRow(mark, name)
    if change.distance is None or change.norms is None or change.a.endswith("[]"):
        return DiffRow(mark, name, brief(change), relative=relative(change))
    return _measured(mark, name, [change], said)


def _group(items: list[Item], shared: dict[str, list[str]], depth: int, said: tuple[str, ...]) -> DiffRow:
    mark, first_name, first = items[0]
    name = ".".join(shared[".".join(first_name.split(".")[:-1][:depth])]) + ".*"
    changes = [change for _, _, change in items if change is not None]
    if first is not None and first.norms is not None:
        return _measured(mark, name, changes, said)
    kinds = {"values": "tensors", "shape": "tensors of another shape", "dtype": "tensors of another dtype"}
    words = {kinds.get(change.why, "values") for change in changes} or {"names"}
    return DiffRow(mark, name, f"{len(items)} {' or '.join(sorted(words))}")


def _measured(mark: str, name: str, changes: list[Change], said: tuple[str, ...]) -> DiffRow:
    """Return the row of tensors as if they were joined, without counters: they would outweigh weights."""
    floats = [change for change in changes if not change.a.startswith(("int", "uint", "bool"))] or changes
    toward = (change.toward if said is COSTS else change.norms for change in floats)
    total = sum((norms for norms in toward if norms is not None), Norms())
    apart = [change.distance for change in changes if change.distance is not None]
    measured = (change.distance.max_abs for change in floats if change.distance)
    largest = [value for value in measured if value is not None]
    cells = {
        "differ": share(sum(distance.differ for distance in apart), sum(distance.of for distance in apart)),
        "relative": "" if total.relative is None else number(total.relative),
        "cosine": "" if total.cosine is None else f"{total.cosine:.6f}",
        "largest": number(max(largest)) if largest else "",
        "NMSE": "" if total.relative is None else number(total.relative**2),
        **{name: _lost(changes, name) for name in ("saturated", "zeroed")},
    }
    nans = sum(distance.nans for distance in apart)
    text = f"{nans} NaN on one side" if nans else "only in bits" if not any(largest) else ""
    unmeasured = total.relative is None or any(math.isinf(relative(change)) for change in changes)
    distant = math.inf if unmeasured else total.relative or 0.0
    return DiffRow(mark, name, text, tuple(cells[each] for each in said), distant)


def _lost(changes: list[Change], name: str) -> str:
    """Return the share of elements that a loss counts; nothing where it is not known of all."""
    losses = [change.loss for change in changes if change.loss is not None]
    counts = [getattr(loss, name) for loss in losses]
    of = sum(change.distance.of for change in changes if change.loss and change.distance)
    return "" if not counts or None in counts else share(sum(counts), of) if sum(counts) else "0"


def relative(change: Change | None) -> float:
    """Return the norm of A - B as a part of B's, or of the one that lost nothing; rows are ordered by it."""
    if change is None or change.norms is None:
        return math.inf
    found = (change.toward if change.loss else change.norms).relative
    distance = change.distance
    # Norms leave out elements that are NaN or infinite.
    is_whole = distance is None or not (distance.nans or math.isinf(distance.max_abs or 0))
    return found if is_whole and found is not None else math.inf


def brief(change: Change) -> str:
    """Return what differs in a few words: `3 -> 4`, or both types and shapes."""
    distance = change.distance
    if distance is None:
        return _types(change)
    if distance.a is not None and change.a.endswith("[]"):
        return _from_to(distance.a, distance.b)
    return f"{_types(change)}: {_how_many(distance)}"


def detailed(change: Change) -> str:
    """Return all that is known of a difference, on one line."""
    distance = change.distance
    if distance is None:
        return _types(change)
    text = f"{_types(change)}: {_how_many(distance)}"
    if distance.max_abs:
        steps = distance.max_ulp is not None and distance.max_ulp <= 9999
        text += f", by up to {number(distance.max_abs)}{f' ({distance.max_ulp} ulp)' if steps else ''}"
    text += f", at {list(change.index)}" if change.index else ""
    text += "" if distance.a is None else f": {_from_to(distance.a, distance.b)}"
    if change.norms and change.norms.relative is not None:
        text += f"; relative {number(change.norms.relative)}"
        text += "" if change.norms.cosine is None else f", cosine {change.norms.cosine:.6f}"
    if change.loss and change.nmse is not None:
        text += f"; NMSE {number(change.nmse)}"
        text += "" if change.loss.saturated is None else f", {change.loss.saturated} saturated"
        text += f", {change.loss.zeroed} zeroed"
    return text


def _types(change: Change) -> str:
    """Return what both sides are, and what they have in common once: `float32 [2×3] -> [4×3]`."""
    sides = [TENSOR.fullmatch(side) for side in (change.a, change.b)]
    if not (sides[0] and sides[1]):
        return printable(change.a if change.a == change.b else f"{change.a} -> {change.b}")
    dtypes = [side["dtype"] for side in sides if side]
    shapes = [side["shape"].replace(", ", "×") for side in sides if side]
    if dtypes[0] == dtypes[1]:
        return f"{dtypes[0]} {' -> '.join(dict.fromkeys(shapes))}"
    if shapes[0] == shapes[1]:
        return f"{' -> '.join(dtypes)} of {shapes[0]}"
    return f"{dtypes[0]} {shapes[0]} -> {dtypes[1]} {shapes[1]}"


def share(count: int, of: int) -> str:
    """Return a count as a share; it is never rounded to all or nothing."""
    if count == of:
        return "all"
    percent = 100 * count / of
    return "<0.1%" if percent < 0.1 else f"{min(percent, 99.9):.3g}%"


def _how_many(distance: Distance) -> str:
    text = f"{distance.differ} of {distance.of} {'differs' if distance.differ == 1 else 'differ'}"
    if distance.nans:
        text += f", {distance.nans} by NaN on one side"
    if distance.max_abs == 0:
        text += " only in bits (NaN, or the sign of zero)"
    return text


def _from_to(a: complex, b: complex | None) -> str:
    """Return both numbers in as many digits as distinguish them."""
    for digits in (6, 9, 17):
        rounded = [f"{value:.{digits}g}" for value in (a, b)]
        if rounded[0] != rounded[1]:
            break
    both = zip((a, b), rounded, strict=True)
    return " -> ".join(str(value) if isinstance(value, int) else text for value, text in both)
