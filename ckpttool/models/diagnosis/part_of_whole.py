"""Files that hold a part of a model alone: one rank's pieces, one shard, or slices of tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...checkpoint.checkpoint import SHARDING, Checkpoint
from ...errors import CkptToolError
from ...formats.one_of_several import piece_of
from ...formats.reading import open as open_checkpoint
from .fit import Fit
from .lines import command_line
from .report import Diagnosis, Problem, free_output

ZERO = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_\d+_(?:optim|model)_states\.pt")


@dataclass(frozen=True, slots=True)
class Part:
    """A file that is a part of a whole."""

    kind: str
    message: str
    folder: str  # of the whole; "" where no command joins its parts
    way: str = ""  # to the whole, if the folder isn't one

    @contextmanager
    def opened(self) -> Iterator[Checkpoint | None]:
        """Open the whole; None where it can't be read."""
        try:
            whole = open_checkpoint(self.folder) if self.folder else None
        except CkptToolError:
            whole = None
        if whole is None:
            yield None
        else:
            with whole:
                yield whole if whole.ranks is None or not whole.ranks.missing else None

    def diagnosis(self, part: Checkpoint, below: Diagnosis | None, spec: str) -> Diagnosis:
        """Return the diagnosis of the file, by that of the whole."""
        message, folder = self.message, self.folder
        problems: tuple[Problem, ...]
        if below is None:
            merge = command_line(["ckpttool", "merge", folder, "OUT.pt"])
            message += f"; {self.way or f'copy all of them into {folder}, then: {merge}'}"
            problems, then = (Problem(self.kind, message),), None
        elif any(not problem.is_remark for problem in below.problems):
            message += "; what follows is of the whole folder"
            problems, then = (Problem(self.kind, message), *below.problems), below.then
        else:
            output = free_output(folder, part)
            merge = command_line(["ckpttool", "merge", folder, output])
            problems = (Problem(self.kind, message, merge), *below.problems)
            then = command_line(["ckpttool", "reload", output, "--model", spec])
        state, python = (None, None) if below is None else (below.state, below.python)
        return Diagnosis(part.path, part.format, state, False, Fit(), problems, then, python)


def named_part(path: str) -> Part | None:
    """Return what a file that does not fit is a part of, by its name and what lies next to it."""
    folder, name = os.path.dirname(path) or ".", os.path.basename(path)
    if rank := ZERO.fullmatch(name):
        return Part("one-rank", f"the file is what rank {int(rank[1])} of a DeepSpeed run wrote", folder)
    piece = piece_of(path)
    if piece is None:
        return None
    is_shard = piece.what.startswith("shard")
    kind, message = "one-shard" if is_shard else "one-slice", f"the file is {piece.what}"
    return Part(kind, message, folder if is_shard else "", piece.way)


def rank_s_pieces(checkpoint: Checkpoint, where: str | None) -> Part | None:
    """Return what a file with pieces of tensors is a part of; None if its tensors are whole."""
    folder = os.path.dirname(checkpoint.path) or "."
    if SHARDING in checkpoint.metadata:
        return Part("one-rank", "the file holds one rank's pieces of tensors", folder)
    state = checkpoint.found_state() if where is None else checkpoint.state(where)
    pieces = {name: like for name, like in (state.likes if state else {}).items() if like.is_piece}
    if not pieces:
        return None
    name, like = next(iter(pieces.items()))
    rank = re.search(r"rank \d+ of \d+", like.form)
    whose = f"the file is {rank[0]}" if rank else "the file is of one rank"
    count = f"{len(pieces)} of its tensors are pieces" if len(pieces) > 1 else "a tensor of it is a piece"
    return Part("one-rank", f"{whose}: {count}, such as '{name[:80]}' ({like})", folder)
