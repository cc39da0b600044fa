"""The command `ckpttool diff`, and its page: a row per tensor while they are few, else per module."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from ..core.cli import joined, options
from ..core.cli.console import coloured, columns, cut_middle, fitting, left, terminal_width, without, wrapped
from ..core.cli.reading import fields_of, note_keys, note_state, note_unread, open_file
from ..core.cli.schemas import NAMES, Fields, fields_like
from ..core.words import counted, printable

if TYPE_CHECKING:
    from ..core.cli.console import Console
    from .compare_values import Change, Comparison
    from .rows import DiffRow

FEW = 6  # reasons that are told
LEAST = 16  # columns that a name keeps; figures give way first
COLOURS = {"~": "yellow", "-": "red", "+": "green"}


def page(comparison: Comparison, sort: str | None, width: int | None) -> Iterator[str]:
    """Yield a header and at most ROWS rows: the most different ones, if there are more."""
    from .rows import ROWS, figures, items_of, rows_of

    items = items_of(comparison)
    rows, header = rows_of(items), figures(items)
    largest = sorted(range(len(rows)), key=lambda i: -rows[i].relative)[:ROWS]
    yield from _table(_sorted([rows[i] for i in sorted(largest)], sort), header, width)
    if len(rows) > ROWS:
        yield f"  and {len(rows) - ROWS} more that differ less: -v shows every tensor"
    elif any(row.name.endswith(".*") for row in rows):
        yield "  -v shows every tensor"


def details(comparison: Comparison, sort: str | None, width: int | None) -> Iterator[str]:
    """Yield a line for every difference, with all that is known of it; `sort` as for `page`."""
    from .rows import DiffRow, detailed, items_of, relative

    texts = ((item, detailed(item[2]) if item[2] else "") for item in items_of(comparison))
    rows = [DiffRow(mark, name, text, relative=relative(change)) for (mark, name, change), text in texts]
    for row in _sorted(rows, sort):
        yield from _lines(row, printable(row.name), width)


def _sorted(rows: list[DiffRow], sort: str | None) -> list[DiffRow]:
    if sort == "name":
        return sorted(rows, key=lambda row: row.name)
    return sorted(rows, key=lambda row: -row.relative) if sort == "size" else rows


def _table(rows: list[DiffRow], header: tuple[str, ...], width: int | None) -> Iterator[str]:
    """Yield the rows, below a header if a row has numbers. Too wide, names are cut, then figures left out."""
    cells = [header, *(row.cells for row in rows if row.cells)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    names = [printable(row.name) for row in rows]
    if width is not None:
        widths = widths[: fitting(widths, width - 2 - LEAST)]
        words = max((columns(row.text) for row in rows), default=0)
        others = sum(widths) + 2 * len(widths) if len(cells) > 1 else min(words + 2, width // 2)
        names = [cut_middle(name, max(width - 2 - others, LEAST)) for name in names]
    widest = max(map(columns, names), default=0)

    def figures(row: Sequence[str]) -> list[str]:
        return [f"{cell:>{wide}}" for cell, wide in zip(row, widths, strict=False)]

    if len(cells) > 1:
        yield "  " + "  ".join([" " * widest, *figures(header)])
    for row, name in zip(rows, names, strict=True):
        yield from _lines(row, "  ".join([left(name, widest), *figures(row.cells)]), width)
    if width is not None and len(cells) > 1:
        yield from without(header[len(widths) :], width)


def _lines(row: DiffRow, start: str, width: int | None) -> Iterator[str]:
    """Yield a row: mark, name, figures, and the text; the text goes below if it does not fit."""
    mark, line = coloured(row.mark, COLOURS[row.mark]), f"{start}  {row.text}".rstrip()
    if width is None or not row.text or columns(line) + 2 <= width:
        yield f"{mark} {line}"
        return
    yield f"{mark} {start.rstrip()}"
    yield from (f"    {part}" for part in wrapped(row.text, max(width - 4, LEAST)))


# ---- The command


Limits = dict[str, float | None]


class _Tolerance(click.FloatRange):
    """A number of at least 0. NaN is refused: no difference is within it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a tolerance.", param, ctx)
        return number


def _printed() -> Fields:
    from .compare_values import Change, Comparison, ValueLoss
    from .distances import Distance

    changed: Fields = {
        **fields_like(Change),
        **{f"{name}?": said for name, said in fields_like(Distance).items()},
        "index?": (tuple[int, ...] | None, "the place of the largest difference, along each axis"),
        "norm_a?": (float, "the 2-norm of the tensor in A"),
        "norm_b?": (float, "the 2-norm of the tensor in B"),
        "norm_difference?": (float, "the 2-norm of their difference"),
        "relative?": (float | None, "that, divided by the norm in B"),
        "cosine?": (float | None, "of the angle between them"),
        "nmse?": (float | None, "the square of norm_difference over that of norm_a, or of who lost nothing"),
        **{f"{name}?": said for name, said in fields_like(ValueLoss).items()},
    }
    return {
        "same": (bool, "whether nothing differs, or only by less than the tolerance"),
        "identical": (bool, "whether nothing differs at all"),
        **fields_like(Comparison),
        "changed": ([changed], "what both files have, with other contents"),
        "not_compared": (NAMES, "names that one of the formats can't hold, or a plain model has not"),
        "rtol": (float | None, "as given"),
        "atol": (float | None, "as given"),
    }


