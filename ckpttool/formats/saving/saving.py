"""Saving a checkpoint: in the format that the output's name says, complete or not at all."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ...checkpoint.checkpoint import Checkpoint, takes_checkpoint
from .. import folders
from ..output import OutputPlace
from .destination import Saved, SaveOptions, destination, require_sense
from .plan import SavePlan


@takes_checkpoint
def save(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    state: str | None = None,
    full: bool | None = None,
    to: str | None = None,
    shard_size: int | None = None,
    verify: bool | None = None,
    force: bool = False,
    dry_run: bool = False,
    **more: Any,
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
        to: the format; None: that of the folder which is there, or the one that the name's ending says.
        shard_size: the most bytes of a shard, in sharded formats; 5 GB when None.
        verify: None compares what is read with the checksums that its file states. True: also reads back the
            values that were written. False: does not compare checksums either.
        force: replace an existing output. Of a folder only the files of the checkpoint in it are replaced;
            if it holds others, it must be the one that the checkpoint was read from, where they stay. A part
            of an input is never replaced, nor the base of a delta that is one.
        dry_run: write nothing: the same result, exact size included, and the same errors. Of DCP the size is
            that of the values alone, and an error of torch's own library is not foreseen.
        more: any of the following.
        keep_copies: write a tied tensor once per name, instead of recording the tie.
        kept: names of other files that may be in a folder which is replaced, and stay in it.
        needed: further inputs, paths or open checkpoints, that are needed beside the output: no file of them
            is replaced, with `force` either.
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
        TypeError: `checkpoint` is something else, such as a path; or there is no such option.
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
    options = SaveOptions(**more)
    named = OutputPlace.at(path, force, options.needed, checkpoint)
    with named.local(dry_run, options.progress, options.expect) as place:
        target = destination(place.path, checkpoint, to, full=full)
        require_sense(target, state, full, shard_size, options)
        if options.device is not None:
            checkpoint = replace(checkpoint, device=options.device)

        def stay() -> list[str]:
            return [*options.kept, *folders.companions(checkpoint, place.path)]

        replaced = folders.replaced_by(checkpoint, place.path) if target.is_folder else None
        place.require(replaced, stay, target.format, may_be_empty=not target.is_named_as_file)
        plan = SavePlan(checkpoint, target, place, state, shard_size, options)
        if options.expect is not None:
            options.expect(0 if dry_run else plan.work(bool(verify)))
        saved = plan.carried_out(verify, dry_run)
    return replace(saved, path=named.path)
