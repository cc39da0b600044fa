"""Saving a checkpoint: in the format that the output's name says, complete or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import replace

from ...checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ...errors import UsageFault
from ...files.commit import require_folder
from ...files.pieces import Progress
from ...remote.places import uploading
from ..strangers import output_at
from .destination import PICKLES, Destination, Saved, destination, require_place, require_sense
from .plan import SavePlan


def _require_device(target: Destination, device: str) -> None:
    if target.format not in PICKLES:
        what = f"{target.path}: {target.format} names no devices, but --device {device} was given"
        raise UsageFault(what, hint="leave it out, or write a .pt file")
    if not re.fullmatch(r"[a-z]+(:[0-9]{1,3})?", device) or device == "meta":
        raise UsageFault(f"'{device[:80]}' is not a device", hint="say for example: --device cpu")


@takes_checkpoint
def save(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    state: str | None = None,
    full: bool | None = None,
    keep_copies: bool = False,
    to: str | None = None,
    shard_size: int | None = None,
    verify: bool | None = None,
    force: bool = False,
    kept: Collection[str] = (),
    dry_run: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
    expect: Progress | None = None,
    resume: bool = False,
    recipe: str = "",
    time: int | None = None,
) -> Saved:
    """Write a checkpoint.

    safetensors gets only the model's state, a `.pt` file everything. Memory stays flat. The input may be the
    output. The output replaces nothing before it was read back: names, types and shapes as intended.

    Args:
        checkpoint: what is written.
        path: the output; `-` is standard output. What is named by a URL (s3, gs, az, hf) is written to a
            temporary file, and then uploaded.
        state: dotted path of the model's state; None to find it.
        full: write everything, also into a format of tensors; None: only if the input is already such a file.
        keep_copies: write a tied tensor once per name, instead of recording the tie.
        to: the format; None: that of the folder which is there, or the one that the name's ending says.
        shard_size: the most bytes of a shard, in sharded formats; 5 GB when None.
        verify: None compares what is read with the checksums that its file states. True: also reads back the
            values that were written. False: does not compare checksums either.
        force: replace an existing output. Of a folder only the files of the checkpoint in it are replaced;
            if it holds others, it must be the one that the checkpoint was read from, where they stay.
        kept: names of other files that may be in a folder which is replaced, and stay in it.
        dry_run: write nothing: the same result, exact size included, and the same errors. Of DCP the size is
            that of the values alone, and an error of torch's own library is not foreseen.
        device: the device that a `.pt` tags its storages with, as `cpu`; None keeps those of the file.
        progress: called with the number of bytes after each piece, also of values that are read back.
        expect: called first, with about the number of bytes that progress will come to; again before an
            upload, with those that are sent.
        resume: go on with an output of remote files whose writing was interrupted, if it is of the same plan:
            the same versions of the same objects, and the same call.
        recipe: what tells computed values (a cast, a mean) from those of another call. Without it, and where
            files state checksums, only bytes that are copied are not fetched again.
        time: when the output was changed, in nanoseconds, where it is a file; None for now.

    Returns:
        What was written, and by name what was not.

    Raises:
        TypeError: `checkpoint` is something else, such as a path.
        OutputExists: there is something at `path`, and `force` is not given or can't help.
        UsageFault: the ending says no format, options contradict each other, or the place can't be written.
        Refused, NoState: the format can't hold something; there is no state, or none at `state`.
        Damaged: what was read does not have its checksum (nothing was written), or what was written does not
            read back as intended (it was removed).

    Example:
        >>> with ckpttool.open("last.pt") as checkpoint:
        ...     plain, renaming = ckpttool.strip_prefix(checkpoint)
        ...     saved = ckpttool.save(plain, "plain.safetensors")
        >>> saved.keys, saved.left_out
        (7, ('optimizer', 'epoch'))
    """
    named = output_at(os.fspath(path))
    upload = uploading(named, replace=force, dry_run=dry_run, progress=progress, expect=expect)
    with upload as name:
        target = destination(name, checkpoint, to, full=full)
        require_sense(target, state, full, keep_copies, shard_size)
        if device is not None:
            _require_device(target, device)
            checkpoint = replace(checkpoint, device=device)
        require_place(checkpoint, target, force, kept)
        require_folder(name)
        plan = SavePlan(checkpoint, target, state, keep_copies, shard_size, kept, time)
        if expect is not None:
            expect(0 if dry_run else plan.work(bool(verify)))
        going_on = resume if name == named else None  # what is uploaded is kept nowhere
        saved = plan.carried_out(verify, dry_run, progress, going_on, recipe)
    return replace(saved, path=named)
