"""The command `ckpttool inspect`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from ...errors import SeveralCheckpoints
from ...words import number
from .. import options
from ..console import Console, counted, printable, show_bytes
from ..layout import columns, table, terminal_width, without
from ..reading import Answer, answer_each, fields_of, open_file

if TYPE_CHECKING:
    from ...analysis.summary import Summary
    from ...analysis.tables import CheckpointRow, Stats, TensorRow
    from ...checkpoint.checkpoint import Checkpoint


STATS = ("tensor", "dtype", "shape", "min", "max", "mean", "std", "not finite")
TENSORS = (*STATS[:3], "bytes", "shared with")
LEAST = 16  # columns that a name keeps


@click.command("inspect")
@options.files_argument
@options.option("--depth N", "Show modules N levels deep.", type=click.IntRange(1))
@options.flag("--tensors", "One line per tensor: name, dtype, shape, bytes.", "listed")
@options.flag("--stats", "Read every value: min, max, mean, standard deviation, NaN.", "measured")
@options.state_option
@options.no_verify_option
@options.page_options
@options.reading
def command(
    console: Console,
    files: tuple[str, ...],
    depth: int | None,
    state: str | None,
    html: str | None,
    force: bool,
    **flags: bool,
) -> int:
    """Show what is in each FILE, without loading it or running anything it names.

    Modules are shown as a tree, as deep as fits on a screen; identical ones in a row are shown in one line,
    with their totals. Of a run's folder the checkpoints in it are listed.

    \b
    Example:
      ckpttool inspect last.pt
    """
    from ...analysis.summary import summarize
    from ...analysis.tables import tensor_rows
    from ..inspect_page import page

    listed, measured, verify = flags["listed"], flags["measured"], not flags["no_verify"]
    if html is not None and len(files) > 1:
        raise click.UsageError(f"--html {html}: a page is of one FILE")
    place = None
    if html is not None:
        from ...reporting import contents, report

        place = report.page_place(html, files, force)

    def answer(file: str) -> Answer:
        try:
            opened = open_file(console, file)
        except SeveralCheckpoints:
            if html is not None or (run := _of_run(file)) is None:
                raise
            return run
        with opened as checkpoint:
            summary = summarize(checkpoint, state)
            stats = _measure(console, checkpoint, verify, bool(html)) if measured else {}
            if place is not None:
                about = {"checkpoint": contents.contents(checkpoint, summary, stats)}
                report.write(place, (checkpoint.path,), about)
                console.note(f"page -> {printable(place.path)}")
            if unseen := sum(source.unchecked for source in (checkpoint.source, *checkpoint.shards)):
                records = counted(unseen, "record has a header", "records have headers")
                console.note(f"only the directory was read: {records} too, compared when the bytes are read")
            if console.json:
                return Answer("", _fields(summary, tensor_rows(checkpoint), stats))
            width = terminal_width(sys.stdout)
            if measured and (width or not listed):
                lines = stats_table(tensor_rows(checkpoint), stats, width)
            elif listed:
                lines = tensor_lines(tensor_rows(checkpoint), width, stats)
            else:
                lines = page(summary, depth, width, _lines(), everything=console.verbose)
            return Answer("\n".join(lines), {})

    return answer_each(files, console, answer, between="" if listed else "\n")


def _of_run(folder: str) -> Answer | None:
    """Return the table of the checkpoints in a run's folder; None if none of them can be read."""
    from ...analysis.tables import checkpoint_rows

    rows = checkpoint_rows(folder)
    if not any(row.format for row in rows):
        return None
    checkpoints = [
        fields_of(row, {"nbytes": "bytes"}) | {"whole": not row.problem, "problem": row.problem or None}
        for row in rows
    ]
    lines = _run_page(folder, rows, terminal_width(sys.stdout))
    return Answer("\n".join(lines), {"path": folder, "checkpoints": checkpoints})


def _lines() -> int:
    """Return how many lines of modules fit on the terminal with the facts."""
    return max(shutil.get_terminal_size().lines - 12, 12) if sys.stdout.isatty() else 40


def _measure(
    console: Console, checkpoint: Checkpoint, verify: bool, for_page: bool
) -> Mapping[str, Stats | None]:
    from ...analysis.tables import BINS, measure_all

    bins = BINS if for_page else 0
    with console.progress(checkpoint.nbytes, "reading") as progress:
        return measure_all(checkpoint, bins=bins, verify=verify, progress=progress)


