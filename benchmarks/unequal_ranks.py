"""Samples per second of train/main.py with a rank of half the speed: equal shares against --rank-share auto.

    python -m benchmarks.unequal_ranks

Two ranks over gloo on the CPU; for each sample the second one pauses for twice as long as the first. With
shares of two thirds and one third both are done at once, 1.5 times as fast as with equal ones. The ways
take turns, round after round; the times are those of the epochs in log.jsonl, so starting and measuring is
not in them, and a short evaluation is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from . import machine
from .commands import CHILDREN, PYTHON
from .own_program import run

ROOT = Path(__file__).parents[1]
CHILD = CHILDREN / "slowed_rank.py"
WAYS = {"equal shares": [], "--rank-share auto": ["--rank-share", "auto"]}
TARGET = 1.3


def epoch_seconds(folder: Path, flags: list[str], epochs: int) -> tuple[float, tuple[int, ...]]:
    """Train in a folder; return the median time of an epoch, and the ranks' shares."""
    command = [PYTHON, ROOT / "train/main.py", "--spawn", 2]
    command += ["--model", f"{CHILD}:model", "--data", f"{CHILD}:data"]
    command += ["--batch-size", 96, "--epochs", epochs, "--out", folder, *flags]
    run(*command, OMP_NUM_THREADS="1")
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    seconds = statistics.median(entry["seconds"] for entry in entries if "step" not in entry)
    plan = torch.load(folder / "last.pt", weights_only=True)["plan"]
    return seconds, tuple(plan["rank_share"] or (1, 1))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unequal_ranks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="in each round (%(default)s)")
    options = parser.parse_args()
    ratios = []
    load = machine.load()
    with tempfile.TemporaryDirectory(prefix="ckpttool-bench-") as name:
        for number in range(options.rounds):
            seconds = {}
            for way, flags in WAYS.items():
                folder = Path(name) / f"{number}-{len(flags)}"
                seconds[way], shares = epoch_seconds(folder, flags, options.epochs)
                print(f"round {number + 1}  {way:<17} {seconds[way]:6.3f} s an epoch, shares {shares}")
            equal, auto = seconds.values()
            ratios.append(equal / auto)
    print(f"equal shares / --rank-share auto: {statistics.median(ratios):.2f} × (target {TARGET})")
    print(f"Measured {machine.date()}; {machine.versions()}; {load} at the start.")
    return int(statistics.median(ratios) < TARGET)


if __name__ == "__main__":
    sys.exit(main())
