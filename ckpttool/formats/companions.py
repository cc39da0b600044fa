"""The small files that a model needs next to its checkpoint: its configuration, its tokenizer."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Sequence

from ..checkpoint.checkpoint import Checkpoint
from ..errors import OutputExists, UsageFault
from ..files.commit import replacing
from ..files.open_source import CHECKPOINT_ENDINGS
from . import folders
from .shards import writing as sharding

# The most bytes of a file that is copied along; tokenizers have up to 40 MB.
MAX_BYTES = 100_000_000

# Files that serve a folder of DeepSpeed, and have nothing of their own.
OF_DEEPSPEED = ("latest", "zero_to_fp32.py", "zero_to_torch.py")

# Endings of the names of files that belong to a run, not to a model.
NO_COMPANIONS = (*CHECKPOINT_ENDINGS, ".distcp", ".pkl", ".pickle", sharding.INDEX)

# A folder below that of the ranks, in which trainers keep a model's configuration and tokenizer.
BELOW = "huggingface"


def listed(checkpoint: Checkpoint, path: str) -> tuple[list[str], list[str]]:
    """Return what lies in the folder of a checkpoint or in `huggingface/` there: companions, and the rest."""
    folder = folders.folder_of(checkpoint)
    if folder is None:
        return [], []
    names = folders.other_files(checkpoint, path)
    below = os.path.join(folder, BELOW)
    if BELOW in names and os.path.isdir(below):
        inside = sorted(name for name in os.listdir(below) if not name.startswith("."))
        names = [name for name in names if name != BELOW] + [os.path.join(BELOW, name) for name in inside]
    companions = [name for name in names if _is_companion(os.path.join(folder, name))]
    rest = [name for name in names if name not in companions and name not in OF_DEEPSPEED]
    return [os.path.join(folder, name) for name in companions], rest


def _is_companion(path: str) -> bool:
    is_of_run = path.lower().endswith(NO_COMPANIONS) or os.path.basename(path) in OF_DEEPSPEED
    return os.path.isfile(path) and not is_of_run and os.path.getsize(path) <= MAX_BYTES


def targets(paths: Sequence[str], output: str, *, is_folder: bool, force: bool) -> list[str]:
    """Return where companions are copied to: into an output that is a folder, else next to it."""
    folder = output if is_folder else os.path.dirname(output) or "."
    places = [os.path.join(folder, os.path.basename(path)) for path in paths]
    for number, target in enumerate(places):
        if target in places[:number]:
            both = f"{paths[places.index(target)]} and {paths[number]}"
            raise UsageFault(
                f"{both} would both become {target}", hint="copy one by hand, without --companions"
            )
    for path, target in zip(paths, places, strict=True):
        if os.path.lexists(target) and not force and not _is_same(path, target):
            raise OutputExists(f"{target}: already exists", hint="write it anyway with --force")
    return places


def _is_same(path: str, other: str) -> bool:
    """Return whether two files hold the same bytes."""
    return os.path.isfile(other) and filecmp.cmp(path, other, shallow=False)


def copy(paths: Sequence[str], places: Sequence[str]) -> None:
    """Copy each companion to its place, whole or not at all."""
    for path, place in zip(paths, places, strict=True):
        with open(path, "rb") as source, replacing(place) as file:
            shutil.copyfileobj(source, file)
