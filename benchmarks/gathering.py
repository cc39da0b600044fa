"""The cost of joining the ranks' predictions exactly, compared with evaluating and all_gather_object."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from .case import Benchmark, Case, Need, Results, Target, Way
from .commands import PYTHON
from .targets import beyond

CHILD = Path(__file__).parent / "children/gather_rows.py"
MANY, TIMES = 1_000_000, 20
PICTURES, OFTEN = 846, 500
START = "start of two ranks"
GATHER, TUPLES, TENSORS = (
    f"metrics.gather, {TIMES} times",
    "all_gather_object, tuples",
    "all_gather_object, tensors",
)
SMALL, EPOCH = f"metrics.gather, {OFTEN} times", "an epoch of ResNet-20"


def _way(name: str, kind: str, count: int, repeats: int = 1) -> Way:
    return Way(name, [PYTHON, CHILD, kind, str(count), str(repeats)])


def set_up_many(folder: Path, size: int) -> Case:
    ways = [
        _way(START, "start", MANY),
        _way(GATHER, "rows", MANY, TIMES),
        _way(TUPLES, "tuples", MANY),
        _way(TENSORS, "tensors", MANY),
    ]
    times = partial(_share, TUPLES, GATHER, TIMES)
    text = "tuples / metrics.gather, beyond the start"
    return Case(
        f"{MANY:,} predictions of 2 ranks, joined",
        ways,
        [Target(text, times, 10.0, "{:.1f} ×".format, GATHER, at_least=True)],
        as_ratio=False,
    )


def set_up_few(folder: Path, size: int) -> Case:
    ways = [
        _way(START, "start", PICTURES),
        _way(SMALL, "rows", PICTURES, OFTEN),
        _way(EPOCH, "epoch", PICTURES),
    ]
    share: Callable[[Results], float] = partial(_share, SMALL, EPOCH, 1 / OFTEN)
    text = "one metrics.gather / the epoch, beyond the start"
    return Case(
        f"evaluation of {PICTURES} pictures by ResNet-20 on 2 ranks",
        ways,
        [Target(text, share, 0.01, "{:.2%}".format, SMALL)],
        as_ratio=False,
    )


def _share(way: str, against: str, factor: float, results: Results) -> float:
    """Of the work only: importing torch and joining the group takes longer than most of it."""
    return factor * beyond(results, way, START) / beyond(results, against, START)


def _need(size: int) -> Need:
    return Need(files=1_000_000, memory=3_000_000_000)


BENCHMARKS = [
    Benchmark("gather-many", sized=False, need=_need, set_up=set_up_many),
    Benchmark("gather-epoch", sized=False, need=_need, set_up=set_up_few),
]
