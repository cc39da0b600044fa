"""Merging a ZeRO-3 folder of 8 ranks, which should cost what copying it costs, in little memory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from .case import Benchmark, Case, Need, Way
from .commands import CHILDREN, PYTHON, peer, tool
from .process import timed
from .sizes import show_size
from .targets import at_most_times, peak_at_most

TO_SAFETENSORS, TO_TORCH = "ckpttool merge", "ckpttool merge to .pt"
DEEPSPEED = "DeepSpeed's zero_to_fp32"
TENSORS, RANKS = 128, 8


def set_up(folder: Path, size: int) -> Case:
    """Return the case: `cp`, the tool, and DeepSpeed's own program where DeepSpeed is installed."""
    source = folder / "run"
    timed([PYTHON, CHILDREN / "make_zero3_folder.py", source, str(size), str(TENSORS), str(RANKS)])
    ways = [Way("cp", ["cp", "-r", source, folder / "copy"], folder / "copy")]
    for name, output in ((TO_SAFETENSORS, folder / "out.safetensors"), (TO_TORCH, folder / "out.pt")):
        ways.append(Way(name, tool("merge", source, output), output))
    if find_spec("deepspeed") is not None:
        ways.append(
            Way(DEEPSPEED, peer("merge_with_deepspeed.py", source, folder / "whole"), folder / "whole")
        )
    return Case(
        f"{RANKS} ranks of ZeRO-3 merged, fp32, {show_size(size)}",
        ways,
        [at_most_times(TO_SAFETENSORS, "cp", 1.2), peak_at_most(TO_SAFETENSORS, 64_000_000)],
        memory=2 * size,
    )


def _need(size: int) -> Need:
    return Need(files=2 * size, memory=2 * size if find_spec("deepspeed") is not None else 64_000_000)


BENCHMARK = Benchmark("merge-zero3", True, _need, set_up)
