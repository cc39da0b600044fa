"""What changed between two checkpoints, and the newer one again, beside the general tools that are there."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from .case import Benchmark, Case, Need, Way
from .commands import CHILDREN, PYTHON, cp, tool
from .process import timed
from .sizes import show_size
from .targets import at_most_times, floor, peak_at_most

PEAK = 64_000_000
KINDS = {
    "step": "1 % of the values changed, bf16",
    "tuned-bf16": "fine-tuned in bf16",
    "tuned-fp32": "fine-tuned in fp32",
}
DELTA, APPLY = "ckpttool delta", "ckpttool apply"
READ, COPY = "cat of both", "cp of the result"
HASH, HASH_COPY = "bare threads, SHA-256 of the newer", "bare threads, copy and SHA-256"
ZSTD, XDELTA = "zstd -3 --patch-from", "xdelta3 -1"


def _files(folder: Path, kind: str, size: int) -> tuple[Path, Path]:
    timed([PYTHON, CHILDREN / "make_step.py", folder, kind, str(size)])
    return folder / "base.safetensors", folder / "new.safetensors"


def _others(base: Path, new: Path, out: Path) -> list[Way]:
    """Return the general tools that are installed, each of which needs memory for the whole base."""
    ways = []
    if shutil.which("zstd"):
        words = ["zstd", "-q", "-f", "-3", "--long=31", f"--patch-from={base}", new, "-o", out]
        ways.append(Way(ZSTD, words, out))
    if shutil.which("xdelta3"):
        ways.append(Way(XDELTA, ["xdelta3", "-f", "-q", "-1", "-e", "-s", base, new, out], out))
    return ways


def set_up_delta(kind: str, folder: Path, size: int) -> Case:
    base, new = _files(folder, kind, size)
    out = folder / "delta"
    sizes = []
    ways = [Way(DELTA, tool("delta", "-q", base, new, out), out), *_others(base, new, out)]
    for way in ways:
        timed(list(way.command))
        sizes.append(f"{way.name} {new.stat().st_size / out.stat().st_size:.2f} ×")
        out.unlink()
    title = f"delta, {KINDS[kind]}, {show_size(size)}; smaller than the result: {', '.join(sizes)}"
    bare = Way(HASH, [PYTHON, "-I", "-S", CHILDREN / "bare_hash.py", new])
    targets = [at_most_times(DELTA, READ, 3), floor(HASH, READ), peak_at_most(DELTA, PEAK)]
    return Case(title, [Way(READ, ["cat", base, new]), bare, *ways], targets, memory=2 * size)


def set_up_apply(kind: str, folder: Path, size: int) -> Case:
    base, new = _files(folder, kind, size)
    timed(tool("delta", "-q", base, new, folder / "delta"))
    copied, out = folder / "copy", folder / "out.safetensors"
    bare = [PYTHON, "-I", "-S", CHILDREN / "bare_hash.py", new, copied]
    ways = [
        Way(COPY, cp(new, copied), copied),
        Way(HASH_COPY, bare, copied),
        Way(APPLY, tool("apply", base, folder / "delta", out), out),
    ]
    targets = [at_most_times(APPLY, COPY, 1.5), floor(HASH_COPY, COPY), peak_at_most(APPLY, PEAK)]
    return Case(f"apply, {KINDS[kind]}, {show_size(size)}", ways, targets, memory=2 * size)


def need(size: int) -> Need:
    return Need(files=4 * size, memory=2 * size)  # what writes the tensors holds them all


BENCHMARKS = [
    *(Benchmark(f"delta-{kind}", True, need, partial(set_up_delta, kind)) for kind in KINDS),
    *(Benchmark(f"apply-{kind}", True, need, partial(set_up_apply, kind)) for kind in ("step", "tuned-bf16")),
]
