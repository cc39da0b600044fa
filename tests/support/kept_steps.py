"""The checkpoints of each step in the folder of a run with `--keep-deltas`."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import runs
from train.checkpoint.files import DELTA, numbered
from train.checkpoint.format import read
from train.config.flags import Every

EACH = {"save_every": Every(1, "steps")}
SETTINGS = {**EACH, "ema": 0.9, "optimizer": "adamw", "momentum": None, "keep_best": 1}
EVERY = 3


def whole(*steps: int) -> set[str]:
    return {numbered(step) for step in steps}


def delta(*steps: int) -> set[str]:
    return {numbered(step, ending=DELTA) for step in steps}


def steps_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("step-")}


def state_of(folder: Path, step: int) -> Path:
    """Return a file of the state of a step, the delta if there is one."""
    path = folder / numbered(step, ending=DELTA)
    return path if path.exists() else folder / numbered(step)


def same(one: Path, other: Path) -> bool:
    """Return whether two checkpoints hold the same, to the last bit, but for what says how they were kept."""
    return runs.different(read(str(one)), read(str(other))) == []
