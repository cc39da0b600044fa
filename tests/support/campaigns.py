"""What the programs that try very many faults share: their options, and the page with their tables."""

from __future__ import annotations

import argparse
import os

from tests.support.running import ROOT

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