def _fields(
    summary: Summary, rows: Iterable[TensorRow], stats: Mapping[str, Stats | None]
) -> dict[str, object]:
    here, renamed = summary.here, {"nbytes": "bytes", "unused": "unused_bytes", "running": "could_run"}
    absent = [name for name in ("ranks", "commit", "made_of") if not getattr(summary, name)]
    own = ("likes", "modules", "here", "outside", "other", *absent)
    return fields_of(summary, renamed, without=own) | {
        "dtypes": here.dtypes,
        "devices": here.devices,
        "state_bytes": here.nbytes,
        "tensors": [_tensor_fields(row, stats) for row in rows],
        "other": [
            {"name": row.name, "type": row.type}
            | ({"value": row.value} if row.has_value else {})
            | ({"size": row.size} if row.size is not None else {})
            | ({"same_as": row.same_as} if row.same_as is not None else {})
            for row in summary.other
        ],
    }


def _tensor_fields(row: TensorRow, stats: Mapping[str, Stats | None]) -> dict[str, object]:
    fields = row._asdict()
    if row.kind is None:
        del fields["kind"], fields["local_shape"]
    if row.name in stats:
        measured = stats[row.name]
        fields["stats"] = measured and fields_of(measured)
    return fields


def tensor_lines(
    rows: Iterable[TensorRow], width: int | None, stats: Mapping[str, Stats | None] | None = None
) -> Iterator[str]:
    """Yield one line per tensor: name, dtype, shape, bytes, the name it shares memory with, statistics."""
    cells: list[Sequence[str]] = []
    for row in rows:
        tensor = (printable(row.name), row.type, row.sizes, str(row.nbytes), printable(row.shared_with or ""))
        cells.append((*tensor, *(_figures(stats.get(row.name)) if stats else ())))
    if width is not None:
        giving_way = [("shared with", True), ("bytes", True)]
        return _fitted((*TENSORS, *STATS[3:]), cells, giving_way, (0, 1, 4), width)
    header = [(*TENSORS, *STATS[3:])] if stats and cells else []
    return map("\t".join, [*header, *cells])


def stats_table(
    rows: Iterable[TensorRow], stats: Mapping[str, Stats | None], width: int | None
) -> Iterator[str]:
    """Yield a table of statistics with one line per tensor."""
    from ...checkpoint.module_tree import shape_in_words

    cells: list[Sequence[str]] = [STATS]
    for row in rows:
        shape = row.sizes if row.shape is None else shape_in_words(row.shape)
        cells.append((printable(row.name), row.type, shape, *_figures(stats.get(row.name))))
    if len(cells) == 1:
        return
    if not any(stat and stat.non_finite for stat in stats.values()):
        cells = [line[:-1] for line in cells]
    giving_way = [("std", False), ("mean", False), ("dtype", True), ("shape", True)]
    yield from _fitted(STATS, cells, giving_way, (0, 1), width)


def _fitted(
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


def _figures(stat: Stats | None) -> list[str]:
    if stat is None:
        return ["-"] * 5
    numbers = stat.minimum, stat.maximum, stat.mean, stat.deviation
    return [*("-" if value is None else number(value, 4) for value in numbers), str(stat.non_finite)]


def _run_page(folder: str, entries: Sequence[CheckpointRow], width: int | None) -> Iterator[str]:
    """Yield the lines for a folder of several checkpoints: a table, and the command for the newest."""
    yield f"{printable(folder)}: {counted(len(entries), 'checkpoint')}, newest first"
    rows: list[tuple[str, ...]] = [("checkpoint", "step", "format", "bytes", "")]
    for entry in entries:
        path, step = os.path.relpath(entry.path, folder), "" if entry.step is None else str(entry.step)
        verdict = "whole, without an optimizer" if entry.optimizer is False else "whole"
        if entry.problem:
            verdict = f"no: {entry.problem}"
        rows.append((path, step, entry.format or "", show_bytes(entry.nbytes), verdict))
    if all(entry.step is None for entry in entries):
        rows = [(path, *others) for path, _, *others in rows]
    yield from table(rows, (0, len(rows[0]) - 3, len(rows[0]) - 1), width)
    whole = next((entry for entry in entries if not entry.problem), entries[0])
    yield ""
    yield f"ckpttool inspect {shlex.quote(whole.path)}"
