"""What differs between two tensors or values, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..console import printable

if TYPE_CHECKING:
    from ...analysis.compare import Change
    from ...analysis.distances import Distance

MANY_STEPS = 9999
"""How many ulps are shown at most."""


def brief(change: Change) -> str:
    """Return what differs in a few words: `3 -> 4`, or both types and shapes."""
    found = change.distance
    if found is None:
        return printable(f"{change.a} -> {change.b}")
    if found.a is not None and change.a.endswith("[]"):
        return _from_to(found.a, found.b)
    return f"{change.a}: {_how_many(found)}"


def detailed(change: Change) -> str:
    """Return all that is known of a difference, on one line."""
    found = change.distance
    if found is None:
        return printable(f"{change.a} -> {change.b}")
    types = change.a if change.a == change.b else f"{change.a} -> {change.b}"
    text = f"{types}: {_how_many(found)}"
    if found.max_abs:
        steps = found.max_ulp is not None and found.max_ulp <= MANY_STEPS
        text += f", by up to {number(found.max_abs)}{f' ({found.max_ulp} ulp)' if steps else ''}"
    text += f", at {list(change.index)}" if change.index else ""
    text += "" if found.a is None else f": {_from_to(found.a, found.b)}"
    if change.norms and change.norms.relative is not None:
        text += f"; relative {number(change.norms.relative)}"
        text += "" if change.norms.cosine is None else f", cosine {change.norms.cosine:.6f}"
    return text


def share(count: int, of: int) -> str:
    """Return a count as a share, which is never rounded to all or nothing."""
    if count == of:
        return "all"
    percent = 100 * count / of
    return "<0.1%" if percent < 0.1 else f"{min(percent, 99.9):.3g}%"


def number(value: float | int) -> str:
    """Return an integer as it is, and another number in three digits."""
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _how_many(found: Distance) -> str:
    text = f"{found.differ} of {found.of} {'differs' if found.differ == 1 else 'differ'}"
    if found.nans:
        text += f", {found.nans} by NaN on one side"
    if found.max_abs == 0:
        text += " only in bits (NaN, or the sign of zero)"
    return text


def _from_to(a: complex, b: complex | None) -> str:
    """Return both numbers in as many digits as distinguish them."""
    for digits in (6, 9, 17):
        rounded = [f"{value:.{digits}g}" for value in (a, b)]
        if rounded[0] != rounded[1]:
            break
    return " -> ".join(
        str(value) if isinstance(value, int) else text for value, text in zip((a, b), rounded, strict=True)
    )
