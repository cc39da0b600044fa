"""Opening what many ranks wrote as one checkpoint, by the first framework that knows the files."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...checkpoint.checkpoint import Checkpoint
from ...errors import UsageFault
from . import deepspeed, hf_pieces, rank_files
from .dcp_folders import read_together, with_ranks
from .ranked import Framework, opened

FRAMEWORKS: tuple[Framework, ...] = (deepspeed, hf_pieces, rank_files)


def read_folder(folder: str, take_rank: int | None = None) -> Checkpoint | None:
    """Return what ranks wrote into a folder as one checkpoint; None if no framework knows the files.

    Raises:
        Unreadable, Damaged, Unsupported: as `Framework.read`, and as a file can't be read.
    """
    found = _by_ranks(folder, take_rank)
    together = read_together(folder)
    if together is None or found is None:
        return found or (together if take_rank is None else None)
    return with_ranks(together, found)


def _by_ranks(folder: str, take_rank: int | None) -> Checkpoint | None:
    for framework in FRAMEWORKS:
        paths = framework.candidates(folder)
        if paths:
            found = framework.read(folder, opened(paths), take_rank)
            if found is not None:
                return found
    return None


def read_files(paths: Sequence[str], take_rank: int | None = None) -> Checkpoint:
    """Return files that ranks wrote as one checkpoint.

    Raises:
        UsageFault: they are not the files of ranks that a framework wrote.
        Unreadable, Damaged, Unsupported: as `read_folder`.
    """
    folders = {os.path.dirname(path) or "." for path in paths}
    name = folders.pop() if len(folders) == 1 else paths[0]
    files = opened(paths)
    for framework in FRAMEWORKS:
        found = framework.read(name, files, take_rank)
        if found is not None:
            return found
    raise UsageFault(
        f"{paths[0]}: holds no piece of a tensor that one rank of several wrote",
        hint="for the mean of checkpoints: ckpttool average; for shards, name their index or folder",
    )
