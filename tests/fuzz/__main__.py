"""`python -m tests.fuzz SECONDS`: change files of every format, and compare what other libraries read.

A fifth of the time goes to files with code in them (`loadable`), which Python's loaders open: where the code
runs, scan must not say safe.

It prints what was tried and what a hostile file can cost; --write puts the table into docs/security.md.
What it finds wrong is made small and stays in tests/corpus/, which the tests examine; then it exits 1.
"""

from __future__ import annotations

import datetime
import hashlib
import platform
import sys
import time
from collections.abc import Mapping

import safetensors
import torch

from tests.fuzz.campaign import CORPUS, Tally, fuzz_in_processes, keep
from tests.fuzz.loadable import fuzz_loadable_in_processes
from tests.fuzz.seeds import SEEDS
from tests.support.generated_page import PAGE, options, regenerate

BEGIN, END = "<!-- fuzz -->\n", "<!-- /fuzz -->"
LOADERS, LOADERS_SHARE = "loaders", 0.2


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
    jobs, share = max(1, given.jobs), (LOADERS_SHARE if kinds else 1.0) * (given.only in LOADERS)
    seconds = given.seconds * (1 - share)
    tallies = fuzz_in_processes(kinds, seed=given.seed, seconds=seconds, jobs=jobs)
    took = time.monotonic() - started
    opened = fuzz_loadable_in_processes(given.seed, given.seconds - seconds, jobs)
    made = f"{table(tallies, given.seed, took)}\n{opened}\n"
    print(made)
    for wrong, (number, file) in opened.found.items():
        path = CORPUS / f"{LOADERS}-{hashlib.sha256(file.data).hexdigest()[:8]}.bin"
        if not file.is_honest:
            path.write_bytes(file.data)
        print(f"{LOADERS}, number {number}: {wrong}\n-> {path.name}", file=sys.stderr)
    found = [each for tally in tallies.values() for each in tally.found.values()]
    for each in found:
        said = f"{each.kind}, number {each.number}: {each.wrong}\n{each.details}\n-> {keep(each)}"
        print(said, file=sys.stderr)
    if given.write:
        regenerate(PAGE, BEGIN, END, made)
    return 1 if found or opened.found else 0


if __name__ == "__main__":
    sys.exit(main())
