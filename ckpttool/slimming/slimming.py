"""The older checkpoints of a run's folder, slimmed where they lie: `slim --in-place`.

One file after another is replaced at once, so a kill leaves each as it was or slimmed, and the next call goes
on. A file keeps its time, by which a run finds its newest checkpoint, and its other names in the folder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..core import formats
from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.optimizer_view import is_optimizer
from ..core.checkpoint.selection import drop, slim
from ..core.files.commit import LinkedFile, files_in, give_name, locked, naming, remove_half_given
from ..core.files.reflink import AUTO, NotShared
from ..core.files.resuming import remove_abandoned
from ..core.files.threads import Progress
from ..core.formats import safetensors
from ..core.formats.destination import Saved
from ..core.formats.pytorch import legacy, tar
from ..core.formats.pytorch import zip as torch_zip
from ..core.formats.reading import open_alone
from ..core.formats.roots import step_in
from ..core.formats.saving import save
from ..core.inert_pickle.values import walk
from ..core.remote.urls import is_url
from ..core.words import counted
from ..deltas.forms import number_in
from ..deltas.header import is_delta, needed_by
from ..deltas.versions import holds_deltas
from ..errors import CkptToolError, Damaged, NothingToDo, Refused, UsageFault

# What is written in the place of each format.
WRITTEN = {safetensors.NAME: safetensors.NAME}
WRITTEN |= dict.fromkeys((torch_zip.NAME, legacy.NAME, tar.NAME), torch_zip.NAME)

# What a file is
TRAINING, WEIGHTS, DELTA = "a training's", "holds no optimizer's state", "is a delta"
NONE = "is no checkpoint"


@dataclass(frozen=True, slots=True)
class Slimmed:
    """A file of the folder, and what became of it.

    Attributes:
        name: its name in the folder, or the first of several hard links.
        links: its other names there, symbolic links among them.
        before: its size.
        after: its new size; the old one if it stays as it is.
        left_out: dotted names of what it no longer holds.
        why: why it stays as it is; "" if it does not.
    """

    name: str
    links: tuple[str, ...]
    before: int
    after: int
    left_out: tuple[str, ...] = ()
    why: str = ""

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is one of a model, slimmed or not."""
        return not self.why.startswith(NONE)


@dataclass(frozen=True, slots=True)
class SlimmedRun:
    """What became of a run's folder.

    Attributes:
        path: the folder.
        slimmed: the checkpoints that were replaced, the newest first.
        kept: the files that stay as they are, checkpoints or not, each with the reason.
    """

    path: str = field(metadata={"json": "output"})
    slimmed: tuple[Slimmed, ...]
    kept: tuple[Slimmed, ...]

    @property
    def freed(self) -> int:
        """Bytes that there is now room for."""
        return sum(file.before - file.after for file in self.slimmed)


class _Stays(Exception):
    """Why a file stays as it is."""


