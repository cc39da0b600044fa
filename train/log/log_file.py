"""log.jsonl, the log of a run: one JSON object on each line, written by rank 0. Needs no torch.

A line with `epoch` ends an epoch and has the scores on the test set. A line with `step` is about the steps
since the line before (train/log/step_log.py); with `test_loss` it is a score in the middle of an epoch, and
with `event` what happened in that step: a save that failed or was waited for, or a signal.
docs/trainer.md lists the fields.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.errors import Damaged, Unreadable
from ckpttool.files.commit import append_line, replacing
from ckpttool.files.failures import naming, reason

LOG = "log.jsonl"


def append(folder: str, entry: Mapping[str, Any]) -> None:
    """Add one object to the log, on a line of its own; NaN and infinity become null.

    Raises:
        FileError: the log can't be written. What was written of the line is taken back.
    """
    path = os.path.join(folder, LOG)
    with naming(path):
        append_line(path, json.dumps(_finite(entry)).encode())


def cut(folder: str, *, epoch: int, step: int) -> None:
    """Remove what a run that continues from here will log again, and lines that a crash has cut off.

    Lines are in the order of the training. So everything is removed from the first line on that is about a
    later epoch or step; a line that names neither stays where it is.

    Args:
        folder: the run's folder; without a log in it, nothing happens.
        epoch: epochs finished.
        step: optimizer steps done since the beginning.

    Raises:
        FileError: the log can't be read or written.
    """
    path = os.path.join(folder, LOG)
    if not os.path.exists(path):
        return
    kept = []
    with naming(path):
        with open(path, "rb") as file:
            for line in file:
                entry = parsed(line)
                if entry is None:
                    continue
                if _number(entry, "epoch") > epoch or _number(entry, "step") > step:
                    break
                kept.append(line.rstrip(b"\n") + b"\n")
        with replacing(path) as file:
            file.writelines(kept)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the objects of a log, in order. A last line that a crash has cut off is left out.

    Args:
        path: a log, or the folder of a run.

    Raises:
        Unreadable: there is none, or it can't be read.
        Damaged: a line other than the last is no JSON object; or there is no line at all.
    """
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
            found = file.read().split(b"\n")
    except FileNotFoundError:
        raise Unreadable(path, "no such file", hint=f"give the folder of a run, or its {LOG}") from None
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    for number, line in enumerate(found, start=1):
        entry = parsed(line)
        if entry is not None:
            yield entry
        elif line.strip() and number < len(found):  # the text after the last line break may be cut off
            raise Damaged(path, f"line {number} is not a JSON object", hint="is this the log of a run?")


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object on a line, or None if there is none: the line is empty, cut off or something else."""
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
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
