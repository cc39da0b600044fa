"""What a notebook shows of a summary and of a comparison: HTML that folds, without a script."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from ..checkpoint.notebook import modules_elements
from ..markup import element, folded, html, table
from ..words import counted, show_bytes
from .diff_rows import ROWS, Row, items_of, rows_of
from .facts import facts_of, value_in_words

if TYPE_CHECKING:
    from .compare import Comparison
    from .summary import Summary

MAX_OTHERS = 100  # values that are no tensors


def summary_html(summary: Summary) -> str:
    """Return a summary as HTML: the facts that `inspect` prints; folded, the modules and other contents."""
    parts = [
        element("p", element("b", summary.path), f": {summary.format}, {show_bytes(summary.nbytes)}"),
        table((), list(facts_of(summary, False))),
    ]
    if summary.keys:
        said = f"modules: {counted(summary.keys, 'tensor')}, {summary.parameters:,} parameters"
        parts.append(folded(said, *modules_elements(summary.modules)))
    if summary.other:
        rows = [(row.name, value_in_words(row)) for row in islice(summary.other, MAX_OTHERS)]
        more = len(summary.other) - len(rows)
        parts.append(folded("other contents", table((), rows + ([("…", f"{more:,} more")] if more else []))))
    return html(*parts)


def comparison_html(comparison: Comparison) -> str:
    """Return a comparison as HTML: the verdict, and the rows that `diff` prints."""
    verdict = element("p", element("b", comparison_line(comparison)))
    rows = rows_of(items_of(comparison))
    if not rows:
        return html(verdict)
    largest = sorted(rows, key=lambda row: -row.relative)[:ROWS]
    head = ("", "name", "differ", "relative", "cosine", "largest", "")
    more = len(rows) - len(largest)
    end = [element("p", f"and {more:,} more that differ less")] if more else []
    return html(verdict, folded("what differs", table(head, map(_cells, largest)), is_open=True), *end)


def _cells(row: Row) -> tuple[str, ...]:
    return (row.mark, row.name, *(row.cells or ("", "", "", "")), row.text)


def comparison_line(comparison: Comparison) -> str:
    """Return the outcome in a line."""
    compared = f"{counted(comparison.tensors, 'tensor')} compared"
    if comparison.same:
        return f"the same: {compared}"
    parts = (
        (comparison.changed, "changed"),
        (comparison.only_a, "only in A"),
        (comparison.only_b, "only in B"),
    )
    return f"{', '.join(f'{len(names)} {what}' for names, what in parts if names)}: {compared}"
