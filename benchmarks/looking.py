"""Read-only commands: listing very many tensors, and reading very many bytes."""

from __future__ import annotations

from pathlib import Path

from .case import Benchmark, Case, Need, Way
from .commands import PYTHON, cp, make_checkpoint, tool
from .process import timed
from .sizes import show_size
from .targets import at_least_times_faster, at_most_seconds, at_most_times, peak_at_most

NOTHING, INSPECT, INSPECT_PT = "python -c pass", "inspect, .safetensors", "inspect, .pt"
SHA, DIGEST, VERIFY = "sha256sum", "ckpttool digest", "ckpttool verify"
TENSORS = 100_000


def set_up_inspect(folder: Path, size: int) -> Case:
    source = folder / "many.pt"
    make_checkpoint(source, 16 * TENSORS, TENSORS)
    converted = folder / "many.safetensors"
    timed(tool("convert", "-q", source, converted))
    return Case(
        f"inspect of {TENSORS:,} tensors",
        [
            Way(NOTHING, [PYTHON, "-c", "pass"]),
            Way(INSPECT, tool("inspect", converted)),
            Way(INSPECT_PT, tool("inspect", source)),
        ],
        [at_most_seconds(INSPECT, 0.6), at_most_seconds(INSPECT_PT, 0.6)],
        as_ratio=False,
    )


def set_up_digest(folder: Path, size: int) -> Case:
    source = folder / "in.pt"
    make_checkpoint(source, size)
    return Case(
        f"digest, {show_size(size)}",
        [
            Way(SHA, ["sha256sum", source]),
            Way(DIGEST, tool("digest", source)),
        ],
        [at_least_times_faster(DIGEST, SHA, 0.8), peak_at_most(DIGEST, 64_000_000)],
    )


def set_up_verify(folder: Path, size: int) -> Case:
    source, copied = folder / "in.pt", folder / "copy.pt"
    make_checkpoint(source, size)
    return Case(
        f"verify, {show_size(size)}",
        [Way("cp", cp(source, copied), copied), Way(VERIFY, tool("verify", source))],
        [at_most_times(VERIFY, "cp", 0.5), peak_at_most(VERIFY, 40_000_000)],
        memory=size,
    )


BENCHMARKS = [
    Benchmark("inspect", False, lambda size: Need(100_000_000, 400_000_000), set_up_inspect),
    Benchmark("digest", True, lambda size: Need(size, 64_000_000), set_up_digest),
    Benchmark("verify", True, lambda size: Need(2 * size, 64_000_000), set_up_verify),
]
