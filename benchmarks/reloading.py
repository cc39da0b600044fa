"""Loading a large checkpoint and one forward pass: in no more memory than its size, no slower than torch."""

from __future__ import annotations

from pathlib import Path

from .case import Benchmark, Case, Need, Target, Way
from .commands import CHILDREN, PYTHON, make_checkpoint, peer, tool
from .sizes import show_size
from .targets import at_most_times, peak

IMPORT, RELOAD = "python -c 'import torch'", "ckpttool reload"
MAPPED = "torch.load(mmap=True) + assign=True"


def set_up(folder: Path, size: int) -> Case:
    source = folder / "ddp.pt"
    make_checkpoint(source, size)
    spec = f"{CHILDREN / 'layers.py'}:layers(nbytes={size})"
    return Case(
        f"reload and one forward pass, {show_size(size)}",
        [
            Way(MAPPED, peer("reload_with_torch.py", source, str(size))),
            Way(RELOAD, tool("reload", source, "--model", spec, "--input-shape", "1")),
            Way(IMPORT, [PYTHON, "-c", "import torch"]),
        ],
        [at_most_times(RELOAD, MAPPED, 1.0), _beyond_torch(1.2 * size)],
    )


def _beyond_torch(limit: float) -> Target:
    """Memory beyond that of torch itself: the pages of the mapped file, each read once."""
    text = f"{RELOAD}, memory beyond torch"
    return Target(text, lambda r: float(peak(r, RELOAD) - peak(r, IMPORT)), limit, show_size, RELOAD)


BENCHMARK = Benchmark("reload", True, lambda size: Need(size, size + 700_000_000), set_up)
