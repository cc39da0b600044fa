"""Saving a checkpoint: in the format that the output's name says, complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from ...checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ...checkpoint.checksums import Checksums
from ...files.commit import require_folder
from ...files.copying import Output, Progress
from .. import folders
from .destination import format_of_output, require_device, require_place, require_sense
from .plan import SavePlan
from .report import PICKLES, Saved


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
) -> Saved:
    """Write a checkpoint.

    safetensors gets only the model's state, a `.pt` file everything. Bytes are moved from file to file, so
    memory stays flat. The input may be the output: its old contents are read until the new file replaces it.
    The output replaces nothing before it was read back and found to have the names, types and shapes
    intended.

    Args:
        checkpoint: what `ckpttool.open` or a transform returned.
        path: the output; `-` is standard output.
        state: dotted path of the model's state; None to find it.
        full: write everything the input holds, also into a format of tensors; None: only if the input is
            already such a file.
        keep_copies: write a tied tensor once per name, instead of recording the tie.
        to: the format; None: that of the folder which is there, or the one that the name's ending says.
        shard_size: the most bytes of a shard, in sharded formats; 5 GB when None.
        verify: None: compare what is read with the checksums that its file states, in the same pass, and read
            back the names, types and shapes that were written. True: read back the values too. False: do not
            compare checksums either.
        force: replace an existing output. Of a folder only the files of the checkpoint in it are replaced;
            if it holds others, it must be the one that the checkpoint was read from, where they stay.
        kept: names of other files that may be in a folder which is replaced, and stay in it.
        dry_run: write nothing: the same result, exact size included, and the same errors. Of DCP the size is
            that of the values alone, and an error of torch's own library is not foreseen.
        device: the device that a `.pt` tags its storages with, as `cpu`; None keeps those of the file.
        progress: called with the number of bytes after each piece; with `verify=True` those of the values
            that are read back count too.
        expect: called first, with about the number of bytes that progress will come to.

    Returns:
        What was written, and by name what was not.

    Raises:
        TypeError: `checkpoint` is something else, such as a path.
        OutputExists: there is something at `path`, and `force` is not given or can't help.
        UsageFault: the ending says no format, options contradict each other, or the place can't be written.
        Refused: the format can't hold something.
        NoState: a format of tensors was asked for and there is no state, or none at `state`.
        Damaged: what was read does not have its checksum (nothing was written), or what was written does not
            read back as intended (it was removed).
    """
    name = os.fspath(path)
    kind = format_of_output(name, checkpoint, to)
    require_sense(name, kind, state, full, keep_copies, shard_size)
    if device is not None:
        require_device(name, kind, device)
        checkpoint = replace(checkpoint, device=device)
    require_place(checkpoint, name, kind, force, kept)
    require_folder(name)
    whole = kind not in PICKLES and (checkpoint.full if full is None else full)
    plan = SavePlan(checkpoint, name, kind, state, whole, keep_copies, kept)
    if expect is not None:
        expect(plan.work(bool(verify), dry_run))
    return _written(plan, shard_size, verify, dry_run, progress)


def _written(
    plan: SavePlan, shard_size: int | None, verify: bool | None, dry_run: bool, progress: Progress | None
) -> Saved:
    """Write what is planned, and compare what was read and written before it takes its place."""
    opened = partial(Output, progress=progress)
    is_compared = not dry_run if verify is None else verify
    with Checksums(plan.checkpoint, plan.storages() if is_compared else ()) as checksums:
        if dry_run:
            checksums.finish()

        def check(found: Checkpoint) -> None:
            checksums.finish()
            plan.compare(found, values=bool(verify), progress=progress)

        if plan.format in folders.NAMES:
            return plan.write_folder(shard_size, dry_run, opened, check)
        return plan.dry_run() if dry_run else plan.write_file(opened, check)
