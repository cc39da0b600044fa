"""The results as tables for a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from .case import Case, Results, Run, Target
from .history import Figure
from .process import smallest_peak
from .targets import beyond, peak, ratio

Row = tuple[str, ...]


def as_text(case: Case, results: Results, before: Sequence[Figure | None] = ()) -> str:
    """Return the tables; `before` is what each target measured before, where that is known."""
    tables = ["\n".join(_ruled(_columns(rows))) for rows in _tables(case, results, before)]
    return "\n".join([_title(case, results), "\n\n".join(tables)])


def for_page(case: Case, results: Results) -> str:
    """Return the ways as a table, without CPU seconds, and the targets that were missed."""
    missed = [
        f"{text} {value} ({limit})"
        for text, limit, value, verdict in _verdicts(case, results)
        if verdict == "MISSED"
    ]
    without_cpu = [(*row[:3], *row[4:]) for row in (_header(case), *_rows(case, results))]
    table = _ruled(_columns(without_cpu))
    return "\n".join([_title(case, results), *table, *(f"MISSED: {each}" for each in missed)])


def _tables(case: Case, results: Results, before: Sequence[Figure | None]) -> list[list[Row]]:
    """The ways, and the targets if there are any."""
    tables = [[_header(case), *_rows(case, results)]]
    if case.targets:
        was = before or [None] * len(case.targets)
        shown = [target.show(old.value) if old else "" for target, old in zip(case.targets, was, strict=True)]
        rows = [(*row[:2], old, *row[2:]) for row, old in zip(_verdicts(case, results), shown, strict=True)]
        header = ("target", "limit", "before", "measured", "")
        has_before = any(shown)
        tables.append([row if has_before else (*row[:2], *row[3:]) for row in (header, *rows)])
    return tables


def _title(case: Case, results: Results) -> str:
    runs = len(results[case.ways[0].name])
    return f"{case.title} ({runs} run{'s' * (runs != 1)} each, in turns)"


def _header(case: Case) -> Row:
    against = case.ways[0].name
    compared = f"× {against}" if case.as_ratio else "beyond"
    return ("way", "seconds", "min–max", "cpu", compared, "memory")


def _rows(case: Case, results: Results) -> list[Row]:
    first = case.ways[0].name
    rows: list[Row] = []
    for way in case.ways:
        runs = results[way.name]
        if case.as_ratio:
            compared = _three_digits(ratio(results, way.name, first))
        else:
            compared = f"{beyond(results, way.name, first):.3f}"
        memory = _memory(peak(results, way.name))
        rows.append((way.name, *_seconds(runs), compared, memory))
    return rows


def _seconds(runs: Sequence[Run]) -> Row:
    """The median, the fastest and the slowest, and the median CPU time."""
    walls = [run.seconds for run in runs]
    middle, low, high = median(walls), min(walls), max(walls)
    digits = 3 if middle < 1 else 2
    cpu = median(run.cpu for run in runs)
    return (f"{middle:.{digits}f}", f"{low:.{digits}f}–{high:.{digits}f}", f"{cpu:.{digits}f}")


def _three_digits(number: float) -> str:
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{digits}f}"


def _memory(count: int) -> str:
    # Near the launcher's own size, the launcher was measured, give or take a page.
    hidden = count < 1.1 * smallest_peak()
    return f"{'< ' * hidden}{count / 1e6:.0f} MB"


def _verdicts(case: Case, results: Results) -> list[Row]:
    return [
        (
            target.text,
            _limit(target),
            target.show(target.measure(results)),
            "" if target.limit == math.inf else "met" if target.met(results) else "MISSED",
        )
        for target in case.targets
    ]


def _limit(target: Target) -> str:
    if target.limit == math.inf:
        return "no target" if target.at_least else "the floor"
    return f"{'≥' if target.at_least else '≤'} {target.show(target.limit)}"


def _columns(rows: Sequence[Row]) -> list[str]:
    """The first column left-aligned, the numbers right-aligned, two spaces between."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines


def _ruled(lines: list[str]) -> list[str]:
    return [line.rstrip() for line in (lines[0], "-" * len(lines[0]), *lines[1:])]