@options.command("Check", "What differs between two files, by name and value", _printed)
@options.argument("a", "A")
@options.argument("b", "B", type=options.PATH)
@options.option("--rtol X", "Tolerate differences up to X times |b|.", type=_Tolerance(0))
@options.option("--atol X", "Tolerate differences up to X.", type=_Tolerance(0))
@options.flag("--ignore-prefix", "Match names that differ only in wrappers' prefixes.")
@options.flag("--as-stored", "Compare codes and scales of packed tensors, not what numbers they stand for.")
@options.flag("--model-only", "Compare only the models' states.")
@options.option(
    "--sort",
    "Order the rows by name, or by the largest relative difference, instead of in the order of A.",
    type=click.Choice(["name", "size"]),
)
@options.state_option
@options.no_verify_option
@joined.reading_in_parts
def diff(console: Console, a: str, b: str, sort: str | None, no_verify: bool, **choices: Any) -> int:
    """Show what differs between two checkpoints in any formats, by name and by value. Exit 1 if they differ.

    A row for each tensor or value that is only in A (-), only in B (+) or differs (~); a row for each module
    if there are more than 40. -v shows every difference. Everything is compared, the optimizer and the epoch
    too, unless one of the formats holds only tensors; with --state only the states.

    relative is norm(A - B) / norm(B), cosine that of the angle between A and B, largest the largest |A - B|.

    A packed tensor (fp8, GPTQ, AWQ, NF4, MXFP4, a GGUF's, …) is compared as the plain one that it stands for.
    NMSE is then norm(A - B)² / norm(plain)², the worst first; saturated are elements beyond the last step of
    their code, zeroed those that became 0. Floats of two types are measured so, too.

    Without a tolerance, values are the same if their bits are, so -0.0 is not 0.0. With --rtol, --atol or
    both, they are the same if |a - b| <= atol + rtol * |b|, as in torch.allclose; NaN equals NaN in the same
    place, and tensors of different dtypes are compared by value.

    \b
    Examples:
      ckpttool diff model.bin model.safetensors --atol 1e-6
      ckpttool diff last.pt model.safetensors --ignore-prefix
      ckpttool diff model.safetensors fp8-model/
    """
    from . import compare

    pages = options.added(choices, console, a, b)
    with ExitStack() as stack:
        mine, theirs = (stack.enter_context(open_file(console, path)) for path in (a, b))
        with console.progress(mine.nbytes, "comparing") as progress:
            comparison = compare.diff(mine, theirs, progress=progress, verify=not no_verify, **choices)
        for write in pages:
            write(mine, theirs, comparison, choices["state"])
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
    for names, file in ((comparison.aside_a, b), (comparison.aside_b, a)):
        console.note_names(f"not compared, as {printable(file)} holds only tensors", names)
    if not comparison.identical:
        _note_packed(console, a, b, comparison)
    if comparison.matched_without_prefix:
        more = counted(comparison.matched_without_prefix, "name is", "names are")
        console.note(f"{more} in both files except for a wrapper's prefix: --ignore-prefix")
    if comparison.same_files:
        pairs = counted(comparison.same_files, "tensor lies", "tensors lie")
        console.note(f"{pairs} in files whose hashes are the same, and were not read")
    if sort is None and any(change.loss for change in comparison.changed):
        sort = "size"  # the worst first
    width = terminal_width(sys.stdout)
    lines = details(comparison, sort, width) if console.verbose else page(comparison, sort, width)
    verdict = _verdict(printable(a), printable(b), comparison, limits)
    console.result("\n".join([*lines, console.sentence(verdict)]), {**_data(comparison, sort), **limits})


def _note_packed(console: Console, a: str, b: str, comparison: Comparison) -> None:
    for schemes, file in ((comparison.packed_a, a), (comparison.packed_b, b)):
        for scheme, count in schemes.items():
            console.note(f"{printable(file)}: {printable(scheme)} ({counted(count, 'tensor')}), made plain")
    console.note_names("not compared, as a plain model has none", [*comparison.extra_a, *comparison.extra_b])
    for why in comparison.unclear[:FEW]:
        console.note(f"{printable(why)}; compared as stored")


def _data(comparison: Comparison, sort: str | None) -> dict[str, object]:
    changed = comparison.changed
    aside = *comparison.aside_a, *comparison.aside_b, *comparison.extra_a, *comparison.extra_b
    if sort == "size":
        from .rows import relative

        changed = tuple(sorted(changed, key=lambda change: -relative(change)))
    return {
        "same": comparison.same,
        "identical": comparison.identical,
        **fields_of(comparison),
        "changed": [*map(_fields, changed)],
        "not_compared": [*aside],
    }


def _fields(change: Change) -> dict[str, object]:
    data = fields_of(change)
    if (distance := change.distance) is not None:
        data |= fields_of(distance) | {"index": change.index}
    if (norms := change.norms) is not None:
        data |= {"norm_a": norms.a, "norm_b": norms.b, "norm_difference": norms.difference}
        data |= {"relative": norms.relative, "cosine": norms.cosine, "nmse": change.nmse}
    if (loss := change.loss) is not None:
        data |= fields_of(loss)
    return data


def _verdict(a: str, b: str, comparison: Comparison, limits: Limits) -> str:
    compared = counted(comparison.tensors, "tensor")
    if comparison.same and limits["rtol"] is limits["atol"] is None:
        packed = ", packed in other ways" if comparison.tolerated else ""
        return f"{a} and {b} are the same{packed} ({compared} compared)"
    if comparison.same and (tolerated := len(comparison.tolerated)):
        within = ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)
        differ = f"{counted(tolerated, 'value differs', 'values differ')} by less"
        return f"{a} and {b} are the same within {within} ({compared} compared, {differ})"
    if comparison.same:
        return f"{a} and {b} are the same ({compared} compared)"
    return f"{a} and {b} differ: {comparison.in_words(a, b)} ({compared} compared)"
