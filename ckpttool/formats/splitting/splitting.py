"""Writing a whole checkpoint as the files that the ranks of an FSDP2 run would have saved.

Each rank gets `model_world_size_W_rank_R.pt`, its pieces of the model's state as DTensors, and where there is
an optimizer `optim_world_size_W_rank_R.pt`; everything else goes whole into `extra_state_…`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from ...checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ...checkpoint.checksums import Checksums
from ...errors import OutputExists, UsageFault
from ...files.commit import require_folder, writing_into
from ...files.commit_folder import replacing_folder
from ...files.copying import DryOutput, Output, Progress
from ..folders import folder_of
from ..pytorch import zip as torch_zip
from .plan import EXTRA, MODEL, OPTIMIZER, Files, Split, SplitPlan

NAME = "dtensor-ranks"

# The names of the files that are written, and that a new folder replaces.
FILE = re.compile(rf"(?:{MODEL}|{OPTIMIZER}|{EXTRA})_world_size_[0-9]+_rank_[0-9]+\.pt")

# The most files that are made of each kind.
MAX_RANKS = 65_536


@takes_checkpoint
def split(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    ranks: int,
    *,
    state: str | None = None,
    device: str | None = None,
    axis: str | None = None,
    whole: Iterable[str] = (),
    verify: bool | None = None,
    force: bool = False,
    replace_all: bool = False,
    kept: Collection[str] = (),
    dry_run: bool = False,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> Split:
    """Write a checkpoint as files of ranks, which torch loads into a model under `fully_shard`.

    Parameters are cut along their first dimension over a mesh of one axis, as `fully_shard(model)` does, and
    so is what the optimizer keeps of each. Buffers stay whole: integers, tensors without axes, BatchNorm's
    statistics, and what `whole` names. Bytes are moved from file to file.

    Args:
        checkpoint: what `ckpttool.open` or a transform returned.
        path: the folder to write; it appears complete or not at all.
        ranks: how many ranks there are, 1 to 65,536.
        state: dotted path of the model's state; found when None.
        device: the type of the ranks' devices, which their mesh has: `cuda`, `cpu`, …; when None that of the
            ranks that wrote the input, else `cuda`.
        axis: the name of the mesh's axis, where the training names it.
        whole: shell patterns of further names that are buffers, or parameters that FSDP2 was told to ignore.
        verify: None: compare what is read with the checksums that its file states, and read back names, types
            and shapes. True: read back the values too. False: do not compare checksums either.
        force: replace the files of ranks in an existing folder.
        replace_all: with `force`, also remove files of ranks of which the new checkpoint has no kind, such as
            an optimizer's where it has none.
        kept: names of other files that may be in a folder which is replaced, and stay in it.
        dry_run: write nothing: the same result and the same errors.
        progress: called with the number of bytes after each piece.
        expect: called first, with about the number of bytes that progress will come to.

    Returns:
        What was written.

    Raises:
        UsageFault: `ranks` or `device` is none, or the place can't be written.
        OutputExists: the folder is there, and `force` is not given; or it holds a kind of files
            that the new checkpoint lacks, and `replace_all` is not given.
        NothingToDo: no tensor would be cut, or a pattern of `whole` matches no name.
        Refused: a tensor is not a plain one, there are several optimizers, or one keeps a tensor of another
            shape than its parameter.
        NoState: the file holds no state, or none at `state`.
        Damaged: what was read does not have its checksum, or what was written does not read back as intended.
    """
    name = os.fspath(path)
    device = device or (checkpoint.ranks.device if checkpoint.ranks else "") or "cuda"
    _require_sense(ranks, device)
    _require_place(checkpoint, name, force, kept)
    plan = SplitPlan(replace(checkpoint, device="cpu"), state, tuple(whole))
    old = _replaced(name) if os.path.isdir(name) else []
    if lost := [file for file in old if not file.startswith(plan.kinds)]:
        _require_loss(name, lost, replace_all)
    make = partial(plan.files, ranks=ranks, device=device, axis=axis)
    if expect is not None:
        expect(plan.work(ranks, verify=bool(verify), dry=dry_run))
    storages = checkpoint.storages() if verify is not False and not dry_run else ()
    with Checksums(checkpoint, storages) as checksums:
        if dry_run:
            return plan.report(name, ranks, device, {file: _dry(new, file) for file, new in make()}, old)

        def check(folder: str) -> None:
            checksums.finish()
            plan.compare(folder, name, values=bool(verify), progress=progress)

        sizes = _write(name, make, partial(Output, progress=progress), check, kept)
    return plan.report(name, ranks, device, sizes, old)


def _require_sense(ranks: int, device: str) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise UsageFault(f"{ranks} is not a number of ranks from 1 to {MAX_RANKS}")
    if not re.fullmatch(r"[a-z]+", device):
        raise UsageFault(f"'{device[:80]}' is not a type of device", hint="say for example: --device cpu")


def _require_loss(path: str, lost: list[str], replace_all: bool) -> None:
    """Refuse to remove files of a kind that the new checkpoint does not have, unless that is asked for."""
    if not replace_all:
        files = ", ".join(lost[:2]) + (f" and {len(lost) - 2} more" if lost[2:] else "")
        raise OutputExists(
            f"{path}: holds {files}, which nothing in the new checkpoint would replace",
            hint="name a new folder; --replace-all removes them too",
        )


def _require_place(checkpoint: Checkpoint, path: str, force: bool, kept: Collection[str]) -> None:
    if path == "-":
        raise UsageFault("-: the files of ranks are a folder, and can't be streamed", hint="name a folder")
    require_folder(path)
    source = folder_of(checkpoint)
    if source is not None and os.path.realpath(source) == os.path.realpath(path):
        raise OutputExists(f"{path}: is the input", hint="name a new folder")
    if not os.path.lexists(path) or (os.path.isdir(path) and not os.listdir(path)):
        return
    if not os.path.isdir(path):
        raise OutputExists(f"{path}: already exists, and is a file", hint="name a new folder")
    others = sorted(name for name in os.listdir(path) if not FILE.fullmatch(name) and name not in kept)
    if others:
        found = ", ".join(others[:3])
        raise OutputExists(
            f"{path}: already exists, and holds other files ({found})", hint="name a new folder"
        )
    if not force:
        raise OutputExists(f"{path}: already exists", hint="write it anyway with --force")


def _write(
    path: str,
    make: Callable[[], Files],
    opened: Callable[[Any], Output],
    check: Callable[[str], None],
    kept: Collection[str],
) -> dict[str, int]:
    """Write files into a new folder and put it in place; return their sizes by name."""
    sizes: dict[str, int] = {}
    with replacing_folder(path, _replaced, kept) as new:
        for name, checkpoint in make():
            with writing_into(os.path.join(new.path, name)) as file, opened(file) as out:
                torch_zip.write(checkpoint, out, name)
            sizes[name] = out.position
        check(new.path)
    return sizes


def _replaced(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if FILE.fullmatch(name))


def _dry(checkpoint: Checkpoint, name: str) -> int:
    out = DryOutput()
    torch_zip.write(checkpoint, out, name)
    return out.position
