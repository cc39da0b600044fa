"""What a tensor costs: very many small ones, of which each command has to make, copy and compare each."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .case import Benchmark, Case, Need, Way
from .commands import make_checkpoint, peer, tool
from .targets import at_most_seconds, peak_at_most

TORCH, PEAK = "torch.load + torch.save", 150_000_000
# The most seconds for 100,000 tensors; more of them may take as much longer as there are more.
SECONDS = {"inspect": 0.6, ".pt to .safetensors": 1.5, ".pt to .pt": 2.5, "diff of two": 3.0}
MANY = 100_000


def set_up(tensors: int, folder: Path, size: int) -> Case:
    source, same = folder / "many.pt", folder / "same.pt"
    make_checkpoint(source, 16 * tensors, tensors)
    same.hardlink_to(source)
    safetensors, pickled, by_torch = (folder / f"out{end}" for end in (".safetensors", ".pt", ".torch.pt"))
    strip = "strip-prefix"
    ways = [
        Way(TORCH, peer("load_and_save_with_torch.py", source, by_torch), by_torch),
        Way("inspect", tool("inspect", source)),
        Way(".pt to .safetensors", tool(strip, source, safetensors), safetensors),
        Way(".pt to .pt", tool(strip, source, pickled), pickled),
        Way("diff of two", tool("diff", source, same)),
        Way("verify", tool("verify", source)),
    ]
    targets = [at_most_seconds(way, seconds * tensors / MANY) for way, seconds in SECONDS.items()]
    targets += [peak_at_most(way, PEAK * tensors // MANY) for way in SECONDS]
    return Case(f"{tensors:,} tensors of 16 bytes, {strip}", ways, targets)


def _need(tensors: int, size: int) -> Need:
    return Need(1200 * tensors, 4000 * tensors)


BENCHMARKS = [
    Benchmark(name, False, partial(_need, tensors), partial(set_up, tensors))
    for name, tensors in (("many-tensors", MANY), ("million-tensors", 10 * MANY))
]
