"""What differs between two checkpoints, for the page: the comparison itself, and the names compared."""

from __future__ import annotations

from typing import Any

from ..analysis.compare import Change, Comparison, both_states
from ..analysis.diff_rows import detailed
from ..checkpoint.checkpoint import Checkpoint
from ..words import printable
from .contents import front_coded


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
        fields |= {"relative": norms.relative, "cosine": norms.cosine}
        fields |= {"kind": printable(" -> ".join(kinds))}
    if distance is not None:
        fields |= {"most": distance.max_abs, "differ": distance.differ, "of": distance.of}
        fields |= {"nans": distance.nans} if distance.nans else {}
    return fields
