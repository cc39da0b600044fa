"""Comparing two files, and averaging several: how long it takes, and how much memory."""

from __future__ import annotations

from pathlib import Path

from .case import Benchmark, Case, Need, Way
from .commands import make_checkpoint, tool
from .process import timed
from .sizes import show_size
from .targets import at_most_times, peak_at_most

CMP, DIFF, AVERAGE, CAT = "cmp", "ckpttool diff", "ckpttool average", "cat of the five"
FILES = 5


def set_up_diff(folder: Path, size: int) -> Case:
    """Two files with the same contents: all of both must be read."""
    make_checkpoint(folder / "a.pt", size)
    timed(["cp", folder / "a.pt", folder / "b.pt"])
    return Case(
        f"diff, {show_size(size)}",
        [
            Way(CMP, ["cmp", folder / "a.pt", folder / "b.pt"]),
            Way(DIFF, tool("diff", folder / "a.pt", folder / "b.pt")),
        ],
        [at_most_times(DIFF, CMP, 1.3), peak_at_most(DIFF, 64_000_000)],
    )


def set_up_average(folder: Path, size: int) -> Case:
    """Five files, with the given total size."""
    make_checkpoint(folder / "0.pt", size // FILES)
    inputs = [folder / f"{i}.pt" for i in range(FILES)]
    for path in inputs[1:]:
        timed(["cp", inputs[0], path])
    output = folder / "mean.pt"
    return Case(
        f"average of {FILES} files, {show_size(size)} together",
        [Way(CAT, ["cat", *inputs]), Way(AVERAGE, tool("average", *inputs, output), output)],
        [at_most_times(AVERAGE, CAT, 2.5), peak_at_most(AVERAGE, 100_000_000)],
    )


BENCHMARKS = [
    Benchmark("diff", True, lambda size: Need(2 * size, 64_000_000), set_up_diff),
    Benchmark("average", True, lambda size: Need(size + size // FILES, 100_000_000), set_up_average),
]
