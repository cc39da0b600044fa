"""A page of docs/ of which a part is generated; and what the programs that write docs/security.md share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tests.support.running import ROOT

# ---- A page of docs/ of which a part, between two marks, is generated ---------------------------------


def generated(page: Path, begin: str, end: str) -> str:
    """Return the part between the marks, which must be there."""
    return _split(page, begin, end)[1]


def regenerate(page: Path, begin: str, end: str, made: str) -> None:
    """Write the part between the marks, and nothing else."""
    before, _, after = _split(page, begin, end)
    page.write_text(f"{before}{begin}{made}{end}{after}", encoding="utf-8")


def _split(page: Path, begin: str, end: str) -> tuple[str, str, str]:
    before, found_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    made, found_end, after = rest.partition(end)
    assert found_begin and found_end, f"{page} has no lines {begin}{end}"
    return before, made, after


# ---- What the programs that try very many faults share: their options, and the page with their tables -


PAGE = ROOT / "docs" / "security.md"


def options(prog: str, doc: str | None, tried: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all of them have; `tried` are chosen by --only."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=doc)
    parser.add_argument("seconds", nargs="?", type=float, default=600.0, help="how long; default 600")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn; default 0")
    parser.add_argument("--only", default="", metavar="TEXT", help=f"{tried} that have this in their name")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    return parser
