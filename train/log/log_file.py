"""log.jsonl, the log of a run: one JSON object on each line, written by rank 0.

A line with `epoch` ends an epoch and has the scores on the test set. A line with `step` is about the steps
since the line before (train/log/step_log.py); with `test_loss` it is a score in the middle of an epoch, and
with `event` what happened in that step: a save that failed or was waited for, or a signal.
docs/trainer.md lists the fields.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from ckpttool.errors import Damaged, FileError, Unreadable
from ckpttool.files import lines
from ckpttool.files.commit import replacing
from ckpttool.files.failures import naming, reason
from train import console

LOG = "log.jsonl"

Line = TypeVar("Line")


def append(folder: str, entry: Mapping[str, Any]) -> None:
    """Add one object to the log, on a line of its own, or raise FileError and leave the log as it was."""
    path = os.path.join(folder, LOG)
    with naming(path):
        lines.append(path, json.dumps(_finite(entry)).encode())


def cut(folder: str, *, epoch: int, step: int) -> None:
    """Remove what a run that continues from here will log again, and lines that a crash has cut off.

    Lines are in the order of the training. So everything is removed from the first line on that is about a
    later epoch or step; a line that names neither stays where it is.
    """
    path = os.path.join(folder, LOG)
    if not os.path.exists(path):
        return
    remaining = []
    with naming(path):
        with open(path, "rb") as file:
            for line in file:
                entry = parsed(line)
                if entry is None:
                    continue
                if _number(entry, "epoch") > epoch or _number(entry, "step") > step:
                    break
                remaining.append(line.rstrip(b"\n") + b"\n")
        with replacing(path) as file:
            file.writelines(remaining)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the objects of a log, or of a run's folder, without a last line that was cut off."""
    path = os.fspath(path)
    if os.path.isdir(path):
        path = os.path.join(path, LOG)
    entries = list(_entries(path))
    if not entries:
        raise Damaged(
            path, "holds no entries yet", hint="the first comes after --log-every steps or an epoch"
        )
    return entries


def _entries(path: str) -> Iterator[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            lines_read = file.read().split(b"\n")
    except FileNotFoundError:
        raise Unreadable(path, "no such file", hint=f"give the folder of a run, or its {LOG}") from None
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    for number, line in enumerate(lines_read, start=1):
        entry = parsed(line)
        if entry is not None:
            yield entry
        elif line.strip() and number < len(lines_read):  # the text after the last line break may be cut off
            raise Damaged(path, f"line {number} is not a JSON object", hint="is this the log of a run?")


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object on a line; None if it is empty, cut off or something else."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _number(entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    return value if isinstance(value, int | float) else -math.inf


def _finite(value: Any) -> Any:
    """Return a JSON value with null in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class HeldLines(Generic[Line]):
    """Lines for a file on a disk that may be full: what it refuses is written before the next line.

    `write` adds one to the file whole, or raises FileError.
    """

    def __init__(self, write: Callable[[Line], object]) -> None:
        self._write = write
        self._waiting: list[Line] = []

    def add(self, line: Line) -> None:
        """Add a line; if it can't be written, say so and go on."""
        self._waiting.append(line)
        try:
            self.flush()
        except FileError as error:
            if len(self._waiting) == 1:
                console.warn(f"{error}; training goes on, and tries again")

    def flush(self) -> None:
        """Write what is waiting. Raise FileError if the disk still refuses it."""
        while self._waiting:
            self._write(self._waiting[0])
            del self._waiting[0]
