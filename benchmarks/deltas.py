"""What changed between two checkpoints, and the newer one again, beside the general tools that are there."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from .case import Benchmark, Case, Need, Target, Way
from .commands import CHILDREN, PYTHON, cp
from .delta_tools import KINDS, OURS, make_files, others, packed
from .sizes import show_size
from .targets import at_most_times, floor, peak_at_most

PEAK = 64_000_000
SMALLER = {"step": 30, "tuned-bf16": 1.8, "tuned-fp32": 1 / 1.001}
READ, COPY = "cat of both", "cp of the result"
HASH, HASH_COPY = "bare threads, SHA-256 of the newer", "bare threads, copy and SHA-256"


def set_up_delta(kind: str, folder: Path, size: int) -> Case:
    base, new = make_files(folder, kind, size)
    out, (there, absent) = folder / "delta", others(kind)
    tools = [OURS, *there]
    bare = Way(HASH, [PYTHON, "-I", "-S", CHILDREN / "bare_hash.py", new])
    ways = [Way(READ, ["cat", base, new]), bare]
    ways += [Way(each.name, each.pack(base, new, out), out) for each in tools]
    targets = [at_most_times(OURS.name, READ, 3), floor(HASH, READ), peak_at_most(OURS.name, PEAK)]
    for name, path in packed(tools, base, new, folder).items():
        targets.append(_smaller(name, new, path, SMALLER[kind] if name == OURS.name else math.inf))
        path.unlink()
    lacks = "".join(f"; {name} is absent" for name in absent)
    return Case(f"delta, {KINDS[kind]}, {show_size(size)}{lacks}", ways, targets, memory=2 * size)


def _smaller(way: str, new: Path, packed: Path, limit: float) -> Target:
    """How many times smaller what a tool packed is than the result; of another's tool no target."""
    times = new.stat().st_size / packed.stat().st_size
    text = f"{way}, smaller than the result"
    return Target(text, lambda results: times, limit, "{:.2f} ×".format, way, at_least=True)


def set_up_apply(kind: str, folder: Path, size: int) -> Case:
    base, new = make_files(folder, kind, size)
    tools = [OURS, *others(kind)[0]]
    deltas = packed(tools, base, new, folder)
    copied, out = folder / "copy", folder / "out.safetensors"
    bare = [PYTHON, "-I", "-S", CHILDREN / "bare_hash.py", new, copied]
    ways = [Way(COPY, cp(new, copied), copied), Way(HASH_COPY, bare, copied)]
    ways += [Way(each.name, each.unpack(base, deltas[each.name], out), out) for each in tools]
    targets = [at_most_times(OURS.name, COPY, 1.5), floor(HASH_COPY, COPY), peak_at_most(OURS.name, PEAK)]
    return Case(f"apply, {KINDS[kind]}, {show_size(size)}", ways, targets, memory=2 * size)


def need(size: int) -> Need:
    return Need(files=4 * size, memory=2 * size)  # what writes the tensors holds them all


BENCHMARKS = [
    *(Benchmark(f"delta-{kind}", True, need, partial(set_up_delta, kind)) for kind in KINDS),
    *(Benchmark(f"apply-{kind}", True, need, partial(set_up_apply, kind)) for kind in ("step", "tuned-bf16")),
]
