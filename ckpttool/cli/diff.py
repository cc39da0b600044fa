"""ckpttool diff"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from . import options
from .console import Console, counted, printable
from .states import note_state

if TYPE_CHECKING:
    from ..analysis.compare import Change, Comparison
    from ..analysis.distances import Distance

MANY_STEPS = 9999
"""How many ulps are shown at most."""


class _Tolerance(click.FloatRange):
    """A number of at least 0. NaN is refused: no difference is within it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a tolerance.", param, ctx)
        return number


@click.command("diff")
@click.argument("a", metavar="A", type=click.Path(allow_dash=True), callback=options.note_inputs)
@click.argument("b", metavar="B", type=click.Path(), callback=options.note_inputs)
@click.option("--rtol", type=_Tolerance(0), metavar="X", help="Tolerate differences up to X times |b|.")
@click.option("--atol", type=_Tolerance(0), metavar="X", help="Tolerate differences up to X.")
@click.option("--ignore-prefix", is_flag=True, help="Match names that differ only in wrappers' prefixes.")
@click.option("--model-only", is_flag=True, help="Compare only the models' states.")
@click.option(
    "--sort",
    type=click.Choice(["name", "size"]),
    help="Order the lines by name, or by the largest difference, instead of in the order of A.",
)
@options.state_option
@options.reading
def command(
    a: str,
    b: str,
    rtol: float | None,
    atol: float | None,
    ignore_prefix: bool,
    model_only: bool,
    sort: str | None,
    state: str | None,
    **given: Any,
) -> int:
    """Show what differs between two checkpoints in any formats, by name and by value. Exit 1 if they differ.

    One line for each difference: - is only in A, + only in B, ~ is in both. Everything is compared, the
    optimizer and the epoch too, unless one of the formats holds only tensors; with --state only the states.

    Without a tolerance, values are the same if their bits are, so -0.0 is not 0.0. With --rtol, --atol or
    both, they are the same if |a - b| <= atol + rtol * |b|, as in torch.allclose; NaN equals NaN in the same
    place, and tensors of different dtypes are compared by value. Relative differences are relative to B.

    \b
    Examples:
      ckpttool diff model.bin model.safetensors --atol 1e-6
      ckpttool diff last.pt model.safetensors --ignore-prefix
    """
    from .. import formats
    from ..analysis.compare import compare
    from ..analysis.equality import Tolerance

    console = options.console(given)
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
    with ExitStack() as stack:
        mine, theirs = (stack.enter_context(formats.open(path)) for path in (a, b))
        with console.progress(mine.nbytes, "comparing") as progress:
            found = compare(
                mine,
                theirs,
                tolerance=tolerance,
                state=state,
                model_only=model_only,
                ignore_prefix=ignore_prefix,
                progress=progress,
            )
        if model_only or found.aside_a or found.aside_b:
            for each in (mine, theirs):
                note_state(console, each, state, named=True)
    _report(console, a, b, found, sort)
    return 0 if found.same else 1


def _report(console: Console, a: str, b: str, found: Comparison, sort: str | None) -> None:
    changed = sorted(found.changed, key=_by_size) if sort == "size" else list(found.changed)
    lines = [*_lines(found, changed)]
    if sort == "name":
        lines.sort(key=lambda line: line[0])
    for names, file in ((found.aside_a, b), (found.aside_b, a)):
        if names:
            console.note(f"not compared, as {printable(file)} holds only tensors: {console.names(names)}")
    if found.matched_without_prefix:
        more = counted(found.matched_without_prefix, "name is", "names are")
        console.note(f"{more} in both files except for a wrapper's prefix: --ignore-prefix")
    data = {
        "same": found.same,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "changed": [_fields(change) for change in changed],
        "tensors": found.tensors,
        "not_compared": [*found.aside_a, *found.aside_b],
    }
    text = "".join(f"{mark} {printable(name)}{more}\n" for name, mark, more in lines)
    console.result(text + _verdict(printable(a), printable(b), found), data)


def _lines(found: Comparison, changed: list[Change]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, mark, what differs) for each line."""
    yield from ((change.name, "~", f"  {_in_words(change)}") for change in changed)
    yield from ((name, "-", "") for name in found.only_a)
    yield from ((name, "+", "") for name in found.only_b)


def _in_words(change: Change) -> str:
    if change.distance is None:
        return printable(f"{change.a} -> {change.b}")
    types = change.a if change.a == change.b else f"{change.a} -> {change.b}"
    return f"{types}: {_how_far(change.distance, change.index)}"


def _how_far(found: Distance, index: tuple[int, ...] | None) -> str:
    text = f"{found.differ} of {found.of} {'differs' if found.differ == 1 else 'differ'}"
    if found.nans:
        text += f", {found.nans} by NaN on one side"
    if found.max_abs == 0:
        text += " only in bits (NaN, or the sign of zero)"
    elif found.max_abs is not None:
        text += f", by up to {_number(found.max_abs)}{_in_proportion(found)}"
    place = f", at {list(index)}" if index else ""
    return text + place + ("" if found.a is None else f": {_from_to(found.a, found.b)}")


def _in_proportion(found: Distance) -> str:
    """Return the relative difference and the ulps, except beside 0 and for numbers far apart."""
    parts = []
    if found.max_rel is not None and math.isfinite(found.max_rel):
        parts.append(f"relative {found.max_rel:.3g}")
    if found.max_ulp is not None and found.max_ulp <= MANY_STEPS:
        parts.append(f"{found.max_ulp} ulp")
    return f" ({', '.join(parts)})" if parts else ""


def _number(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _from_to(a: complex, b: complex | None) -> str:
    """Return both numbers in as many digits as distinguish them."""
    for digits in (6, 9, 17):
        rounded = [f"{value:.{digits}g}" for value in (a, b)]
        if rounded[0] != rounded[1]:
            break
    return " -> ".join(
        str(value) if isinstance(value, int) else text for value, text in zip((a, b), rounded, strict=True)
    )


def _by_size(change: Change) -> tuple[int, float]:
    """Sort changes without a distance first, then those with NaN, then by the largest difference."""
    found = change.distance
    if found is None or found.max_abs is None:
        return (0, 0.0) if found is None else (1, 0.0)
    return (1 if found.nans else 2), -min(float(found.max_abs), math.inf)


def _fields(change: Change) -> dict[str, object]:
    data: dict[str, object] = {"name": change.name, "why": change.why, "a": change.a, "b": change.b}
    found = change.distance
    if found is not None:
        data |= {"differ": found.differ, "of": found.of, "nans": found.nans, "index": change.index}
        data |= {"max_abs": found.max_abs, "max_rel": found.max_rel, "max_ulp": found.max_ulp}
    return data


def _verdict(a: str, b: str, found: Comparison) -> str:
    compared = counted(found.tensors, "tensor", "tensors")
    if found.same:
        return f"{a} and {b} are the same ({compared} compared)"
    parts = [
        f"{len(names)} {what}"
        for names, what in (
            (found.changed, "changed"),
            (found.only_a, f"only in {a}"),
            (found.only_b, f"only in {b}"),
        )
        if names
    ]
    return f"{a} and {b} differ: {', '.join(parts)} ({compared} compared)"
