"""The page that `inspect` prints: what is in a file, for a person to read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ..core.checkpoint.module_tree import tensors_in_words
from ..core.checkpoint.prefixes import LIGHTNING
from ..core.cli.console import coloured, columns, cut, cut_middle, left, right, without, wrapped
from ..core.words import counted, printable, show_bytes
from .summary import CALLS, facts_of, value_in_words

if TYPE_CHECKING:
    from ..core.checkpoint.module_tree import Branch
    from .other_contents import OtherRow
    from .summary import Summary

MAX_OTHERS = 24  # Other values that are shown without `-v`
OF_EACH = 3  # The least of them that are shown of each name
MAX_DTYPES = 12
FIRST = ("hyper_parameters", "datamodule_hyper_parameters")  # Entries of a Lightning file that stand first
FOLDED = ("loops", "callbacks")  # Entries of a Lightning file that hold its own bookkeeping
ROOM = 10  # Columns for the contents of a module; with fewer they stay empty
INDENT = 14  # Columns before a fact: two spaces, and the widest label


def page(
    summary: Summary, depth: int | None, width: int | None, lines: int, *, everything: bool
) -> Iterator[str]:
    """Yield the lines of the page."""
    yield f"{printable(summary.path)}: {summary.format}, {show_bytes(summary.nbytes)}"
    for label, fact in facts_of(summary, everything):
        lines_of_fact = _folded(f"  {label:{INDENT - 2}}{fact}".rstrip(), width)
        yield from ((coloured(line, "red") for line in lines_of_fact) if label == CALLS else lines_of_fact)
    if summary.keys:
        yield ""
        yield from _tree(summary, depth or summary.modules.depth_within(lines), width, everything)
    if other := list(_others(summary, everything=everything)):
        yield ""
        yield "other contents"
        widest = max(columns(name) for name, _ in other)
        if width:  # long names and long values share the width; whichever is short leaves it to the other
            values = max(columns(value) for _, value in other)
            widest = min(widest, max(width - values - 4, width // 2))
        for name, value in other:
            shown = left(cut_middle(name, widest), widest)
            yield cut(f"  {shown}  {value}".rstrip(), width)


def _tree(summary: Summary, depth: int, width: int | None, everything: bool) -> Iterator[str]:
    usual = next(iter(summary.here.dtypes), "")
    lines = list(summary.modules.lines(depth))
    shown = lines if everything else lines[:200]
    names = [_module(level, branch, printable(summary.state or "")) for level, branch in shown]
    deepest = max(level for level, _ in lines)
    insides = [_inside(branch, usual, closed=level == deepest) for level, branch in shown]
    counts = [f"{branch.parameters:,}" for _, branch in shown]
    sizes = [show_bytes(branch.nbytes) for _, branch in shown]
    first, third = max(columns(name) for name, _ in names), max(map(len, sizes))
    second = max(len("parameters"), *map(len, counts))
    gone = False
    if width:
        space = width - second - third - 6  # for names and contents
        wanted = max(columns(brief) for _, brief in insides)
        first = min(first, max(min(24, space + 2), min(width // 2, space - wanted)))
        if gone := space - first < ROOM and wanted > 0:
            insides = [("", "")] * len(insides)
    yield cut(f"{'module':{first}}  {'parameters':>{second}}  {'bytes':>{third}}", width)
    for (name, short), count, size, (inside, brief) in zip(names, counts, sizes, insides, strict=True):
        shown_name = name if columns(name) <= first else cut_middle(short, first)
        if width and columns(inside) > space - first:
            inside = brief if ";" in brief else cut_middle(brief, max(space - first, ROOM))
        figures = f"{right(count, second)}  {right(size, third)}"
        yield cut(f"{left(shown_name, first)}  {figures}  {inside}".rstrip(), width)
    if width and gone:
        yield from without(["shapes"], width)
    if len(lines) > len(shown):
        yield f"and {len(lines) - len(shown):,} more: -v shows them all"


def _module(level: int, branch: Branch, where: str) -> tuple[str, str]:
    """Return a module's name, indented, with how many there are, in full and in fewer words."""
    name = printable(branch.name)
    if not level:
        name = f"{where}.{name}" if where and name else where or name or "the file itself"
    name = "  " * level + name
    both = (f" ({branch.copies} identical)", f" ×{branch.copies}") if branch.copies > 1 else ("", "")
    return name + both[0], name + both[1]


def _inside(branch: Branch, usual: str, *, closed: bool) -> tuple[str, str]:
    """Return the contents of a module for its line, in full and in fewer words."""
    if branch.branches:
        text = counted(branch.count, "tensor") if closed else ""
        return text, text
    whole, brief = (tensors_in_words(branch, usual, MAX_DTYPES, brief=each) for each in (False, True))
    return printable(whole), printable(brief)


def _folded(line: str, width: int | None) -> list[str]:
    """Fold a fact into lines of `width` columns, each indented as the fact is."""
    if width is None or columns(line) <= width:
        return [line]
    parts = wrapped(line[INDENT:], max(width - INDENT, 20))
    return [(" " * INDENT if i else line[:INDENT]) + part for i, part in enumerate(parts)]


def _others(summary: Summary, *, everything: bool) -> Iterator[tuple[str, str]]:
    """Yield name and value of everything that no other part of the page shows."""
    training = [row.name for row in summary.optimizers] + [row.name for row in summary.schedulers]
    shown = [name for name in training if name]
    inside, around = tuple(f"{name}." for name in shown), {name.rpartition(".")[0] for name in shown}
    if summary.model:
        around.add(summary.state or "")
    covered = {r.name for r in summary.other if r.name in around or r.name.startswith(inside)}
    kept = [row for row in summary.other if everything or row.name not in covered]
    groups = [(name, list(rows)) for name, rows in groupby(kept, lambda row: row.name.partition(".")[0])]
    lightning = any(name == LIGHTNING for name, _ in groups)
    if lightning:
        groups.sort(key=lambda group: group[0] not in FIRST)
    room = max(OF_EACH, MAX_OTHERS // max(1, len(groups)))
    for name, rows in groups:
        if lightning and name in FOLDED and not everything:
            yield printable(name), _bookkeeping(name, rows)
            continue
        most = MAX_OTHERS if name in FIRST else room
        most = len(rows) if everything or len(rows) <= most + 2 else most
        yield from ((printable(row.name), value_in_words(row)) for row in rows[:most])
        if len(rows) > most:
            yield f"{printable(name)}.…", f"{len(rows) - most:,} more (-v)"
    most = len(summary.other_tensors) if everything else MAX_OTHERS
    for held in summary.other_tensors[:most]:
        yield printable(held.name), f"{counted(held.tensors, 'tensor')}, {show_bytes(held.nbytes)}"
    if len(summary.other_tensors) > most:
        yield "…", f"{len(summary.other_tensors) - most:,} more with tensors (-v)"


def _bookkeeping(name: str, rows: Sequence[OtherRow]) -> str:
    """Return the names of loops or callbacks, with keys such as `EarlyStopping{'mode': 'min'}`."""
    keys = (re.split(r"[.{]", row.name[len(name) + 1 :])[0] for row in rows)
    shown = printable(", ".join(filter(None, dict.fromkeys(keys))))
    return f"{counted(len(rows), 'value')} of {shown}" if shown else value_in_words(rows[0])
