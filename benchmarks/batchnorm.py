"""What synchronised BatchNorm costs on the CPU: steps of ResNet-20 on two ranks, against plain ones."""

from __future__ import annotations

from pathlib import Path

from .case import Benchmark, Case, Need, Results, Target, Way
from .commands import PYTHON
from .targets import beyond

CHILD = Path(__file__).parent / "children/batchnorm_steps.py"
STEPS = 20
START, PLAIN, SYNC = "start of two ranks", "BatchNorm", "SyncBatchNorm"
LIMIT = 2.0


def set_up(folder: Path, size: int) -> Case:
    kinds = {START: "start", PLAIN: "plain", SYNC: "sync"}
    return Case(
        f"ResNet-20, {STEPS} steps of 2 × 32 samples on the CPU",
        [Way(name, [PYTHON, CHILD, kind, str(STEPS)]) for name, kind in kinds.items()],
        [Target(f"{SYNC} / {PLAIN}, beyond the start", _ratio, LIMIT, "{:.2f} ×".format)],
        as_ratio=False,
    )


def _ratio(results: Results) -> float:
    """Of the steps alone: importing torch and joining the group take longer than many of them."""
    return beyond(results, SYNC, START) / beyond(results, PLAIN, START)


BENCHMARK = Benchmark(
    "batchnorm", sized=False, need=lambda size: Need(files=1_000_000, memory=1_500_000_000), set_up=set_up
)
