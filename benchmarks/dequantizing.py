"""Packed numbers made plain, which should cost what copying the result costs, in bounded memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .case import Benchmark, Case, Need, Way
from .commands import CHILDREN, PYTHON, cp, tool
from .process import timed
from .sizes import show_size
from .targets import at_most_times, peak_at_most

PEAK = 300_000_000
SCHEMES = {"fp8": "fp8, blocks of 128 × 128", "gptq": "GPTQ of 4 bits"}


def set_up(scheme: str, folder: Path, size: int) -> Case:
    packed, plain = folder / "packed", folder / "plain.safetensors"
    timed([PYTHON, CHILDREN / "make_packed.py", packed, scheme, str(size)])
    timed(tool("convert", "-q", packed / "model.safetensors", plain, "--dequantize"))
    name, output = f"--dequantize, {scheme}", folder / "out.safetensors"
    command = tool("convert", packed / "model.safetensors", output, "--dequantize")
    ways = [
        Way("cp of the result", cp(plain, folder / "copy"), folder / "copy"),
        Way(name, command, output),
    ]
    if scheme == "fp8":  # whose file has a byte for each number, but for its scales
        bare = [PYTHON, CHILDREN / "bare_lookup.py", packed / "model.safetensors", folder / "looked-up"]
        ways.insert(1, Way("threads that look up", bare, folder / "looked-up"))
    targets = [at_most_times(name, "cp of the result", 1.5), peak_at_most(name, PEAK)]
    title = f"dequantising {SCHEMES[scheme]}, to {show_size(size)}"
    return Case(title, ways, targets, memory=2 * size)


def need(size: int) -> Need:
    return Need(files=3 * size, memory=2 * size)  # what writes the tensors holds them all


BENCHMARKS = [Benchmark(f"dequantize-{scheme}", True, need, partial(set_up, scheme)) for scheme in SCHEMES]
