"""The tables of the fuzzer: what was tried and read per format, and what a hostile file can cost."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping

from tests.fuzz.campaign import SIZES, Tally
from tests.support.generated_page import regenerate
from tests.support.running import ROOT

PAGE = ROOT / "docs" / "security.md"
FUZZ = "<!-- fuzz -->\n", "<!-- /fuzz -->"
BOUNDS = "<!-- bounds -->\n", "<!-- /bounds -->"


def tried_table(tallies: Mapping[str, Tally], seed: int, seconds: float) -> str:
    """Return the table of what was tried, in Markdown, with the date and the totals below it."""
    libraries = ("torch", "safetensors", "zipfile")
    also = " | ".join(f"also by {name}" for name in libraries)
    lines = [
        f"| format | tried | refused | read | {also} | wrong |",
        f"|---|{'---:|' * (len(libraries) + 4)}",
    ]
    for kind, tally in tallies.items():
        count = tally.counts
        refused = count["tried"] - count["read"]
        cells = [count["tried"], refused, count["read"], *(count[name] for name in libraries)]
        counts = " | ".join(f"{cell:,}" for cell in cells)
        lines.append(f"| {kind} | {counts} | {len(tally.found) or 'none'} |")
    total = sum(tally.counts["tried"] for tally in tallies.values())
    wrong = sum(len(tally.found) for tally in tallies.values())
    lines += ["", f"{total:,} files, {wrong or 'no'} disagreements or failures. {_when(seed, seconds)}", ""]
    return "\n".join(lines)


def bounds_table(tallies: Mapping[str, Tally], seed: int, seconds: float) -> str:
    """Return the table of the most memory and time that files of each size took, in Markdown."""
    heads = " | ".join(f"up to {_size(size)}" for size in SIZES)
    lines = [f"| format | {heads} |", f"|---|{'---:|' * len(SIZES)}"]
    for kind, tally in tallies.items():
        cells = [
            f"{memory / 1e6:.0f} MB, {time:.2f} s"
            for memory, time in zip(tally.memory, tally.seconds, strict=True)
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _when(seed, seconds), ""])


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _when(seed: int, seconds: float) -> str:
    import safetensors
    import torch

    libraries = f"torch {torch.__version__.split('+')[0]}, safetensors {safetensors.__version__}"
    took = f"{datetime.date.today()}, seed {seed}, {seconds:.0f} s"
    return f"{took}, Python {platform.python_version()}, {libraries}."


def put_into_docs(tried: str, bounds: str) -> None:
    """Write both tables into docs/security.md, between their marks."""
    for (begin, end), made in ((FUZZ, tried), (BOUNDS, bounds)):
        regenerate(PAGE, begin, end, made)
