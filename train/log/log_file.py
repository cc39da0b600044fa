"""log.jsonl, the log of a run: one JSON object on each line, written by rank 0.

A line with `epoch` ends an epoch and has the scores on the test set. A line with `step` is about the steps
since the line before (train/log/step_log.py); with `test_loss` it is a score in the middle of an epoch, and
with `event` what happened in that step: a save that failed or was waited for, or a signal.
docs/log.md lists the fields; `ckpttool.analysis.run_log` reads them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from ckpttool.analysis.run_log import LOG, parsed
from ckpttool.contract import finite
from ckpttool.errors import FileError
from ckpttool.files.commit import append_line, replacing
from ckpttool.files.failures import naming
from train import console

Line = TypeVar("Line")


def append(folder: str, entry: Mapping[str, Any]) -> None:
    """Add one object to the log, on a line of its own, or raise FileError and leave the log as it was."""
    path = os.path.join(folder, LOG)
    with naming(path):
        append_line(path, json.dumps(finite(entry)).encode())


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


def _number(entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    return value if isinstance(value, int | float) else -math.inf


class HeldLines(contextlib.AbstractContextManager[Any], Generic[Line]):
    """Lines for a file on a disk that may be full: what it refuses is written before the next line.

    `append` adds one to the file whole, or raises FileError. At the end of a context, FileError is raised if
    lines are left that can't be written, and nothing has failed already.
    """

    def __init__(self, append: Callable[[Line], object]) -> None:
        self._append = append
        self._waiting: list[Line] = []

    def add(self, line: Line) -> None:
        """Add a line; if it can't be written, say so and go on."""
        self._waiting.append(line)
        try:
            self.flush()
        except FileError as error:
            if len(self._waiting) == 1:
                console.warn(f"{error.message}; training goes on, and tries again")

    def flush(self) -> None:
        """Write what is waiting. Raise FileError if the disk still refuses it."""
        while self._waiting:
            self._append(self._waiting[0])
            del self._waiting[0]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*([FileError] if kind is not None else [])):
            self.flush()
