"""The cost of a save: train/main.py against torch.save and torch.distributed.checkpoint.async_save.

    python -m benchmarks.saving

One process trains a network whose state (Adam's included) has the given size, and the ways to save it take
turns, round after round. `blocked` is the time for which training stands still; `copy` is that of copying the
state into memory that has been used before, below which nothing can be that lets training go on. Then the
same number of steps is trained with one save, in each way, and without.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import machine
from .commands import CHILDREN, PYTHON
from .markdown import table
from .own_program import parsed, parser_of, run, show

CHILD = CHILDREN / "saving_turns.py"
NAMES = {
    "copy": "a copy of the state in memory",
    "async": "train/main.py --save async",
    "sync": "train/main.py --save sync",
    "sync 64": "train/main.py --save sync, tensors at 64 bytes",
    "torch.save": "torch.save",
    "dcp": "dcp.async_save",
    "dcp again": "dcp.async_save, its memory used again",
    "none": "no save",
}
Found = dict[str, Any]

# Targets: blocked at most so many copies; torch.save blocks so much longer; at most this part of a run.
OF_COPY, OF_TORCH, OVERHEAD = 1.2, 5.0, 0.03


def measure(
    folder: Path, *, megabytes: int = 500, rounds: int = 5, steps: int = 50, batch: int = 512
) -> Found:
    """Return the seconds of each way in each round, as `children/saving_turns.py` writes them."""
    run(PYTHON, CHILD, folder, megabytes, rounds, steps, batch)
    found: Found = json.loads((folder / "seconds.json").read_text())
    return found


def ratio(seconds: dict[str, list[float]], way: str, against: str) -> float:
    """Return how many times as long one way takes as another: the median over rounds."""
    return statistics.median(a / b for a, b in zip(seconds[way], seconds[against], strict=True))


def as_markdown(found: Found) -> str:
    """Return the tables of seconds, and of the targets."""
    blocked, whole = found["blocked"], found["whole"]
    rows = [["a save", "blocked", "min-max", "× a copy", "the first"]]
    for way, seconds in blocked.items():
        spread = f"{min(seconds):.3f}-{max(seconds):.3f} s"
        middle, first = statistics.median(seconds), found["first"][way]
        times = f"{ratio(blocked, way, 'copy'):.2f}"
        rows.append([NAMES[way], f"{middle:.3f} s", spread, times, f"{first:.3f} s"])
    tables = [table(rows)]
    targets = [("async / copy", ratio(blocked, "async", "copy"), OF_COPY, False)]
    targets.append(("torch.save / async", ratio(blocked, "torch.save", "async"), OF_TORCH, True))
    if whole:
        rows = [["the same steps with", "seconds", "beyond no save", "of CPU time"]]
        for way, seconds in whole.items():
            beyond = [f"{ratio(each, way, 'none') - 1:+.1%}" for each in (whole, found["cpu"])]
            rows.append([NAMES[way], f"{statistics.median(seconds):.1f} s", *beyond])
        tables.append(table(rows))
        targets.append(("async, beyond no save", ratio(whole, "async", "none") - 1, OVERHEAD, False))
    rows = [["target", "limit", "measured", ""]]
    for text, value, limit, at_least in targets:
        met = value >= limit if at_least else value <= limit
        shown = ["{:.1%}" if limit == OVERHEAD else "{:.2f} ×"] * 2
        limits, measured = (form.format(number) for form, number in zip(shown, (limit, value), strict=True))
        rows.append([text, f"{'≥' if at_least else '≤'} {limits}", measured, "met" if met else "MISSED"])
    return "\n\n".join([*tables, table(rows)])


def main() -> int:
    parser = parser_of("saving", __doc__, megabytes=500, rounds=5, steps=50, batch=512)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the checkpoints (a temporary one)")
    options = parsed(parser)
    with tempfile.TemporaryDirectory(prefix="ckpttool-bench-", dir=options.folder) as name:
        folder, load = Path(name), machine.load()
        counts = {"rounds": options.rounds, "steps": options.steps, "batch": options.batch}
        found = measure(folder, megabytes=options.megabytes, **counts)
        about = f"{machine.about(folder)}; {load} at the start"
    what = f"A state of {found['bytes'] / 1e6:.0f} MB, {options.rounds} rounds of {options.steps} steps"
    markdown = f"{as_markdown(found)}\n\n{what}, batch {options.batch}. Measured {about}."
    show(markdown, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
