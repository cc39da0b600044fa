"""What a folder of several checkpoints holds: the step, format and size of each, and whether it is whole."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..checkpoint.special_tensors import SHARDED
from ..errors import CkptToolError, FileError
from ..formats.one_of_several import piece_of
from ..formats.reading import open as open_checkpoint
from ..formats.roots import checkpoints_below, step_in

# Checkpoints that are opened; the newest of a run come first.
MOST = 200


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint of a run."""

    path: str
    step: int | None
    format: str | None  # None where it can't be read
    nbytes: int
    problem: str  # why it is not whole; empty where it is


def entries(folder: str) -> list[Entry]:
    """Return the checkpoints below a folder that is none itself, the newest first."""
    return [_entry(folder, path) for path in checkpoints_below(folder)[:MOST]]


def _entry(folder: str, path: str) -> Entry:
    step = step_in(os.path.relpath(path, folder))
    try:
        with open_checkpoint(path) as checkpoint:
            ranks = checkpoint.ranks
            missing = ", ".join(map(str, ranks.missing[:8])) if ranks else ""
            problem = f"files of ranks {missing} are missing" if missing else ""
            if any(like.kind in SHARDED for _, like in checkpoint.special_tensors()):
                problem = "it holds one rank's pieces of tensors"
            elif not os.path.isdir(path) and (piece := piece_of(path)) and piece.others:
                problem = f"it is {piece.what}"
            stated = ranks.step if ranks and step is None else step
            return Entry(path, stated, checkpoint.format, checkpoint.nbytes, problem)
    except CkptToolError as error:
        reason = error.reason if isinstance(error, FileError) else error.message
        return Entry(path, step, None, _size(path), reason)


def _size(path: str) -> int:
    if not os.path.isdir(path):
        return os.path.getsize(path) if os.path.exists(path) else 0
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
