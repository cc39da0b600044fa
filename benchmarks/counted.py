"""python -m benchmarks.counted: work of some commands that is counted, not timed, beside what it was before.

It takes seconds and needs no quiet machine, so CI runs it (tests/benchmarks/test_benchmarks.py). A count that
is larger than the recorded one by more than its slack is a step back: exit code 1. `--record` records the
counts of now, for steps forward, or for those back that are worth it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .commands import CHILDREN, PYTHON

RECORD = Path(__file__).with_suffix(".json")

Counts = Mapping[str, int]

# What is run in a folder with these files; OUT is the output.
COMMANDS = {
    "inspect, many tensors": "inspect many.pt",
    "strip-prefix, large tensors": "strip-prefix large.pt OUT.safetensors",
    "strip-prefix, many tensors": "strip-prefix many.pt OUT.safetensors",
    "strip-prefix, .pt to .pt": "strip-prefix many.pt OUT.pt",
    "convert --dtype bf16": "convert large.pt OUT.safetensors --dtype bf16",
    "diff": "diff large.pt other.pt",
    "verify": "verify many.pt",
    "delta": "delta large.pt other.pt OUT.safetensors",
    "split to two ranks": "split large.pt OUT/ --ranks 2 --as dtensor --device cpu",
}

# By how much a count may be larger than the recorded one: a factor, and a number on top. Other versions of
# Python have other objects, and threads that meet read in other pieces.
SLACK = {"calls": (1.05, 10), "bytes": (1.02, 20_000), "memory": (1.25, 200_000)}


def write_files(folder: Path) -> None:
    """Write a checkpoint of 1,000 small tensors, and two of 12 MB that differ. Imports torch."""
    import torch

    many = {f"module.layers.{number}.weight": torch.full((4, 4), float(number)) for number in range(1000)}
    large = {f"module.{name}": torch.arange(1_500_000.0).reshape(3, -1) for name in "ab"}
    other = {name: tensor.clone() for name, tensor in large.items()}
    other["module.a"][:, ::100] += 1
    for name, state in (("many", many), ("large", large), ("other", other)):
        torch.save({"model": state, "epoch": 3}, folder / f"{name}.pt")


def count(folder: Path, command: str) -> Counts:
    """Return what a command takes: calls that read or write, bytes that they move, and Python's peak."""
    words = [str(folder / word) if "." in word or "/" in word else word for word in command.split()]
    force = ["--force"] if "OUT" in command else []
    child = [PYTHON, CHILDREN / "count_work.py", *words, *force]
    done = subprocess.run(child, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"benchmarks: {command} failed: {done.stderr.strip()[-300:]}")
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def steps_back(now: Mapping[str, Counts], before: Mapping[str, Counts]) -> Iterator[str]:
    """Yield what has become more than it was, beyond its slack, and what only one of the two counts."""
    for row in now.keys() ^ before.keys():
        yield f"{row}: {'was not counted before' if row in now else 'is not counted any more'}"
    for row in now.keys() & before.keys():
        for kind, (factor, more) in SLACK.items():
            was, found = before[row][kind], now[row][kind]
            if found > was * factor + more:
                yield f"{row}: {kind} {was:,} -> {found:,} ({found / max(was, 1):.2f} ×)"


def table(now: Mapping[str, Counts], before: Mapping[str, Counts]) -> str:
    """Return the counts as text, each beside the recorded one."""
    lines = [f"{'':32}" + "".join(f"{kind:>14}{'before':>14}" for kind in SLACK)]
    for row, counts in now.items():
        was = before.get(row, {})
        columns = (f"{counts[kind]:>14,}{f'{was[kind]:,}' if was else '-':>14}" for kind in SLACK)
        lines.append(f"{row:32}" + "".join(columns))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counted", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ckpttool-counted-") as folder:
        write_files(Path(folder))
        now = {row: count(Path(folder), command) for row, command in COMMANDS.items()}
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    print(table(now, before))
    if options.record:
        RECORD.write_text(f"{json.dumps(now, indent=1)}\n")
        return 0
    worse = sorted(steps_back(now, before))
    for text in worse:
        print(f"a step back: {text}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
