"""The command `ckpttool inspect`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..core.cli import options
from ..core.cli.console import Console, terminal_width
from ..core.cli.reading import Answer, answer_each, fields_of, open_file
from ..core.cli.schemas import Fields, fields_like
from ..core.words import counted, number, printable
from ..errors import SeveralCheckpoints, Unreadable
from ..rooms import find

if TYPE_CHECKING:
    from .other_contents import OtherRow
    from .summary import Summary
    from .tables import Stats, TensorRow

STATS = ("tensor", "dtype", "shape", "min", "max", "mean", "std", "not finite")
TENSORS = (*STATS[:3], "bytes", "shared with")


def _printed() -> list[Fields]:
    from .summary import Summary
    from .tables import CheckpointRow, Stats, TensorRow

    tensor = {
        **fields_like(TensorRow, maybe=("kind", "local_shape")),
        "stats?": (Stats | None, "with --stats"),
    }
    other: Fields = {
        "name": (str, "its dotted path"),
        "type": (str, "its type"),
        "value?": (object, "the value, when it is plain and short"),
        "size?": (int, "the number of entries of a container"),
        "same_as?": (str, "the first name of a container in several places, where its entries are"),
    }
    file: Fields = {
        **fields_like(Summary),
        "dtypes": (dict[str, int], "dtype -> how many tensors of the state have it"),
        "devices": (dict[str, int], "device -> how many tensors of the state are tagged with it"),
        "state_bytes": (int, "bytes of the state's tensors, ties counted once"),
        "tensors": ([tensor], "every tensor of the file"),
        "other": ([other], "everything that is not a tensor"),
    }
    if (adapters := find("lora.dialects")) is not None:
        file["adapter?"] = (fields_like(adapters.AdapterSummary), "of a LoRA adapter")
    checkpoint: Fields = {
        **fields_like(CheckpointRow),
        "whole": (bool, "whether it can be read"),
        "problem": (str | None, "why it can't"),
    }
    run: Fields = {
        "path": (str, "the folder of a run"),
        "checkpoints": ([checkpoint], "those in it, the newest first"),
    }
    versions: list[Fields] = []
    if (room := find("deltas.versions")) is not None:
        each = {
            "path": (str, "a folder of versions"),
            "versions": ([fields_like(room.Version)], "the oldest first"),
        }
        versions.append(each)
    return [file, run, *versions]


@options.command("Look", "Show what is in a file, without running any of it", _printed, several=True)
@options.files_argument
@options.option("--depth N", "Show modules N levels deep.", type=click.IntRange(1))
@options.flag("--tensors", "One line per tensor: name, dtype, shape, bytes.", "listed")
@options.flag("--stats", "Read every value: min, max, mean, standard deviation, NaN.", "measured")
@options.state_option
@options.no_verify_option
@options.reading
def inspect(
    console: Console, files: tuple[str, ...], depth: int | None, state: str | None, **flags: Any
) -> int:
    """Show what is in each FILE, without loading it or running anything it names.

    Modules are shown as a tree, as deep as fits on a screen; identical ones in a row are shown in one line,
    with their totals. Of a run's folder the checkpoints in it are listed, and of a folder of versions which
    of them can be made.

    \b
    Example:
      ckpttool inspect last.pt
    """
    from .page import page
    from .summary import summarize
    from .tables import BINS, measure_all, tensor_rows

    listed, measured, verify = flags["listed"], flags["measured"], not flags["no_verify"]
    pages = options.added(flags, console, *files)

    def answer(file: str) -> Answer:
        try:
            opened = open_file(console, file)
        except Unreadable as fault:
            several = None if pages else _of_versions(file)
            if several is None and not pages and isinstance(fault, SeveralCheckpoints):
                several = _of_run(file)
            if several is None:
                raise
            return several
        with opened as checkpoint:
            summary = summarize(checkpoint, state)
            stats: Mapping[str, Stats | None] = {}
            if measured:
                with console.progress(checkpoint.nbytes, "reading") as progress:
                    bins = BINS if pages else 0
                    stats = measure_all(checkpoint, bins=bins, verify=verify, progress=progress)
            for write in pages:
                write(checkpoint, summary, stats)
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
                fit = max(shutil.get_terminal_size().lines - 12, 12) if sys.stdout.isatty() else 40
                lines = page(summary, depth, width, fit, everything=console.verbose)
            return Answer("\n".join(lines), {})

    return answer_each(files, console, answer, between="" if listed else "\n")


def _of_versions(folder: str) -> Answer | None:
    """Return the table of the versions in a folder; None if none of them is a delta of another program."""
    from ..core.remote.places import is_folder
    from .folder_page import versions_page

    versions: Any = find("deltas.versions")
    found = versions.in_folder(folder) if versions and is_folder(folder) else []
    if all(each.base is None or each.form == "safetensors" for each in found):  # our own are a run's
        return None
    lines = versions_page(folder, found, terminal_width(sys.stdout))
    return Answer("\n".join(lines), {"path": folder, "versions": [*map(fields_of, found)]})


def _of_run(folder: str) -> Answer | None:
    """Return the table of the checkpoints in a run's folder; None if none of them can be read."""
    from .folder_page import run_page
    from .tables import checkpoint_rows

    rows = checkpoint_rows(folder)
    if not any(row.format for row in rows):
        return None
    told = [fields_of(row) | {"whole": not row.problem, "problem": row.problem or None} for row in rows]
    lines = run_page(folder, rows, terminal_width(sys.stdout))
    return Answer("\n".join(lines), {"path": folder, "checkpoints": told})


