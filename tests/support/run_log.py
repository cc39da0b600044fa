"""What a training leaves: its log, a record of one made up, and the checkpoints of each step."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.ranks import runs
from train.checkpoint.files import DELTA, numbered
from train.checkpoint.format import read
from train.config.flags import Every

# ---- The log of a training, read back; and a record of one, made up -----------------------------------


def entries_of(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's log that are about whole epochs, and not about steps."""
    return [entry for entry in entries_of(folder) if "epoch" in entry]


def timeless(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries without what differs from one run to the next: times, memory, waits for a slow disk."""
    return [
        {name: value for name, value in entry.items() if "second" not in name and name != "peak_memory"}
        for entry in entries
        if entry.get("event") != "save waited"
    ]


BEGIN: dict[str, Any] = {
    "kind": "begin",
    "step": 0,
    "source": None,
    "arguments": ["--model", "simple-cnn"],
    "init": None,
    "code": {"model": "simple-cnn", "data": "digits", "task": "classification"},
    "every": 2,
    "ranks": 1,
    "virtual_ranks": None,
    "versions": {"threads": 1},
    "weights": "0",
}
STEP: dict[str, Any] = {"kind": "step", "step": 2, "weights": "1", "samples": {"2": [[0], "ab"]}}


def record(folder: Path, *entries: dict[str, Any]) -> Path:
    """Write a chain of these entries, whose hashes are right."""
    before, lines = "0" * 64, []
    for number, entry in enumerate(entries, start=1):
        lines.append(json.dumps({**entry, "n": number, "prev": before}).encode())
        before = hashlib.sha256(lines[-1]).hexdigest()
    (folder / "run.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


# ---- The checkpoints of each step in the folder of a run with `--keep-deltas` -------------------------


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
