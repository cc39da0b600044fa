"""The folder of a run: last.pt, best.pt, step-<number>.pt, log.jsonl. Written only by rank 0."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import torch

from ckpttool.errors import FileError, UsageFault
from ckpttool.files.commit import replacing
from train.config import TrainConfig

LAST, BEST, LOG = "last.pt", "best.pt", "log.jsonl"
NUMBERED = re.compile(r"step-(\d+)\.pt")


def choose(config: TrainConfig, now: str) -> str:
    """Makes and returns the folder for the run's files; `now` names it if `--out` does not.

    Raises:
        UsageFault: it already holds a run and no flag says what to do with it, or it can't be made.
    """
    folder = config.out or _unused(os.path.join("runs", now))
    if _own_files(folder) and not config.force and not _goes_on_in(folder, config):
        raise UsageFault(
            f"{folder}: already holds a run",
            hint="--resume auto continues it, --force overwrites it, --out names another folder",
        )
    try:
        os.makedirs(folder, exist_ok=True)
        if not config.resume:
            _clear(folder)
    except OSError as error:
        raise UsageFault(f"--out {folder}: {(error.strerror or str(error)).lower()}") from error
    return folder


def _goes_on_in(folder: str, config: TrainConfig) -> bool:
    """Whether the resumed run is the one in the folder, and not another that would overwrite it."""
    if config.resume in (None, "auto"):
        return config.resume == "auto"
    return os.path.realpath(os.path.dirname(config.resume)) == os.path.realpath(folder)


def _unused(folder: str) -> str:
    number, name = 1, folder
    while os.path.exists(name):
        number += 1
        name = f"{folder}-{number}"
    return name


def _clear(folder: str) -> None:
    """Removes a run's own files from its folder, so that nothing is left of an overwritten run."""
    for path in _own_files(folder):
        os.unlink(path)


def _own_files(folder: str) -> list[str]:
    """A run's files in its folder; one that ended early may have left only a log and a best.pt."""
    if not os.path.isdir(folder):
        return []
    names = (name for name in os.listdir(folder) if name in (LAST, BEST, LOG) or NUMBERED.fullmatch(name))
    return [os.path.join(folder, name) for name in names]


def write(state: dict[str, Any], folder: str, names: list[str]) -> None:
    """Writes one checkpoint under each of these names, atomically. Raises FileError."""
    path = os.path.join(folder, names[0])
    with _failing_in_words(path):
        with replacing(path) as file:
            torch.save(state, file)
        for name in names[1:]:
            _give_name(path, os.path.join(folder, name))


def append_to_log(folder: str, entry: dict[str, Any]) -> None:
    """Writes one JSON object on a line; numbers that JSON lacks become null. Raises FileError."""
    path = os.path.join(folder, LOG)
    known = {key: value if _is_finite(value) else None for key, value in entry.items()}
    with _failing_in_words(path), open(path, "a") as file:
        file.write(json.dumps(known) + "\n")


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def cut_log(folder: str, epoch: int) -> None:
    """Removes from the log what comes after an epoch, because it will be trained again."""
    path = os.path.join(folder, LOG)
    if not os.path.exists(path):
        return
    with _failing_in_words(path):
        with open(path, "rb") as file:
            kept = [line for line in file if _epoch_of(line) <= epoch]
        with replacing(path) as file:
            file.writelines(kept)


def _epoch_of(line: bytes) -> float:
    """The epoch of a log line; infinity for a line cut off by a crash."""
    try:
        return float(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return math.inf


@contextlib.contextmanager
def _failing_in_words(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's zip writer, closing a file cut short
        raise FileError(path, f"could not be written: {_reason(error)}", hint="is the disk full?") from error


def _reason(error: BaseException) -> str:
    """The system's own message, if there is one behind the error."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror.lower()
        behind = behind.__context__
    return str(error).splitlines()[0]


def _give_name(path: str, other: str) -> None:
    """Gives a file just written a second name, atomically. A link costs nothing, and no file is ever changed
    in place; a copy if the file system has no links."""
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
    """Removes all numbered checkpoints but the last `keep` written.

    By time, not by number: a run that went back to an earlier step writes small numbers last.
    """
    found = [entry for entry in os.scandir(folder) if NUMBERED.fullmatch(entry.name)]
    found.sort(key=lambda entry: (entry.stat().st_mtime_ns, entry.name))
    for entry in found[: max(0, len(found) - keep)]:
        os.unlink(entry.path)
