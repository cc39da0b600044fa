"""What synchronised BatchNorm costs on the CPU: steps of ResNet-20 on two ranks, against plain BatchNorm."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .case import Benchmark, Case, Need, Results, Target, Way
from .commands import PYTHON
from .targets import beyond

CHILD = Path(__file__).parent / "children/batchnorm_steps.py"
STEPS = 12
START, NONE, PLAIN, SYNC = "start of two ranks", "no normalisation", "BatchNorm", "SyncBatchNorm"
RATIO, PART = 2.0, 0.6


def set_up(folder: Path, size: int) -> Case:
    kinds = {START: "start", NONE: "none", PLAIN: "plain", SYNC: "sync"}
    return Case(
        f"ResNet-20, {STEPS} steps of 2 × 32 samples on the CPU",
        [Way(name, [PYTHON, CHILD, kind, str(STEPS)]) for name, kind in kinds.items()],
        [
            Target(
                f"a step with {SYNC} / {PLAIN}", partial(_ratio, SYNC, PLAIN), RATIO, "{:.2f} ×".format, SYNC
            ),
            Target(f"part of {SYNC} in its step", partial(_part, SYNC), PART, "{:.0%}".format, SYNC),
        ],
        as_ratio=False,
    )


def _ratio(way: str, against: str, results: Results) -> float:
    """Of the steps only: importing torch and joining the group takes longer than many of them."""
    return beyond(results, way, START) / beyond(results, against, START)


def _part(way: str, results: Results) -> float:
    """The fraction of the step's time spent in the layers."""
    return beyond(results, way, NONE) / beyond(results, way, START)


BENCHMARK = Benchmark(
    "batchnorm", sized=False, need=lambda size: Need(files=1_000_000, memory=1_500_000_000), set_up=set_up
)
