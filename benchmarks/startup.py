"""What a short command costs apart from its work: nobody should wait for a tool to start."""

from __future__ import annotations

from pathlib import Path

from .case import Benchmark, Case, Need, Way
from .commands import PYTHON, make_checkpoint, tool
from .targets import at_most_beyond

NOTHING = "python -c pass"
HELP = "ckpttool --help"
SMALL = "ckpttool strip-prefix, 1 MB"
TORCH = "python -c 'import torch'"


def set_up(folder: Path, size: int) -> Case:
    source, written = folder / "small.pt", folder / "small.safetensors"
    make_checkpoint(source, 1_000_000)
    return Case(
        "start-up",
        [
            Way(NOTHING, [PYTHON, "-c", "pass"]),
            Way(HELP, tool("--help")),
            Way(SMALL, tool("strip-prefix", source, written), written),
            Way(TORCH, [PYTHON, "-c", "import torch"]),
        ],
        [at_most_beyond(HELP, NOTHING, 0.15), at_most_beyond(SMALL, NOTHING, 0.15)],
        as_ratio=False,
    )


BENCHMARK = Benchmark(
    "start-up", sized=False, need=lambda size: Need(files=10_000_000, memory=600_000_000), set_up=set_up
)
