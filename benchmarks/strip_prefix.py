"""A large `.pt` to `.safetensors` without its prefix, which should cost less than `cp`."""

from __future__ import annotations

from pathlib import Path

from .case import Benchmark, Case, Need, Way
from .commands import FLOOR, bare_copy, cp, make_checkpoint, peer, tool
from .sizes import show_size
from .targets import at_least_times_faster, at_most_times, floor, peak_at_most

TOOL = "ckpttool strip-prefix"
UNCHECKED = "ckpttool strip-prefix --no-verify"
MAPPED = "torch.load(mmap=True) + save_file"
PLAIN = "torch.load + save_file"

# Memory of a process that has only imported torch.
TORCH = 600_000_000


def set_up(folder: Path, size: int) -> Case:
    source, copied, written = folder / "ddp.pt", folder / "copy.pt", folder / "plain.safetensors"
    make_checkpoint(source, size)
    script = "strip_prefix_with_torch.py"
    return Case(
        f"strip-prefix, {show_size(size)} .pt to .safetensors",
        [
            Way("cp", cp(source, copied), copied),
            Way(FLOOR, bare_copy(source, copied), copied),
            Way(TOOL, tool("strip-prefix", source, written), written, compared=True),
            Way(UNCHECKED, tool("strip-prefix", "--no-verify", source, written), written, compared=True),
            Way(MAPPED, peer(script, source, written, "mmap"), written, compared=True),
            Way(PLAIN, peer(script, source, written), written, compared=True),
        ],
        [
            at_most_times(TOOL, "cp", 1.0),
            at_most_times(UNCHECKED, "cp", 0.75),
            floor(FLOOR, "cp"),
            at_least_times_faster(TOOL, PLAIN, 7),
            peak_at_most(TOOL, 40_000_000),
        ],
        memory=2 * size,
    )


def need(size: int) -> Need:
    """Input and output as files; plain `torch.load` also holds a loaded copy."""
    return Need(files=2 * size, memory=size + TORCH)


BENCHMARK = Benchmark("strip-prefix", sized=True, need=need, set_up=set_up)
