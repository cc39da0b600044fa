"""The files of 8 ranks merged into one: what copying the bytes costs, and what loading them with torch does.

    python -m benchmarks.merging

The same as `python -m benchmarks --only merge-fsdp --only merge-tp --only merge-zero3`.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from .case import Benchmark, Case, Need, Way
from .commands import CHILDREN, PYTHON, peer, tool
from .process import timed
from .program import main
from .sizes import show_size
from .targets import at_least_times_faster, at_most_times, peak_at_most

PEAK = 64_000_000
TENSORS = 64

KINDS = {"fsdp": "cut by rows", "tp": "cut by rows and columns"}


def set_up(kind: str, folder: Path, size: int) -> Case:
    """Write the files of the ranks, and the whole for `cp`."""
    ranks = folder / "ranks"
    ranks.mkdir()
    timed([PYTHON, CHILDREN / "make_ranks.py", ranks, str(size), str(TENSORS), kind])
    whole, merged, loaded = (folder / f"{name}.safetensors" for name in ("whole", "merged", "loaded"))
    timed(tool("merge", "-q", ranks, whole))
    ours, theirs = "ckpttool merge", "torch.load + copy + save_file"
    return Case(
        f"merge 8 ranks, {KINDS[kind]}, {show_size(size)}",
        [
            Way("cp", ["cp", whole, folder / "copy"], folder / "copy"),
            Way(ours, tool("merge", ranks, merged), merged),
            Way(theirs, peer("merge_with_torch.py", ranks, loaded), loaded),
        ],
        [
            at_most_times(ours, "cp", 1.2),
            at_least_times_faster(ours, theirs, 1.0),
            peak_at_most(ours, PEAK),
        ],
        memory=2 * size,
    )


def set_up_zero3(folder: Path, size: int) -> Case:
    """Write a ZeRO-3 folder; DeepSpeed's own program takes part where DeepSpeed is installed."""
    source, merged, saved, whole = (
        folder / name for name in ("run", "merged.safetensors", "out.pt", "whole")
    )
    timed([PYTHON, CHILDREN / "make_zero3_folder.py", source, str(size), str(TENSORS), "8"])
    ours, to_torch, theirs = "ckpttool merge", "ckpttool merge to .pt", "DeepSpeed's zero_to_fp32"
    ways = [
        Way("cp", ["cp", "-r", source, folder / "copy"], folder / "copy"),
        Way(ours, tool("merge", source, merged), merged),
        Way(to_torch, tool("merge", source, saved), saved),
    ]
    targets = [at_most_times(ours, "cp", 1.2), peak_at_most(ours, PEAK)]
    if find_spec("deepspeed") is not None:
        ways.append(Way(theirs, peer("merge_with_deepspeed.py", source, whole), whole))
        targets.append(at_least_times_faster(ours, theirs, 1.0))
    return Case(f"merge 8 ranks of ZeRO-3, {show_size(size)}", ways, targets, memory=2 * size)


def need(size: int) -> Need:
    """Return what a size needs: the ranks' files, the whole, and a copy; torch's peer holds all in memory."""
    return Need(files=3 * size, memory=2 * size)


BENCHMARKS = [
    *(Benchmark(f"merge-{kind}", True, need, partial(set_up, kind)) for kind in KINDS),
    Benchmark("merge-zero3", True, need, set_up_zero3),
]


if __name__ == "__main__":
    sys.exit(main(BENCHMARKS))
