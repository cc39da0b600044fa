"""A benchmark that is a program of its own: its flags, and where its tables go."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from .markdown import check_marks, put_between_marks


def parser_of(name: str, about: str | None, **usual: int) -> argparse.ArgumentParser:
    """Return a parser with a flag for each number, and `--markdown`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for flag, number in usual.items():
        parser.add_argument(f"--{flag}", type=int, default=number, metavar="N", help="(%(default)s)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the flags; refuse a page for the tables that has no marks, before anything is measured."""
    options = parser.parse_args()
    if options.markdown:
        try:
            check_marks(options.markdown)
        except ValueError as error:
            parser.error(f"--markdown {error}")
    return options


def run(*command: object, **environment: str) -> None:
    """Run a command without its output; raises CalledProcessError."""
    words, given = [str(word) for word in command], {**os.environ, **environment}
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=given)


def show(markdown: str, options: argparse.Namespace) -> None:
    """Print tables, and put them into the page that `--markdown` names."""
    print(markdown)
    if options.markdown:
        put_between_marks(options.markdown, markdown)
