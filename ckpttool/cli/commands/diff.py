"""The command `ckpttool diff`."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import Console, counted, printable
from ..layout import terminal_width
from ..reading import fields_of, note_keys, note_state, note_unread, open_file

if TYPE_CHECKING:
    from ...analysis.comparison import Change, Comparison

Limits = dict[str, float | None]


class _Tolerance(click.FloatRange):
    """A number of at least 0. NaN is refused: no difference is within it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a tolerance.", param, ctx)
        return number


@click.command("diff")
@options.argument("a", "A")
@options.argument("b", "B", type=options.PATH)
@options.option("--rtol X", "Tolerate differences up to X times |b|.", type=_Tolerance(0))
@options.option("--atol X", "Tolerate differences up to X.", type=_Tolerance(0))
@options.flag("--ignore-prefix", "Match names that differ only in wrappers' prefixes.")
@options.flag("--model-only", "Compare only the models' states.")
@options.option(
    "--sort",
    "Order the rows by name, or by the largest relative difference, instead of in the order of A.",
    type=click.Choice(["name", "size"]),
)
@options.state_option
@options.no_verify_option
@options.page_options
@options.reading
def command(
    console: Console,
    a: str,
    b: str,
    sort: str | None,
    no_verify: bool,
    html: str | None,
    force: bool,
    **choices: Any,
) -> int:
    """Show what differs between two checkpoints in any formats, by name and by value. Exit 1 if they differ.

    A row for each tensor or value that is only in A (-), only in B (+) or differs (~); a row for each module
    if there are more than 40. -v shows every difference. Everything is compared, the optimizer and the epoch
    too, unless one of the formats holds only tensors; with --state only the states.

    relative is norm(A - B) / norm(B), cosine that of the angle between A and B, largest the largest |A - B|.

    Without a tolerance, values are the same if their bits are, so -0.0 is not 0.0. With --rtol, --atol or
    both, they are the same if |a - b| <= atol + rtol * |b|, as in torch.allclose; NaN equals NaN in the same
    place, and tensors of different dtypes are compared by value.

    \b
    Examples:
      ckpttool diff model.bin model.safetensors --atol 1e-6
      ckpttool diff last.pt model.safetensors --ignore-prefix
    """
    from ...analysis.compare import diff

    place = None
    if html is not None:
        from ...reporting import report

        place = report.page_place(html, (a, b), force)
    with ExitStack() as stack:
        mine, theirs = (stack.enter_context(open_file(console, path)) for path in (a, b))
        with console.progress(mine.nbytes, "comparing") as progress:
            comparison = diff(mine, theirs, progress=progress, verify=not no_verify, **choices)
        if place is not None:
            about = report.about(mine, {}, choices["state"], [theirs], comparison)
            report.write(place, (mine.path, theirs.path), about)
            console.note(f"page -> {printable(place.path)}")
        note_unread(console, mine, theirs)
        note_keys(console, (mine, theirs), (comparison.text_keys_a, comparison.text_keys_b))
        if choices["model_only"] or comparison.aside_a or comparison.aside_b:  # else every state was compared
            for checkpoint in (mine, theirs):
                note_state(console, checkpoint, choices["state"], named=True)
    _report(console, a, b, comparison, sort, {name: choices[name] for name in ("rtol", "atol")})
    return 0 if comparison.same else 1


def _report(
    console: Console, a: str, b: str, comparison: Comparison, sort: str | None, limits: Limits
) -> None:
    from ..diff_page import details, page

    for names, file in ((comparison.aside_a, b), (comparison.aside_b, a)):
        console.note_names(f"not compared, as {printable(file)} holds only tensors", names)
    if comparison.matched_without_prefix:
        more = counted(comparison.matched_without_prefix, "name is", "names are")
        console.note(f"{more} in both files except for a wrapper's prefix: --ignore-prefix")
    if comparison.same_files:
        pairs = counted(comparison.same_files, "tensor lies", "tensors lie")
        console.note(f"{pairs} in files whose hashes are the same, and were not read")
    width = terminal_width(sys.stdout)
    lines = details(comparison, sort, width) if console.verbose else page(comparison, sort, width)
    verdict = _verdict(printable(a), printable(b), comparison, limits)
    console.result("\n".join([*lines, console.sentence(verdict)]), {**_data(comparison, sort), **limits})


# Fields of a comparison that JSON has otherwise, or not at all
SAID_APART = ("changed", "aside_a", "aside_b", "matched_without_prefix", "same_files")


def _data(comparison: Comparison, sort: str | None) -> dict[str, object]:
    from ...analysis.diff_rows import relative

    changed = comparison.changed
    if sort == "size":
        changed = tuple(sorted(changed, key=lambda change: -relative(change)))
    return {
        "same": comparison.same,
        "identical": comparison.identical,
        **fields_of(comparison, without=SAID_APART),
        "changed": [*map(_fields, changed)],
        "not_compared": [*comparison.aside_a, *comparison.aside_b],
    }


def _fields(change: Change) -> dict[str, object]:
    data: dict[str, object] = {"name": change.name, "why": change.why, "a": change.a, "b": change.b}
    if (distance := change.distance) is not None:
        data |= fields_of(distance, without=("where", "a", "b", "tolerated")) | {"index": change.index}
    if (norms := change.norms) is not None:
        data |= {"norm_a": norms.a, "norm_b": norms.b, "norm_difference": norms.difference}
        data |= {"relative": norms.relative, "cosine": norms.cosine}
    return data


def _verdict(a: str, b: str, comparison: Comparison, limits: Limits) -> str:
    compared = counted(comparison.tensors, "tensor")
    if comparison.same and (tolerated := len(comparison.tolerated)):
        within = ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)
        differ = f"{counted(tolerated, 'value differs', 'values differ')} by less"
        return f"{a} and {b} are the same within {within} ({compared} compared, {differ})"
    if comparison.same:
        return f"{a} and {b} are the same ({compared} compared)"
    return f"{a} and {b} differ: {comparison.in_words(a, b)} ({compared} compared)"
