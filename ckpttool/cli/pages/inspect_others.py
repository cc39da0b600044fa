"""What `inspect` shows besides a model: values that are no tensors, and the checkpoints in a folder."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ...transforms.wrappers import LIGHTNING
from ..console import counted, printable, show_bytes, table

if TYPE_CHECKING:
    from ...analysis.other_contents import OtherRow
    from ...analysis.summary import Summary
    from ...analysis.tables import CheckpointRow

MAX_OTHERS = 12  # Values below one name that are shown without `-v`

FIRST = ("hyper_parameters", "datamodule_hyper_parameters")  # Entries of a Lightning file that stand first

FOLDED = ("loops", "callbacks")  # Entries of a Lightning file that hold its own bookkeeping


def others(summary: Summary, *, everything: bool) -> Iterator[tuple[str, str]]:
    """Yield name and value of everything that no other part of the page shows."""
    groups = [(name, list(rows)) for name, rows in groupby(summary.other, _group)]
    lightning = any(name == LIGHTNING for name, _ in groups)
    if lightning:
        groups.sort(key=lambda group: group[0] not in FIRST)
    training = [row.name for row in summary.optimizers] + [row.name for row in summary.schedulers]
    shown = [name for name in training if name]
    inside, around = tuple(f"{name}." for name in shown), {name.rpartition(".")[0] for name in shown}
    if summary.model:
        around.add(summary.state or "")
    for name, rows in groups:
        if lightning and name in FOLDED and not everything:
            yield printable(name), _folded(name, rows)
            continue
        if not everything:
            rows = [row for row in rows if row.name not in around and not row.name.startswith(inside)]
        most = len(rows) if everything else MAX_OTHERS
        yield from ((printable(row.name), _value(row)) for row in rows[:most])
        if len(rows) > most:
            yield f"{printable(name)}.…", f"{len(rows) - most:,} more: -v shows them all"
    most = len(summary.other_tensors) if everything else MAX_OTHERS
    for held in summary.other_tensors[:most]:
        yield printable(held.name), f"{counted(held.tensors, 'tensor', 'tensors')}, {show_bytes(held.nbytes)}"
    if len(summary.other_tensors) > most:
        yield "…", f"{len(summary.other_tensors) - most:,} more with tensors: -v shows them all"


def _group(row: OtherRow) -> str:
    return row.name.partition(".")[0]


def _folded(name: str, rows: Sequence[OtherRow]) -> str:
    """Return the names of loops or callbacks, with keys such as `EarlyStopping{'mode': 'min'}`."""
    keys = (re.split(r"[.{]", row.name[len(name) + 1 :])[0] for row in rows)
    shown = printable(", ".join(filter(None, dict.fromkeys(keys))))
    return f"{counted(len(rows), 'value', 'values')} of {shown}" if shown else _value(rows[0])


def _value(row: OtherRow) -> str:
    if row.has_value:
        text = row.value if isinstance(row.value, str) else str(row.value)
        return printable(text)[:200] if text else "''"
    return printable(row.type) + (f" of {row.size}" if row.size is not None else "")


def run_page(folder: str, entries: Sequence[CheckpointRow], width: int | None) -> Iterator[str]:
    """Yield the lines for a folder of several checkpoints: a table, and the command for the newest."""
    yield f"{printable(folder)}: {counted(len(entries), 'checkpoint', 'checkpoints')}, newest first"
    rows = [
        (
            os.path.relpath(entry.path, folder),
            "" if entry.step is None else str(entry.step),
            entry.format or "",
            show_bytes(entry.nbytes),
            f"no: {entry.problem}" if entry.problem else "whole",
        )
        for entry in entries
    ]
    yield from table([("checkpoint", "step", "format", "bytes", ""), *rows], (0, 2, 4), width)
    whole = next((entry for entry in entries if not entry.problem), entries[0])
    yield ""
    yield f"ckpttool inspect {shlex.quote(whole.path)}"
