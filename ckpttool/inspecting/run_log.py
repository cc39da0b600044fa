"""The log of a training run, log.jsonl, read: its entries, and its curves over the epochs.

The trainer writes one JSON object per line (train/log/step_log.py).
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core import system
from ..core.files.commit import reason
from ..errors import Damaged, Unreadable

LOG = "log.jsonl"
NAME_A_RUN = f"give the folder of a run, or its {LOG}"


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the objects of a log, or of a run's folder, without a last line that was cut off."""
    path = os.path.join(path, LOG) if os.path.isdir(path) else os.fspath(path)
    entries = list(_entries(path))
    if not entries:
        hint = "the first comes after --log-every steps or an epoch"
        raise Damaged(path, "holds no entries yet", hint=hint)
    return entries


def _entries(path: str) -> Iterator[dict[str, Any]]:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Unreadable(path, "is not a regular file", hint=NAME_A_RUN)
            lines_read = file.read().split(b"\n")
    except FileNotFoundError:
        raise Unreadable(path, "no such file", hint=NAME_A_RUN) from None
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    for number, line in enumerate(lines_read, start=1):
        entry = parsed(line)
        if entry is not None:
            yield entry
        elif line.strip() and number < len(lines_read):  # the text after the last line break may be cut off
            raise Damaged(path, f"line {number} is not a JSON object", hint="is this the log of a run?")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | system.READ)  # a named pipe would wait for a writer


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object on a line; None if it is empty, cut off or something else."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


# ---- Curves over the epochs

# (epochs, value), in the order of the training; a value is NaN where the log has null.
Points = list[tuple[float, float]]

TITLES = {
    "lr": "Learning rate",
    "samples_per_second": "Throughput, samples per second",
    "mse": "Mean squared error",
    "mae": "Mean absolute error",
    "r2": "R²",
}
MAX_SCORES = 6  # panels of scores; a picture with more could not be read
LARGEST = 1e150  # the span of an axis with larger values would not be finite
MAX_NAME = 44  # characters of a run's name; a longer one loses its middle


@dataclass(frozen=True)
class RunCurves:
    """The curves of one run, by quantity: `loss`, `accuracy` or what its task measures, `lr`, and so on."""

    name: str
    train: dict[str, Points] = field(default_factory=dict)
    test: dict[str, Points] = field(default_factory=dict)
    epochs: dict[str, Points] = field(default_factory=dict)  # of the training, where `train` is of its steps
    # mean seconds of a step, as `step`, and of each of its phases; by rank 0's log of all ranks
    seconds: dict[str, Points] = field(default_factory=dict)


def read_runs(paths: Sequence[str]) -> list[RunCurves]:
    """Return the runs with these logs or folders, in this order."""
    runs = [curves(name, read(path)) for name, path in zip(names_of(paths), paths, strict=True)]
    for run, path in zip(runs, paths, strict=True):
        if not run.train and not run.test:
            raise Damaged(path, "holds no entry with a loss or a score", hint="is this the log of a run?")
    return runs


def curves(name: str, entries: Iterable[Mapping[str, Any]]) -> RunCurves:
    """Return the curves of a run from the entries of its log.

    The curves of the training are those of the steps, and where a log has none, of the epochs. Loss and speed
    of less than half an interval, as at the end of a training, say little and are left out.
    """
    run, by_epoch, entries = RunCurves(name), RunCurves(name), list(entries)
    usual = max((_value(entry["steps"]) for entry in entries if "steps" in entry), default=1.0)
    for entry in entries:
        if "epoch" in entry:
            _add_epoch(by_epoch, entry)
        elif "test_loss" in entry:
            tested = {name.removeprefix("test_"): value for name, value in entry.items()}
            _add_score(by_epoch.test, _value(entry.get("epochs")), tested)
        elif "step" in entry:
            at = _value(entry.get("epochs"))
            too_short = 2 * _value(entry.get("steps", usual)) < usual
            for quantity in ("lr",) if too_short else ("loss", "lr", "samples_per_second"):
                _add(run.train, quantity, at, entry.get(quantity))
            if not too_short:
                _add_seconds(run.seconds, at, entry)
    losses = {"loss": by_epoch.train["loss"]} if {"loss"} <= run.train.keys() & by_epoch.train.keys() else {}
    return RunCurves(name, {**by_epoch.train, **run.train}, by_epoch.test, losses, run.seconds)


