"""A training run, for the page: its curves, where the time of a step goes, and its evaluations."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.files.commit import open_source_descriptor, reason
from ..core.formats.roots import STATEMENT
from ..core.lazy import np
from ..core.words import counted, printable
from ..errors import CheckFailed, CkptToolError, Damaged, Unreadable
from ..inspecting.run_log import LOG, Points, RunCurves, panels, read_runs, title

if TYPE_CHECKING:
    from ..metrics.certificate import PredictionFile

LONGEST = 64 << 20  # bytes of a statement that are read
MAX_POINTS = 1200  # of a curve: more than a screen has columns
MAX_CLASSES = 64  # in a matrix that can be read; of more, the most frequent confusions are shown
MAX_PAIRS = 200
NUMBERED = "rank*.safetensors"


def is_run(path: str) -> bool:
    """Return whether a path is a folder that a training, or an evaluation, has left."""
    return os.path.lexists(os.path.join(path, LOG)) or bool(evaluations_in(path))


def evaluations_in(folder: str) -> list[str]:
    """Return the folders of evaluations: the folder itself, and those directly in it."""
    inside = glob.escape(folder)
    found = [os.path.join(inside, STATEMENT), os.path.join(inside, "*", STATEMENT)]
    return [os.path.dirname(path) for pattern in found for path in sorted(glob.glob(pattern))]


def training(folders: Sequence[str]) -> dict[str, Any]:
    """Return the curves of runs that have a log, each panel with the curves of all of them.

    Raises:
        Damaged, Unreadable: a log is.
    """
    runs = read_runs([folder for folder in folders if os.path.lexists(os.path.join(folder, LOG))])
    quantities = panels(runs) if runs else ()
    shown = [
        {"quantity": printable(each), "title": printable(title(each)), "curves": _curves(runs, each)}
        for each in quantities
    ]
    seconds = [{printable(name): _points(each) for name, each in run.seconds.items()} for run in runs]
    return {"runs": [printable(run.name) for run in runs], "panels": shown, "seconds": seconds}


def _curves(runs: Sequence[RunCurves], quantity: str) -> list[dict[str, Any]]:
    kinds = {"training": "train", "training, by epoch": "epochs", "test": "test"}
    return [
        {"run": number, "kind": kind, "points": _points(getattr(run, name)[quantity])}
        for number, run in enumerate(runs)
        for kind, name in kinds.items()
        if quantity in getattr(run, name)
    ]


def _points(points: Points) -> list[list[float]]:
    """Return at most MAX_POINTS points. Of more, each stretch keeps its least and its most, so peaks stay."""
    if len(points) > MAX_POINTS:
        size = -(-2 * len(points) // MAX_POINTS)
        stretches = (range(start, min(start + size, len(points))) for start in range(0, len(points), size))
        kept: set[int] = {0, len(points) - 1}
        for stretch in stretches:
            numbers = [at for at in stretch if points[at][1] == points[at][1]] or [stretch[0]]
            kept |= {min(numbers, key=lambda at: points[at][1]), max(numbers, key=lambda at: points[at][1])}
        points = [points[at] for at in sorted(kept)]
    return [[float(f"{at:.6g}"), float(f"{value:.6g}")] for at, value in points]


def evaluation(folder: str) -> dict[str, Any]:
    """Return an evaluation: what it states, whether its prediction files say the same, and what was confused.

    Raises:
        Damaged, Unreadable: the statement is no JSON object, or can't be read.
    """
    path = os.path.join(folder, STATEMENT)
    try:
        with open(open_source_descriptor(path), "rb") as file:  # which a pipe does not hold up
            stated = json.loads(file.read(LONGEST))
    except Unreadable as fault:
        raise Unreadable(path, fault.reason) from None
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    except (ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        raise Damaged(path, "is not a JSON object", hint="is this of train/evaluate.py --out?")
    rows = stated.pop("per_class", None)
    found: dict[str, Any] = {
        "folder": printable(folder),
        "stated": [[printable(str(key)), _value(value)] for key, value in stated.items()],
        "per_class": [*map(_of_class, rows)] if isinstance(rows, list) else [],
    }
    if files := sorted(glob.glob(os.path.join(glob.escape(folder), NUMBERED))):
        found |= _recomputed(files, stated)
    return found


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return printable("; ".join(f"{key} {_value(item)}" for key, item in value.items()))[:2000]
    return printable(f"{value:.6g}" if isinstance(value, float) else str(value))[:2000]


def _of_class(row: Any) -> list[Any]:
    """Return the name of a class and its figures, those that are numbers."""
    row = row if isinstance(row, dict) else {}
    values = [row.get(name) for name in ("samples", "predicted", "correct", "precision", "recall", "f1")]
    numbers = [value if isinstance(value, int | float) and abs(value) < 2**53 else None for value in values]
    return [printable(str(row.get("class", "?"))), *numbers]


def _recomputed(paths: Sequence[str], stated: dict[str, Any]) -> dict[str, Any]:
    """Return whether the certificate of prediction files is the stated one, and their confusions."""
    from ..metrics.certificate import read, recompute

    try:
        files = [*map(read, paths)]
        again = recompute(files)
    except CkptToolError as error:
        verdict = "does not hold" if isinstance(error, CheckFailed) else "can't be checked"
        return {"certificate": [False, printable(f"{verdict}: {error.message}")]}
    statement = again.statement()
    if names := [name for name in statement if name in stated and stated[name] != statement[name]]:
        return {
            "certificate": [False, f"does not hold: the prediction files give another {', '.join(names)}"]
        }
    count = f"{again.samples:,} samples of {counted(again.ranks, 'rank')}"
    said = f"holds: recomputed from the prediction files, {count}, each sample once"
    return {"certificate": [True, said], "confusion": _confusion(files, again.classes)}


def _confusion(files: Sequence[PredictionFile], classes: Sequence[str]) -> dict[str, Any]:
    """Return how often each class was predicted as each other: a matrix, or of many the largest."""
    pairs = np.concatenate(
        [np.stack([each.predictions.label, each.predictions.prediction]) for each in files], axis=1
    )
    found, counts = np.unique(pairs, axis=1, return_counts=True)
    cells = sorted(zip(*found.tolist(), counts.tolist(), strict=True), key=lambda cell: -cell[2])
    named = files[0].evaluation.classes is not None
    place = {number if named else int(name): number for number, name in enumerate(classes)}
    if len(classes) <= MAX_CLASSES and all({*cell[:2]} <= place.keys() for cell in cells):
        matrix = [[place[label], place[said], count] for label, said, count in cells]
        return {"classes": [*map(printable, classes)], "cells": matrix}

    def name(number: int) -> str:
        return printable(classes[place[number]]) if number in place else str(number)

    wrong = [[name(label), name(said), count] for label, said, count in cells if label != said]
    return {"pairs": wrong[:MAX_PAIRS]}
