"""Files that hold a part of a model alone: one rank's pieces, one shard, one slice of a parallel run."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...checkpoint.checkpoint import SHARDING, Checkpoint
from ...errors import CkptToolError
from ...formats.reading import open as open_checkpoint
from .fit import Fit
from .lines import command_line
from .report import Diagnosis, Problem, free_output

SHARD = re.compile(r".+-(\d{5})-of-(\d{5})\.(?:safetensors|bin)")
ZERO = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_\d+_(?:optim|model)_states\.pt")
# Slices of tensor parallel runs, and what lies next to them: nothing here knows how they were cut.
SLICES = (
    (re.compile(r"consolidated\.\d+\.pth"), "consolidated.*.pth", "a Meta checkpoint"),
    (re.compile(r"model_(?:optim_)?rng\.pt"), "../mp_rank_*/model*_rng.pt", "a Megatron checkpoint"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """A file that is a part of a whole."""

    kind: str
    message: str
    folder: str  # of the whole; "" where no command joins its parts

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
            if folder:
                message += f"; copy all of them into {folder}, then: "
                message += command_line(["ckpttool", "merge", folder, "OUT.pt"])
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
    if shard := SHARD.fullmatch(name):
        number, count = int(shard[1]), int(shard[2])
        return Part("one-shard", f"the file is shard {number} of {count}", folder) if count > 1 else None
    if rank := ZERO.fullmatch(name):
        return Part("one-rank", f"the file is what rank {int(rank[1])} of a DeepSpeed run wrote", folder)
    for pattern, others, whose in SLICES:
        count = len(glob.glob(os.path.join(glob.escape(folder), others)))
        if count > 1 and pattern.fullmatch(name):
            message = f"the file is one of {count} slices of {whose}, which no command here joins: export it "
            return Part("one-slice", message + "to Hugging Face's format with the framework's own script", "")
    return None


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
