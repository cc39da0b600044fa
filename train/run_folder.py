"""The folder of a run: last.pt, best.pt, step-<number>.pt, log.jsonl. Written by rank 0 alone."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import Any

import torch

from ckpttool.errors import FileError, UsageFault
from ckpttool.transfer import replacing
from train.config import TrainConfig

LAST, BEST, LOG = "last.pt", "best.pt", "log.jsonl"
NUMBERED = re.compile(r"step-(\d+)\.pt")


def choose(config: TrainConfig, now: str) -> str:
    """The folder for the run's files, made; `now` names it where `--out` does not.

    Raises:
        UsageFault: it holds a run already and nothing says what to do with that, or it can't be made.
    """
    folder = config.out or _unused(os.path.join("runs", now))
    found = os.path.join(folder, LAST)
    if os.path.exists(found) and not config.resume and not config.force:
        raise UsageFault(
            f"{folder}: holds a run already",
            hint="--resume auto goes on with it, --force overwrites it, --out names another folder",
        )
    try:
        os.makedirs(folder, exist_ok=True)
        if not config.resume:
            _clear(folder)
    except OSError as error:
        raise UsageFault(f"--out {folder}: {(error.strerror or str(error)).lower()}") from error
    return folder


def _unused(folder: str) -> str:
    number, name = 1, folder
    while os.path.exists(name):
        number += 1
        name = f"{folder}-{number}"
    return name


def _clear(folder: str) -> None:
    """Takes a run's own files out of its folder, so that none is left of one that is overwritten."""
    for entry in list(os.scandir(folder)):
        if entry.name in (LAST, BEST, LOG) or NUMBERED.fullmatch(entry.name):
            os.unlink(entry.path)


def write(state: dict[str, Any], folder: str, names: list[str]) -> None:
    """Writes one checkpoint under each of these names, atomically. Raises FileError."""
    path = os.path.join(folder, names[0])
    try:
        with replacing(path) as file:
            torch.save(state, file)
        for name in names[1:]:
            _give_name(path, os.path.join(folder, name))
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's zip writer, closing a file cut short
        raise FileError(path, f"could not be written: {_reason(error)}", hint="is the disk full?") from error


def _reason(error: BaseException) -> str:
    """The system's own word, where there is one behind the error."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror.lower()
        behind = behind.__context__
    return str(error).splitlines()[0]


def _give_name(path: str, other: str) -> None:
    """A second name for a file just written, atomically. A link costs nothing, and no file is ever changed
    in place; where the file system has no links, a copy."""
    temporary = f"{other}.link"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        os.link(path, temporary)
        os.replace(temporary, other)
    except OSError:
        with open(path, "rb") as source, replacing(other) as target:
            shutil.copyfileobj(source, target)


def numbered(global_step: int) -> str:
    return f"step-{global_step:06d}.pt"


def drop_old(folder: str, keep: int) -> None:
    """Removes all numbered checkpoints but the last `keep`."""
    found = [name for name in os.listdir(folder) if NUMBERED.fullmatch(name)]
    found.sort(key=lambda name: int(NUMBERED.fullmatch(name)[1]))  # type: ignore[index]
    for name in found[: len(found) - keep]:
        os.unlink(os.path.join(folder, name))