def slim_in_place(
    run: str | os.PathLike[str],
    *,
    keep_newest: int,
    leave_out: Iterable[str] = (),
    keep_anchors: bool = False,
    verify: bool | None = None,
    dry_run: bool = False,
    reflink: str = AUTO,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> SlimmedRun:
    """Replace the older checkpoints in a folder by slimmer ones, one after another.

    Those are files of torch or of safetensors with a model's state and an optimizer's. What else is there
    stays as it is, and so do folders, deltas, what deltas are built on, and files that have a name elsewhere
    too, whose room would not become free.

    Args:
        run: the folder. No run may write there meanwhile.
        keep_newest: how many checkpoints stay as they are, at least 1: by their times, and last.* first. A
            delta counts where it is a training's, over its base.
        leave_out: dotted names of what is left out, such as `optimizer`, of each file that has a model's
            state and one of them; by default all but the model's state.
        keep_anchors: leave files as they are whose names state a version, in a folder with deltas: a reader
            may begin with them.
        verify: as for `save`.
        dry_run: replace nothing; the same result.
        reflink: as for `save`.
        progress: called with the number of bytes after each piece.
        expect: called first, with the number of bytes that progress will come to.

    Returns:
        What became of each file.

    Raises:
        UsageFault: it is no folder, or is written to; `keep_newest` is less than 1.
        NothingToDo: no file would become smaller.
        Damaged: the bytes of a checkpoint do not match their checksums. It stays; all others are done.
        Refused: likewise, one was changed while it was looked at.
        FileError: the disk refuses. What was replaced by then stays so.

    Example:
        >>> [file.name for file in ckpttool.slim_in_place("runs/first", keep_newest=1).slimmed]
        ['step-1.pt']
    """
    folder, names = os.fspath(run), tuple(leave_out)
    choices: dict[str, Any] = {"verify": verify, "progress": progress, "reflink": reflink}
    if keep_newest < 1:
        raise UsageFault(f"--keep-newest {keep_newest}: the newest always stays", hint="give 1 or more")
    if is_url(folder) or not os.path.isdir(folder):
        raise UsageFault(f"{folder}: is not a folder on this machine", hint="name the folder of a run")
    with nullcontext() if dry_run else locked(folder, folder):
        if not dry_run:
            remove_abandoned(folder)
            remove_half_given(folder)
        files = sorted(files_in(folder), key=_age, reverse=True)
        stay = _reasons(folder, files, keep_newest, names, keep_anchors=keep_anchors)
        results = [_planned(folder, file, stay.get(file.names[0], ""), names, reflink) for file in files]
        slimmed = tuple(result for result in results if not result.why)
        kept = tuple(result for result in results if result.why)
        if not slimmed:
            raise _nothing(folder, kept)
        if expect is not None:
            expect(0 if dry_run else sum(result.after for result in slimmed))
        if not dry_run:
            by_name = {file.names[0]: file for file in files}
            in_order = sorted(slimmed, key=lambda result: result.after)  # the disk may be full
            each = [_replace(folder, by_name[result.name], names, **choices) for result in in_order]
            if failed := [fault for fault in each if fault]:
                raise _stayed(failed, each.count(None))
    return SlimmedRun(folder, slimmed, kept)


def _age(file: LinkedFile) -> tuple[bool, int, int, str]:
    """Return what sorts the newest last: what a run goes on from is its newest, whatever its time."""
    is_last = any(name.startswith("last.") for name in file.names)
    return is_last, file.facts.st_mtime_ns, step_in(file.names[0]) or 0, file.names[0]


def _reasons(
    folder: str, files: Sequence[LinkedFile], keep_newest: int, names: Sequence[str], *, keep_anchors: bool
) -> dict[str, str]:
    """Return why files stay as they are whatever is in them, by the first of their names."""
    why: dict[str, str] = {}
    deltas: list[str] = []
    newest = 0
    for file in files:
        name = file.names[0]
        kind = _kind(os.path.join(folder, name), names)
        if kind == TRAINING or (kind == DELTA and _makes_training(os.path.join(folder, name), names)):
            newest += 1
            if newest <= keep_newest:
                why[name] = "is the newest" if keep_newest == 1 else f"is one of the newest {keep_newest}"
        elif kind != WEIGHTS or not names:
            why[name] = kind
        if kind == DELTA:
            why.setdefault(name, DELTA)
            deltas.append(os.path.join(folder, name))
    for file in files if keep_anchors and (deltas or holds_deltas(folder)) else ():
        if any(number_in(name) is not None for name in file.names):
            why.setdefault(file.names[0], "is an anchor of versions")
    first = {name: file.names[0] for file in files for name in (*file.names, *file.symlinks)}
    for delta in sorted(deltas):
        for path in needed_by([delta]) - {delta}:
            base = first.get(os.path.basename(path))
            if base is not None:
                why.setdefault(base, f"is what {os.path.basename(delta)} is built on")
    return why


def _kind(path: str, names: Sequence[str]) -> str:
    """Return what a file is: one of the kinds below, or why it is no checkpoint."""
    try:
        with open_alone(path) as checkpoint:
            if is_delta(checkpoint):
                return DELTA
            if checkpoint.format not in WRITTEN or checkpoint.found_state() is None:
                return f"{NONE} of a model"
            return TRAINING if _is_training(checkpoint, names) else WEIGHTS
    except CkptToolError as error:
        return f"{NONE}: {error.reason}"


def _is_training(checkpoint: Checkpoint, names: Sequence[str]) -> bool:
    has_optimizer = any(map(is_optimizer, walk(checkpoint.tree)))
    return has_optimizer or any(_holds(checkpoint, name) for name in names)


def _makes_training(path: str, names: Sequence[str]) -> bool:
    """Return whether a delta is a training's checkpoint, over a base that is there."""
    with suppress(CkptToolError), formats.open(path) as checkpoint:
        return _is_training(checkpoint, names)
    return False


def _planned(folder: str, file: LinkedFile, why: str, names: Sequence[str], reflink: str) -> Slimmed:
    """Return what would become of a file."""
    size, links = file.facts.st_size, (*file.names[1:], *file.symlinks)
    stays = partial(Slimmed, file.names[0], links, size, size)
    if more := file.facts.st_nlink - len(file.names):
        why = why or f"has {counted(more, 'more name')} outside of this folder"
    if why:
        return stays(why=why)
    try:
        with open_alone(os.path.join(folder, file.names[0])) as checkpoint:
            new, left_out = _slimmed(checkpoint, names)
            after = _save(new, checkpoint, file, dry_run=True, reflink=reflink).nbytes
    except _Stays as reason:
        return stays(why=str(reason))
    except NotShared:
        raise
    except CkptToolError as error:
        return stays(why=error.reason)
    if after >= size:
        return stays(why="would not become smaller")
    return Slimmed(file.names[0], links, size, after, left_out)


def _slimmed(checkpoint: Checkpoint, names: Sequence[str]) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return what is to be written of a checkpoint, and the names of what is not."""
    state = checkpoint.state()
    if not names:
        return slim(checkpoint), checkpoint.outside(state)
    there = [name for name in names if _holds(checkpoint, name)]
    if not there:
        said = " or ".join(f"'{name}'" for name in names)
        raise _Stays(f"holds nothing named {said}")
    new = drop(checkpoint, there)
    found = new.found_state()
    if found is None or found.path != state.path or len(found.tensors) != len(state.tensors):
        raise _Stays(f"would lose its model's state with '{there[0]}'")
    return new, tuple(there)


def _holds(checkpoint: Checkpoint, name: str) -> bool:
    try:
        drop(checkpoint, [name])
    except NothingToDo:
        return False
    return True


def _save(new: Checkpoint, old: Checkpoint, file: LinkedFile, **choices: Any) -> Saved:
    """Write a file in its own place, with its own time; `choices` are further ones of `save`."""
    return save(new, old.path, to=WRITTEN[old.format], force=True, time=file.facts.st_mtime_ns, **choices)


def _replace(folder: str, file: LinkedFile, names: Sequence[str], **choices: Any) -> CkptToolError | None:
    """Replace a file, and give the new one its other names; return why the file stays, if it does."""
    first, *others = (os.path.join(folder, name) for name in file.names)
    try:
        with naming(first), open_alone(first) as checkpoint:
            _save(_slimmed(checkpoint, names)[0], checkpoint, file, **choices)
            for other in others:
                give_name(first, other)
    except Damaged as fault:
        return fault
    except _Stays as reason:  # it was replaced by another since it was looked at
        return Refused(first, str(reason))
    return None


def _stayed(failed: Sequence[CkptToolError], done: int) -> CkptToolError:
    """Return the first error of several, whose hint tells of the others, and of what was done."""
    first, *rest = failed
    said = f"it stays as it was, and {counted(done, 'other checkpoint')} became smaller"
    if rest:
        said += f"; these stay too: {'; '.join(error.message for error in rest)}"
    first.hint = f"{said}; {first.hint}" if first.hint else said
    return first


def _nothing(folder: str, kept: Sequence[Slimmed]) -> NothingToDo:
    """Return the error for a folder in which nothing becomes smaller."""
    of_training = [file for file in kept if file.is_checkpoint]
    said = [f"{' = '.join((file.name, *file.links))} {file.why}" for file in of_training[:3]]
    what = f"{folder}: holds no checkpoint that would become smaller"
    what += f" ({'; '.join(said)})" if said else ""
    return NothingToDo(what, hint=f"ckpttool inspect {shlex.quote(folder)}")
