"""What is in a checkpoint, and what differs in another, for the page: facts, tensors, everything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.module_tree import shape_in_words
from ..core.words import printable
from ..diffing.compare import both_states
from ..diffing.compare_values import Change, Comparison
from ..diffing.rows import detailed
from ..inspecting.summary import Summary, facts_of, value_in_words
from ..inspecting.tables import CheckpointRow, Stats, TensorRow, tensor_rows

LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"  # the heights of bars; 0 is no value
EXACT = 2**53  # integers up to which a script's numbers are exact
MAX_OTHERS = 20_000  # values other than tensors


def contents(checkpoint: Checkpoint, summary: Summary, stats: Mapping[str, Stats | None]) -> dict[str, Any]:
    """Return a checkpoint as the page shows it; `stats` may lack what was not measured."""
    others = [[printable(row.name), value_in_words(row)] for row in summary.other[:MAX_OTHERS]]
    more = len(summary.other) - len(others)
    return {
        "path": printable(summary.path),
        "format": summary.format,
        "bytes": summary.nbytes,
        "parameters": summary.parameters,
        "state": None if summary.state is None else printable(summary.state),
        "facts": [*map(list, facts_of(summary, True))],
        "tensors": _columns([*tensor_rows(checkpoint)], _second_names(checkpoint), stats),
        "others": others + ([["…", f"{more:,} more: ckpttool inspect -v shows them"]] if more else []),
    }


def checkpoint_row(row: CheckpointRow) -> list[Any]:
    """Return one of a run's checkpoints as a row of the page."""
    return [printable(row.path), row.step, row.format, row.nbytes, printable(row.problem)]


def front_coded(names: Iterable[str]) -> dict[str, list[Any]]:
    """Return names, printable, each as what it shares with the one before, and the rest.

    What is shared is counted as scripts do, in UTF-16.
    """
    shared, rest, before = [], [], ""
    for name in map(printable, names):
        count = len(commonprefix([before, name]))  # noqa: RUF071 - of characters, as meant
        shared.append(count if name.isascii() else len(name[:count].encode("utf-16-le")) // 2)
        rest.append(name[count:])
        before = name
    return {"shared": shared, "rest": rest}


def _second_names(checkpoint: Checkpoint) -> set[str]:
    """Return the names of tensors that an earlier name has too: their bytes count once."""
    first: dict[object, str] = {}
    named = ((name, tensor) for name, tensor in checkpoint.tensors() if tensor.nbytes)
    return {name for name, tensor in named if first.setdefault(tensor.view, name) != name}


def _columns(rows: Sequence[TensorRow], again: set[str], stats: Mapping[str, Stats | None]) -> dict[str, Any]:
    """Return the tensors column by column: as rows they would take three times the space."""
    forms: dict[tuple[str, str, int], int] = {}
    number = {row.name: at for at, row in enumerate(rows)}
    columns: dict[str, Any] = {
        "names": front_coded(row.name for row in rows),
        "form": [forms.setdefault((row.type or "?", _shape(row), row.nbytes), len(forms)) for row in rows],
        "shared": [[at, number[row.shared_with]] for at, row in enumerate(rows) if row.shared_with],
        "again": [at for at, row in enumerate(rows) if row.name in again],
        "forms": [*map(list, forms)],  # all of them: `form` has added each
    }
    return columns | (_figures([stats.get(row.name) for row in rows]) if stats else {})


def _shape(row: TensorRow) -> str:
    return row.sizes if row.shape is None or row.local_shape is not None else shape_in_words(row.shape)


def _figures(stats: Sequence[Stats | None]) -> dict[str, Any]:
    fields = {"min": "minimum", "max": "maximum", "mean": "mean", "std": "deviation"}
    figures: dict[str, Any] = {
        column: [_short(getattr(stat, name)) if stat else None for stat in stats]
        for column, name in fields.items()
    }
    figures["bins"] = [_heights(stat.histogram) if stat else "" for stat in stats]
    figures["bad"] = [[at, stat.non_finite] for at, stat in enumerate(stats) if stat and stat.non_finite]
    return figures


def _short(value: float | int | None) -> float | int | None:
    """Return a number with the four digits that the page shows; integers as they are."""
    if value is None or (isinstance(value, int) and abs(value) <= EXACT):
        return value
    return float(f"{value:.4g}")


def _heights(counts: Sequence[int]) -> str:
    """Return the counts as characters of LEVELS, relative to the largest; all but 0 are visible."""
    most = max(counts, default=0)
    top = len(LEVELS) - 1
    return "".join(LEVELS[count and max(1, round(count * top / most))] for count in counts)


def difference(a: Checkpoint, b: Checkpoint, comparison: Comparison, state: str | None) -> dict[str, Any]:
    """Return a comparison of two checkpoints as the page shows it."""
    states = both_states(a, b, state)
    names = [*states[0].tensors] if states else [name for name, _ in a.tensors()]
    return {
        "a": printable(a.path),
        "b": printable(b.path),
        "same": comparison.same,
        "said": comparison.in_words("the first", "the second"),
        "tensors": comparison.tensors,
        "tolerated": len(comparison.tolerated),
        "where": printable(states[0].where) if states else "",
        "names": front_coded(names),
        "changed": [*map(_change, comparison.changed)],
        "only_a": [*map(printable, comparison.only_a)],
        "only_b": [*map(printable, comparison.only_b)],
        "aside": [*map(printable, (*comparison.aside_a, *comparison.aside_b))],
    }


def _change(change: Change) -> dict[str, Any]:
    distance, norms = change.distance, change.norms
    fields: dict[str, Any] = {"name": printable(change.name), "why": change.why, "text": detailed(change)}
    kinds = dict.fromkeys((change.a, change.b))
    if norms is not None:
        fields |= {"relative": norms.relative, "cosine": norms.cosine, "kind": printable(" -> ".join(kinds))}
    if distance is not None:
        fields |= {"most": distance.max_abs, "differ": distance.differ, "of": distance.of}
        fields |= {"nans": distance.nans} if distance.nans else {}
    if change.loss is not None:
        fields |= {"nmse": change.nmse, "squares": change.toward.bb}
        fields |= {"saturated": change.loss.saturated, "zeroed": change.loss.zeroed}
    return fields
