"""The command line of `python -m benchmarks`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from .markdown import check_marks
from .sizes import parse_size

SIZES = [2_000_000_000, 4_000_000_000]
ROOT = Path(__file__).parents[1]
TABLES = Path("docs", "benchmarks.md")


def parse(arguments: Sequence[str] | None, names: Iterable[str]) -> argparse.Namespace:
    """`size`, `rounds`, `only`, `folder`, `ready_memory`, `markdown`; a usage error exits with 2."""
    parser = _parser(list(names))
    options = parser.parse_args(arguments)
    if options.folder and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: no such folder")
    if options.markdown:
        try:
            check_marks(options.markdown / TABLES)
        except ValueError as error:
            parser.error(f"--markdown {error}")
    # Not as argparse's defaults, because it would append to those.
    options.size = options.size or SIZES
    options.only = options.only or list(names)
    return options


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compares ckpttool with what a user would use instead. Options marked + may be repeated.",
    )
    add = parser.add_argument
    add("--size", type=_size, action="append", metavar="SIZE", help="size of the input + (2GB and 4GB)")
    add("--rounds", type=_count, default=5, metavar="N", help="rounds after a warm-up (%(default)s)")
    add("--only", choices=names, action="append", metavar="NAME", help=f"one of {', '.join(names)} + (all)")
    add("--folder", type=Path, metavar="DIR", help="for the files (the largest tmpfs, if it is large enough)")
    add(
        "--ready-memory",
        action="store_true",
        help="touch memory before each run, so that no run waits for memory a virtual machine returned",
    )
    add("--record", action="store_true", help="add the figures of the targets to benchmarks/history.jsonl")
    add(
        "--markdown",
        type=Path,
        nargs="?",
        const=ROOT,
        metavar="DIR",
        help=f"also write the tables to {TABLES} (in this repository)",
    )
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds")
    return int(text)