def _fields(
    summary: Summary, rows: Iterable[TensorRow], stats: Mapping[str, Stats | None]
) -> dict[str, object]:
    here = summary.here
    adapter = {"adapter": fields_of(summary.adapter)} if summary.adapter else {}
    return (
        fields_of(summary)
        | adapter
        | {
            "dtypes": here.dtypes,
            "devices": here.devices,
            "state_bytes": here.nbytes,
            "tensors": [_tensor_fields(row, stats) for row in rows],
            "other": [_other_fields(row) for row in summary.other],
        }
    )


def _other_fields(row: OtherRow) -> dict[str, object]:
    fields = {"name": row.name, "type": row.type} | ({"value": row.value} if row.has_value else {})
    more = {"size": row.size, "same_as": row.same_as}
    return fields | {name: value for name, value in more.items() if value is not None}


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
    from .folder_page import fitted

    cells: list[Sequence[str]] = []
    for row in rows:
        tensor = (printable(row.name), row.type, row.sizes, str(row.nbytes), printable(row.shared_with or ""))
        cells.append((*tensor, *(_figures(stats.get(row.name)) if stats else ())))
    if width is not None:
        giving_way = [("shared with", True), ("bytes", True)]
        return fitted((*TENSORS, *STATS[3:]), cells, giving_way, (0, 1, 4), width)
    header = [(*TENSORS, *STATS[3:])] if stats and cells else []
    return map("\t".join, [*header, *cells])


def stats_table(
    rows: Iterable[TensorRow], stats: Mapping[str, Stats | None], width: int | None
) -> Iterator[str]:
    """Yield a table of statistics with one line per tensor."""
    from ..core.checkpoint.module_tree import shape_in_words
    from .folder_page import fitted

    cells: list[Sequence[str]] = [STATS]
    for row in rows:
        shape = row.sizes if row.shape is None else shape_in_words(row.shape)
        cells.append((printable(row.name), row.type, shape, *_figures(stats.get(row.name))))
    if len(cells) == 1:
        return
    if not any(stat and stat.non_finite for stat in stats.values()):
        cells = [line[:-1] for line in cells]
    giving_way = [("std", False), ("mean", False), ("dtype", True), ("shape", True)]
    yield from fitted(STATS, cells, giving_way, (0, 1), width)


def _figures(stat: Stats | None) -> list[str]:
    if stat is None:
        return ["-"] * 5
    numbers = stat.minimum, stat.maximum, stat.mean, stat.deviation
    return [*("-" if value is None else number(value, 4) for value in numbers), str(stat.non_finite)]
