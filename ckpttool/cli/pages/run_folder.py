"""The page that `inspect` prints of a run's folder: a table of the checkpoints in it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..console import counted, printable, show_bytes, table

if TYPE_CHECKING:
    from ...analysis.run_folder import Entry


def page(folder: str, entries: Sequence[Entry], width: int | None) -> Iterator[str]:
    """Yield the lines of the page."""
    yield f"{printable(folder)}: {counted(len(entries), 'checkpoint', 'checkpoints')}, the newest first"
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