def _add_seconds(seconds: dict[str, Points], at: float, entry: Mapping[str, Any]) -> None:
    steps = _value(entry.get("steps"))
    for key in (key for key in entry if key == "seconds" or key.endswith("_seconds")):
        if steps > 0:
            _add(seconds, key.removesuffix("seconds").rstrip("_") or "step", at, _value(entry[key]) / steps)


def _add_epoch(run: RunCurves, entry: Mapping[str, Any]) -> None:
    at = _value(entry["epoch"])
    for quantity, key in (("loss", "train_loss"), ("accuracy", "train_accuracy"), ("lr", "lr")):
        if key in entry:
            _add(run.train, quantity, at, entry[key])
    seconds = _value(entry.get("train_seconds", entry.get("seconds")))
    samples = _value(entry.get("train_samples"))
    if samples > 0 and seconds > 0:
        _add(run.train, "samples_per_second", at, samples / seconds)
    _add_score(run.test, at, entry)


def _add_score(test: dict[str, Points], at: float, entry: Mapping[str, Any]) -> None:
    metrics = entry.get("metrics")
    scores = {name: entry[name] for name in ("loss", "accuracy") if name in entry}
    for name, value in {**scores, **(metrics if isinstance(metrics, dict) else {})}.items():
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            _add(test, name, at, value)


def _add(curves: dict[str, Points], quantity: str, at: float, value: Any) -> None:
    if math.isfinite(at):
        curves.setdefault(quantity, []).append((at, _value(value)))


def _value(value: Any) -> float:
    """Return a number of the log as a float; NaN for null and whatever else is no finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= LARGEST else math.nan


def names_of(paths: Sequence[str]) -> list[str]:
    """Return a name for each run: as much of the end of its path as tells it from the others.

    A run that is given twice gets a number.
    """
    folders = [_folder(path) for path in paths]
    names: list[str] = []
    for folder in folders:
        others = set(folders) - {folder}
        parts = folder.strip(os.sep).split(os.sep)
        tails = [os.sep.join(parts[-length:]) for length in range(1, len(parts) + 1)]
        name = next((t for t in tails if not any(f"/{o}".endswith(f"/{t}") for o in others)), folder)
        names.append(shortened(name))
    counted = ((name, names.count(name), names[: at + 1].count(name)) for at, name in enumerate(names))
    return [f"{name} ({number})" if count > 1 else name for name, count, number in counted]


def _folder(path: str) -> str:
    """Return the absolute folder of a run, or a log's own path where it has another name."""
    folder, name = os.path.split(os.path.abspath(path))
    return folder if name == LOG else os.path.join(folder, name)


def shortened(name: str) -> str:
    """Return a name without its middle, if it is long: its beginning and its end tell most."""
    if len(name) <= MAX_NAME:
        return name
    head = (MAX_NAME - 1) // 2
    return f"{name[:head]}…{name[-(MAX_NAME - 1 - head) :]}"


def panels(runs: Sequence[RunCurves]) -> list[str]:
    """Return the quantities that get a panel: the loss, the scores, the learning rate, the throughput."""
    scores = dict.fromkeys(name for run in runs for name in (*run.test, *run.train))
    others = [name for name in scores if name not in ("loss", "lr", "samples_per_second")]
    wanted = ("loss", *others[:MAX_SCORES], "lr", "samples_per_second")
    return [name for name in wanted if any(name in run.train or name in run.test for run in runs)]


def title(quantity: str) -> str:
    """Return what a quantity is called above its panel."""
    return TITLES.get(quantity, quantity.replace("_", " ").capitalize())
