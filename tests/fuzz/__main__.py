"""`python -m tests.fuzz SECONDS`: change files of every format, and compare what other libraries read.

It prints what was tried and what a hostile file can cost; --write puts the table into docs/security.md.
What it finds wrong is made small and stays in tests/corpus/, which the tests examine; then it exits 1.
"""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Mapping

import safetensors
import torch

from tests.fuzz.campaign import Tally, fuzz_in_processes, keep
from tests.fuzz.seeds import SEEDS
from tests.support.generated_page import PAGE, options, regenerate

BEGIN, END = "<!-- fuzz -->\n", "<!-- /fuzz -->"


def table(tallies: Mapping[str, Tally], seed: int, seconds: float) -> str:
    """Return the table in Markdown, with the date and the totals below it."""
    lines = [
        "| format | tried | refused | read | wrong | most memory, CPU time |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind, tally in tallies.items():
        tried, read = tally.counts["tried"], tally.counts["read"]
        cost = f"{max(tally.memory) / 1e6:.0f} MB, {max(tally.seconds):.2f} s"
        lines.append(
            f"| {kind} | {tried:,} | {tried - read:,} | {read:,} | {len(tally.found) or 'none'} | {cost} |"
        )
    total = sum(tally.counts["tried"] for tally in tallies.values())
    wrong = sum(len(tally.found) for tally in tallies.values())
    also = ", ".join(
        f"{sum(tally.counts[name] for tally in tallies.values()):,} by {name}"
        for name in ("torch", "safetensors", "zipfile", "numpy", "onnx", "gguf")
    )
    lines += [
        "",
        f"{total:,} files, {wrong or 'no'} disagreements or failures. Of those read, also read: {also}. "
        f"{datetime.date.today()}, seed {seed}, {seconds:.0f} s, Python {platform.python_version()}, "
        f"torch {torch.__version__.split('+')[0]}, safetensors {safetensors.__version__}.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    given = options("tests.fuzz", __doc__, "formats").parse_args()
    torch.set_num_threads(1)  # a fork has no threads but its own
    started = time.monotonic()
    kinds = [kind for kind in SEEDS if given.only in kind]
    tallies = fuzz_in_processes(kinds, seed=given.seed, seconds=given.seconds, jobs=max(1, given.jobs))
    took = time.monotonic() - started
    made = table(tallies, given.seed, took)
    print(made)
    found = [each for tally in tallies.values() for each in tally.found.values()]
    for each in found:
        said = f"{each.kind}, number {each.number}: {each.wrong}\n{each.details}\n-> {keep(each)}"
        print(said, file=sys.stderr)
    if given.write:
        regenerate(PAGE, BEGIN, END, made)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
