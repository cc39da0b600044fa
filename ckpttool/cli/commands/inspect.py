"""The command `ckpttool inspect`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ...errors import SeveralCheckpoints
from .. import options
from ..console import Console, terminal_width
from ..reading import Answer, answer_each, fields_of, open_file

if TYPE_CHECKING:
    from ...analysis.other_contents import OtherRow
    from ...analysis.summary import Summary
    from ...analysis.tables import Stats, TensorRow
    from ...checkpoint.checkpoint import Checkpoint


@click.command("inspect")
@options.files_argument
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Show modules N levels deep.")
@click.option("--tensors", "listed", is_flag=True, help="One line per tensor: name, dtype, shape, bytes.")
@click.option(
    "--stats", "measured", is_flag=True, help="Read every value: min, max, mean, standard deviation, NaN."
)
@options.state_option
@options.no_verify_option
@options.reading
def command(
    files: tuple[str, ...],
    depth: int | None,
    listed: bool,
    measured: bool,
    state: str | None,
    no_verify: bool,
    **given: Any,
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
    from ..pages.inspect import page, stats_table, tensor_lines

    console = options.console(given)

    def answer(file: str) -> Answer:
        try:
            opened = open_file(console, file)
        except SeveralCheckpoints:
            if (run := _of_run(file)) is None:
                raise
            return run
        with opened as checkpoint:
            summary = summarize(checkpoint, state)
            stats = _measure(console, checkpoint, not no_verify) if measured else {}
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
    from ..pages.inspect_others import run_page

    found = checkpoint_rows(folder)
    if not any(entry.format for entry in found):
        return None
    fields = [
        fields_of(entry, {"nbytes": "bytes"}) | {"whole": not entry.problem, "problem": entry.problem or None}
        for entry in found
    ]
    data = {"path": folder, "checkpoints": fields}
    return Answer("\n".join(run_page(folder, found, terminal_width(sys.stdout))), data)


def _lines() -> int:
    """Return how many lines of modules fit on the terminal with the facts."""
    return max(shutil.get_terminal_size().lines - 12, 12) if sys.stdout.isatty() else 40


def _measure(console: Console, checkpoint: Checkpoint, verify: bool) -> Mapping[str, Stats | None]:
    from ...analysis.tables import measure
    from ...checkpoint.checksums import Checksums

    found: dict[str, Stats | None] = {}
    read = checkpoint.storages() if verify else ()
    with console.progress(checkpoint.nbytes, "reading") as progress, Checksums(checkpoint, read) as checksums:
        for name, tensor in checkpoint.tensors():
            found[name] = measure(name, tensor)
            if progress:
                progress(tensor.nbytes)
        checksums.finish()
    return found


def _fields(
    summary: Summary, rows: Iterable[TensorRow], stats: Mapping[str, Stats | None]
) -> dict[str, object]:
    here, renamed = summary.here, {"nbytes": "bytes", "unused": "unused_bytes", "running": "could_run"}
    own = ("likes", "modules", "here", "outside", "other", *([] if summary.ranks else ["ranks"]))
    data = fields_of(summary, renamed, without=own)
    return data | {
        "dtypes": here.dtypes,
        "devices": here.devices,
        "state_bytes": here.nbytes,
        "tensors": [_tensor_fields(row, stats) for row in rows],
        "other": [_other_fields(row) for row in summary.other],
    }


def _tensor_fields(row: TensorRow, stats: Mapping[str, Stats | None]) -> dict[str, object]:
    fields = row._asdict()
    if row.kind is None:
        del fields["kind"], fields["local_shape"]
    if row.name in stats:
        found = stats[row.name]
        fields["stats"] = asdict(found) if found else None
    return fields


def _other_fields(row: OtherRow) -> dict[str, object]:
    fields: dict[str, object] = {"name": row.name, "type": row.type}
    if row.has_value:
        fields["value"] = row.value
    if row.size is not None:
        fields["size"] = row.size
    return fields
