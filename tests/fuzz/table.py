"""The table of the fuzzer: what was tried and read per format, and what a hostile file can cost."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping

from tests.fuzz.campaign import Tally
from tests.support.generated_page import regenerate
from tests.support.running import ROOT

PAGE = ROOT / "docs" / "security.md"
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
        for name in ("torch", "safetensors", "zipfile")
    )
    lines += [
        "",
        f"{total:,} files, {wrong or 'no'} disagreements or failures. Of those read, also read: {also}. "
        f"{_when(seed, seconds)}",
        "",
    ]
    return "\n".join(lines)


def _when(seed: int, seconds: float) -> str:
    import safetensors
    import torch

    libraries = f"torch {torch.__version__.split('+')[0]}, safetensors {safetensors.__version__}"
    took = f"{datetime.date.today()}, seed {seed}, {seconds:.0f} s"
    return f"{took}, Python {platform.python_version()}, {libraries}."


def put_into_docs(made: str) -> None:
    """Write the table into docs/security.md, between its marks."""
    regenerate(PAGE, BEGIN, END, made)
