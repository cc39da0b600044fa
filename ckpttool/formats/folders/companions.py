"""The small files beside a checkpoint that a model needs too: its configuration, its tokenizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from ...checkpoint.checkpoint import Checkpoint
from ...errors import OutputExists, UsageFault
from ...files.commit import replacing
from ...files.suggestions import CHECKPOINT_ENDINGS
from . import folders, sharding

MAX_BYTES = 100_000_000
"""The most bytes of a file that is copied along; tokenizers have up to 40 MB."""

OF_DEEPSPEED = tuple(os.sep + name for name in ("latest", "zero_to_fp32.py", "zero_to_torch.py"))

NO_COMPANIONS = (*CHECKPOINT_ENDINGS, ".distcp", ".pkl", ".pickle", sharding.INDEX, *OF_DEEPSPEED)
"""Endings of the paths of files that belong to a run, not to a model."""

BELOW = "huggingface"
"""A folder below that of the ranks, in which trainers keep a model's configuration and tokenizer."""


def companions(checkpoint: Checkpoint, path: str) -> list[str]:
    """Return the paths of the small files that belong to a model, in its folder or in `huggingface/` below.

    Args:
        checkpoint: the model, read from a folder; one read from a file has none.
        path: the output, which is no companion.
    """
    folder = folders.folder_of(checkpoint)
    if folder is None:
        return []
    found = [os.path.join(folder, name) for name in folders.beside(checkpoint, path)]
    below = os.path.join(folder, BELOW)
    if os.path.isdir(below):
        found += [os.path.join(below, name) for name in sorted(os.listdir(below)) if not name.startswith(".")]
    return [each for each in found if _is_companion(each)]


def _is_companion(path: str) -> bool:
    ends = path.lower().endswith(NO_COMPANIONS)
    return os.path.isfile(path) and not ends and os.path.getsize(path) <= MAX_BYTES


def targets(paths: Sequence[str], output: str, *, is_folder: bool, force: bool) -> list[str]:
    """Return where companions are copied to: into an output that is a folder, else beside it.

    Args:
        paths: the companions.
        output: the checkpoint's path.
        is_folder: whether it is a folder.
        force: whether existing files may be replaced.

    Raises:
        OutputExists: there is such a file, and `force` is not given.
        UsageFault: two companions have one name.
    """
    folder = output if is_folder else os.path.dirname(output) or "."
    found = [os.path.join(folder, os.path.basename(path)) for path in paths]
    for number, target in enumerate(found):
        if target in found[:number]:
            both = f"{paths[found.index(target)]} and {paths[number]}"
            raise UsageFault(
                f"{both} would both become {target}", hint="copy one by hand, without --companions"
            )
    for target in found:
        if os.path.lexists(target) and not force:
            raise OutputExists(f"{target}: already exists", hint="write it anyway with --force")
    return found


def copy(paths: Sequence[str], places: Sequence[str]) -> None:
    """Copy each companion to its place, whole or not at all.

    Raises:
        UsageFault: a folder can't be written.
        OSError: a file can't be read or written.
    """
    for path, place in zip(paths, places, strict=True):
        with open(path, "rb") as source, replacing(place) as file:
            shutil.copyfileobj(source, file)
