"""The page of `ckpttool diff`: a row per tensor while they are few, else per module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..analysis.diff_rows import ROWS, DiffRow, detailed, items_of, relative, rows_of
from .console import coloured, printable
from .layout import columns, cut_middle, fitting, left, right, without, wrapped

if TYPE_CHECKING:
    from ..analysis.comparison import Comparison

HEADER = ("differ", "relative", "cosine", "largest")
LEAST = 16  # columns of a name, before figures give way to it
COLOURS = {"~": "yellow", "-": "red", "+": "green"}


def page(comparison: Comparison, sort: str | None, width: int | None) -> Iterator[str]:
    """Yield a header and at most ROWS rows: the most different ones, if there are more."""
    rows = rows_of(items_of(comparison))
    largest = sorted(range(len(rows)), key=lambda i: -rows[i].relative)[:ROWS]
    yield from _table(_sorted([rows[i] for i in sorted(largest)], sort), width)
    if len(rows) > ROWS:
        yield f"  and {len(rows) - ROWS} more that differ less: -v shows every tensor"
    elif any(row.name.endswith(".*") for row in rows):
        yield "  -v shows every tensor"


def details(comparison: Comparison, sort: str | None, width: int | None) -> Iterator[str]:
    """Yield a line for every difference, with all that is known of it; `sort` as for `page`."""
    rows = [
        DiffRow(mark, name, detailed(change) if change else "", relative=relative(change))
        for mark, name, change in items_of(comparison)
    ]
    for row in _sorted(rows, sort):
        yield from _lines(row, printable(row.name), width)


def _sorted(rows: list[DiffRow], sort: str | None) -> list[DiffRow]:
    if sort == "name":
        return sorted(rows, key=lambda row: row.name)
    return sorted(rows, key=lambda row: -row.relative) if sort == "size" else rows


def _table(rows: list[DiffRow], width: int | None) -> Iterator[str]:
    """Yield the header, if a row has numbers, and the rows: names give way to the width, then figures, which
    are named then.
    """
    cells = [HEADER, *(row.cells for row in rows if row.cells)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    names = [printable(row.name) for row in rows]
    if width is not None:
        widths = widths[: fitting(widths, width - 2 - LEAST)]
        words = max((columns(row.text) for row in rows), default=0)
        others = sum(widths) + 2 * len(widths) if len(cells) > 1 else min(words + 2, width // 2)
        names = [cut_middle(name, max(width - 2 - others, LEAST)) for name in names]
    widest = max(map(columns, names), default=0)

    def figures(row: Sequence[str]) -> list[str]:
        return [right(cell, wide) for cell, wide in zip(row, widths, strict=False)]

    if len(cells) > 1:
        yield "  " + "  ".join([" " * widest, *figures(HEADER)])
    for row, name in zip(rows, names, strict=True):
        yield from _lines(row, "  ".join([left(name, widest), *figures(row.cells)]), width)
    if width is not None and len(cells) > 1:
        yield from without(HEADER[len(widths) :], width)


def _lines(row: DiffRow, start: str, width: int | None) -> Iterator[str]:
    """Yield a row: its mark, name and figures, and what differs in words; below those if it does not fit."""
    line = f"{start}  {row.text}" if row.text else start.rstrip()
    if width is None or not row.text or columns(line) + 2 <= width:
        yield f"{_mark(row)} {line}"
        return
    yield f"{_mark(row)} {start.rstrip()}"
    yield from (f"    {part}" for part in wrapped(row.text, max(width - 4, LEAST)))


def _mark(row: DiffRow) -> str:
    return coloured(row.mark, COLOURS[row.mark])
