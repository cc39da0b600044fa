"""The rows of `ckpttool diff`: a tensor each while they are few, a module each when they are many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .diff_words import brief, number, share

if TYPE_CHECKING:
    from ...analysis.compare import Change, Comparison
    from ...analysis.norms import Norms

ROWS = 40
"""How many rows are shown without -v."""

FEW = 8
"""With fewer modules than these, the most different ones of the level below tell more."""

Item = tuple[str, str, "Change | None"]
"""A mark (`~` in both files, `-` only in A, `+` only in B), a name, and what differs."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        mark: `~`, `-` or `+`.
        name: of a tensor or value, or of a module with `.*` behind it.
        text: what differs, in words.
        cells: share of elements that differ, relative difference, cosine, largest difference; or nothing.
        relative: what `relative` returns, of the tensors together.
    """

    mark: str
    name: str
    text: str = ""
    cells: tuple[str, ...] = ()
    relative: float = math.inf


def items_of(found: Comparison) -> list[Item]:
    """Return everything that differs, in the order of the files."""
    changed: list[Item] = [("~", change.name, change) for change in found.changed]
    return [
        *changed,
        *(("-", name, None) for name in found.only_a),
        *(("+", name, None) for name in found.only_b),
    ]


def rows_of(items: list[Item]) -> list[Row]:
    """Return a row for each item while they are at most ROWS, else for each module.

    Modules are told apart by as many parts of their names as make at most ROWS rows; or by one more part, if
    that would make fewer than FEW. The parts are as many on both sides.
    """
    if len(items) <= ROWS:
        return [_row(item) for item in items]
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
        shared[module] = [*_shared([shared.get(module, path), path])]
    return [_group(group, shared, chosen) if len(group) > 1 else _row(group[0]) for group in finer]


def _grouped(items: list[Item], depth: int) -> list[list[Item]]:
    """Return items by the first `depth` parts of their module; what lies in no module is alone."""
    groups: dict[tuple[object, ...], list[Item]] = {}
    for mark, name, change in items:
        module = ".".join(name.split(".")[:-1][:depth])
        measured = change is not None and change.norms is not None
        groups.setdefault((mark, module or name, measured), []).append((mark, name, change))
    return list(groups.values())


def _row(item: Item) -> Row:
    mark, name, change = item
    if change is None:
        return Row(mark, name)
    found = change.distance
    if found is None or change.norms is None or change.a.endswith("[]"):
        return Row(mark, name, brief(change), relative=relative(change))
    return _measured(mark, name, [change])


def _group(items: list[Item], shared: dict[str, list[str]], depth: int) -> Row:
    mark, first_name, first = items[0]
    name = ".".join(shared[".".join(first_name.split(".")[:-1][:depth])]) + ".*"
    changes = [change for _, _, change in items if change is not None]
    if first is not None and first.norms is not None:
        return _measured(mark, name, changes)
    kinds = {"values": "tensors", "shape": "tensors of another shape", "dtype": "tensors of another dtype"}
    words = {kinds.get(change.why, "values") for change in changes} or {"names"}
    return Row(mark, name, f"{len(items)} {' or '.join(sorted(words))}")


def _shared(paths: list[list[str]]) -> Iterator[str]:
    """Yield the first parts that all paths have."""
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        yield parts[0]


def _measured(mark: str, name: str, changes: list[Change]) -> Row:
    """Return the row of tensors as if they were joined, without counters, which would outweigh weights."""
    floats = [change for change in changes if not change.a.startswith(("int", "uint", "bool"))] or changes
    total = _joined(change.norms for change in floats)
    apart = [change.distance for change in changes if change.distance is not None]
    largest = [found.max_abs for change in floats if (found := change.distance) and found.max_abs is not None]
    cells = (
        share(sum(found.differ for found in apart), sum(found.of for found in apart)),
        "" if total.relative is None else number(total.relative),
        "" if total.cosine is None else f"{total.cosine:.6f}",
        number(max(largest)) if largest else "",
    )
    nans = sum(found.nans for found in apart)
    text = f"{nans} NaN on one side" if nans else "only in bits" if not any(largest) else ""
    unmeasured = total.relative is None or any(math.isinf(relative(change)) for change in changes)
    return Row(mark, name, text, cells, math.inf if unmeasured else total.relative or 0.0)


def _joined(norms: Iterable[Norms | None]) -> Norms:
    from ...analysis.norms import Norms

    return sum((each for each in norms if each is not None), Norms())


def relative(change: Change | None) -> float:
    """Return the norm of A - B as a part of B's, by which rows are ordered.

    Infinite where it is not known, and where an element is NaN or infinite in one of the two, as norms leave
    those out.
    """
    if change is None or change.norms is None or change.norms.relative is None:
        return math.inf
    found = change.distance
    is_whole = found is None or not (found.nans or math.isinf(found.max_abs or 0))
    return change.norms.relative if is_whole else math.inf
