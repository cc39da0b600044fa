"""Choosing the format of an output, and checking that it may be written there with the options given."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ...checkpoint.checkpoint import Checkpoint
from ...errors import OutputExists, UsageFault
from .. import folders, safetensors, shards
from ..pytorch import zip as torch_zip
from ..strangers import refuse_output, unwritable
from .report import PICKLES, WHOLE

ENDINGS = {
    **dict.fromkeys(safetensors.EXTENSIONS, safetensors.NAME),
    **dict.fromkeys(torch_zip.EXTENSIONS, torch_zip.NAME),
}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a checkpoint is written, in which format, and what that format holds of it."""

    path: str
    format: str
    full: bool  # everything, although the format is one of tensors

    @property
    def holds_all(self) -> bool:
        return self.full or self.format in WHOLE

    @property
    def has_metadata(self) -> bool:
        return self.format in (safetensors.NAME, shards.SAFETENSORS)

    @property
    def is_folder(self) -> bool:
        return self.format in folders.NAMES


def destination(
    path: str, checkpoint: Checkpoint, to: str | None, *, full: bool | None = None, keep: bool = False
) -> Destination:
    """Return where `save` would write a checkpoint; the one place that decides an output's format.

    `keep`: a new folder gets the format of the folder that the checkpoint was read from.
    """
    refuse_output(path)
    known = (*dict.fromkeys(ENDINGS.values()), *folders.NAMES)
    if to is not None and to not in known:
        raise UsageFault(f"there is no format '{to}'", hint=f"one of {', '.join(known)}")
    kind = to or _format(path, checkpoint, keep)
    return Destination(path, kind, kind not in PICKLES and (checkpoint.full if full is None else full))


def format_of_name(path: str) -> str | None:
    """Return the format that a path asks for by its ending or by what is there; None if it asks for none."""
    if path.endswith("/") or os.path.isdir(path):
        return folders.kind_of(path) or folders.NAMES[0]
    return ENDINGS.get(os.path.splitext(path)[1].lower())


def _format(path: str, checkpoint: Checkpoint, keep: bool) -> str:
    if folders.is_in_place(checkpoint, path):
        return checkpoint.format
    asked = format_of_name(path)
    if keep and asked in folders.NAMES and checkpoint.format in folders.NAMES and not folders.kind_of(path):
        return checkpoint.format
    if asked is not None:
        return asked
    if path == "-":
        return torch_zip.NAME if checkpoint.format.startswith("torch") else safetensors.NAME
    raise unwritable(path) or UsageFault(
        f"{path}: its ending does not say which format",
        hint=f"end it in {', '.join(ENDINGS)}, or in / for a folder of shards; "
        f"for a DCP folder: ckpttool convert IN {shlex.quote(path)} --to dcp",
    )


def require_sense(
    target: Destination, state: str | None, full: bool | None, keep_copies: bool, shard_size: int | None
) -> None:
    """Check that options do not contradict each other, and that each has an effect."""
    path, kind = target.path, target.format
    if full and state is not None:
        what = f"{path}: gets everything that is there, but one state of it was named ('{state}')"
        raise UsageFault(what, hint="leave out --full or --state")
    if full and kind == shards.TORCH:
        hint = f"write a .pt file, or shards of safetensors: --to {shards.SAFETENSORS}"
        raise UsageFault(f"{path}: {kind} holds only the model's state", hint=hint)
    if keep_copies and (full or kind in PICKLES):
        hint = "leave out --keep-copies, or write safetensors without --full"
        raise UsageFault(f"{path}: keeps what is tied as one tensor, but copies were asked for", hint=hint)
    if shard_size is not None and kind not in (shards.SAFETENSORS, shards.TORCH):
        what, way = "is one file", "end OUTPUT in /"
        if target.is_folder:
            what, way = "is one folder that is not cut", f"say --to {shards.SAFETENSORS}"
        hint = f"{way} for a folder of shards, or leave out --shard-size"
        raise UsageFault(f"{path}: {what}, but a shard size was given", hint=hint)
    if target.is_folder and path == "-":
        raise UsageFault(f"-: {kind} is a folder, and can't be streamed", hint="name a folder")


def require_device(target: Destination, device: str) -> None:
    """Check that a device can be written."""
    if target.format not in PICKLES:
        what = f"{target.path}: {target.format} names no devices, but --device {device} was given"
        raise UsageFault(what, hint="leave it out, or write a .pt file")
    if not re.fullmatch(r"[a-z]+(:[0-9]{1,3})?", device) or device == "meta":
        raise UsageFault(f"'{device[:80]}' is not a device", hint="say for example: --device cpu")


def require_place(checkpoint: Checkpoint, target: Destination, force: bool, kept: Collection[str]) -> None:
    """Check that nothing is in the output's place, or that it may be replaced."""
    path = target.path
    if path == "-":
        return
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):  # writing tells why
        return
    is_named_as_folder = path.endswith("/") or os.path.splitext(path)[1].lower() not in ENDINGS
    if target.is_folder and is_named_as_folder and os.path.isdir(path) and not os.listdir(path):
        return  # an empty folder has nothing to lose
    for why, hint in _reasons(checkpoint, target, kept):
        raise OutputExists(f"{path}: already exists, and {why}", hint=hint)
    if not force:
        raise OutputExists(f"{path}: already exists", hint="write it anyway with --force")


def _reasons(checkpoint: Checkpoint, target: Destination, kept: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield what keeps an output from being replaced even with `--force`, and what to do instead."""
    path = target.path
    if folders.is_part_of_input(checkpoint, path):
        yield f"is a part of the input {checkpoint.path}", "name another output"
    if not os.path.isdir(path):
        if target.is_folder and os.path.exists(path):
            yield f"is a file, where {target.format} is a folder", "name a new folder"
    elif not target.is_folder:
        yield "is a folder", "name a file in it"
    elif others := folders.others(checkpoint, path, kept):
        yield f"holds other files too ({', '.join(others[:3])})", "name a new folder, or a file in it"
