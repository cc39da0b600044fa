"""A folder on a page: the checkpoints of a run, or the versions of a model."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..core.cli.console import columns, table, without, wrapped
from ..core.words import counted, printable, show_bytes, show_names

if TYPE_CHECKING:
    from .tables import CheckpointRow

LEAST = 16  # columns that a name keeps


def _verdict(entry: CheckpointRow) -> str:
    """Return whether a checkpoint is whole, and what else one must know of it, in words."""
    if entry.problem:
        return f"no: {entry.problem}"
    whole = "whole, without an optimizer" if entry.optimizer is False else "whole"
    whole = f"a {entry.is_part}" if entry.is_part else whole
    return f"{whole}; could run {show_names(entry.could_run, 2)}" if entry.could_run else whole


def run_page(folder: str, entries: Sequence[CheckpointRow], width: int | None) -> Iterator[str]:
    """Yield the lines for a folder of several checkpoints: a table, and the command for the newest."""
    yield f"{printable(folder)}: {counted(len(entries), 'checkpoint')}, newest first"
    rows: list[tuple[str, ...]] = [("checkpoint", "step", "format", "bytes", "")]
    for entry in entries:
        path, step = os.path.relpath(entry.path, folder), "" if entry.step is None else str(entry.step)
        rows.append((printable(path), step, entry.format or "", show_bytes(entry.nbytes), _verdict(entry)))
    if all(entry.step is None for entry in entries):
        rows = [(path, *others) for path, _, *others in rows]
    yield from _with_verdicts(rows, (0, len(rows[0]) - 3), width)
    newest = next((entry for entry in entries if not entry.problem), entries[0])
    yield from ("", f"ckpttool inspect {shlex.quote(newest.path)}")


def versions_page(folder: str, found: Sequence[Any], width: int | None) -> Iterator[str]:
    """Yield the lines for a folder of versions: a table, and the command for the newest that can be made."""
    yield f"{printable(folder)}: {counted(len(found), 'version')}, the oldest first"
    rows = [("version", "made from", "bytes", "format", "")]
    for each in found:
        base = "" if each.base is None else str(each.base)
        rows.append((str(each.version), base, show_bytes(each.nbytes), each.form or "", each.problem))
    yield from _with_verdicts(rows, (3,), width)
    numbered = {each.version: each for each in found}
    first = newest = next((each for each in reversed(found) if each.complete), None)
    while first and first.base in numbered:
        first = numbered[first.base]
    if newest and first:
        base = "" if first.base is None else "BASE "
        yield ""
        if base:
            yield f"the newest; BASE is version {first.base}:"
        yield f"ckpttool apply {base}{shlex.quote(folder)} new.safetensors"


def _with_verdicts(rows: Sequence[Sequence[str]], lefts: tuple[int, ...], width: int | None) -> Iterator[str]:
    """Yield a table whose last column says what is wrong; where it is too wide, that stands below its row."""
    widest = sum(max(map(columns, column)) + 2 for column in zip(*rows, strict=True)) - 2
    if width is None or widest <= width:
        yield from table(rows, (*lefts, len(rows[0]) - 1))
        return
    cells = [row[:-1] for row in rows]
    lines = [*fitted(cells[0], cells, [("format", False), ("bytes", True)], lefts, width)]
    for line, row in zip(lines, rows, strict=False):
        yield line
        yield from (f"    {part}" for part in wrapped(row[-1], width - 4))
    yield from lines[len(rows) :]


def fitted(
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
    giving_way: Sequence[tuple[str, bool]],  # and whether names, the first column, are cut before it goes
    to_the_left: Collection[int],
    width: int | None,
) -> Iterator[str]:
    """Yield a table without the columns that give way, in this order, to a narrow terminal; name those."""
    if width is None or not cells:
        yield from table(cells, to_the_left, width)
        return
    widths = [max(map(columns, column)) for column in zip(*cells, strict=True)]
    shown, hidden = [*range(len(widths))], []
    for head, after_names in giving_way:
        first = min(widths[0], LEAST) if after_names else widths[0]
        others = (min(widths[i], LEAST) if heads[i] == "shared with" else widths[i] for i in shown[1:])
        if first + sum(wide + 2 for wide in others) > width:
            shown.remove(heads.index(head))
            hidden.append(head)
    lefts = [place for place, i in enumerate(shown) if i in to_the_left]
    yield from table([[line[i] for i in shown] for line in cells], lefts, width)
    yield from without([head for head in heads if head in hidden], width)
