"""What a program prints: results on stdout, warnings and errors on stderr."""

from __future__ import annotations

import contextlib
import sys

from ckpttool.errors import CheckFailed
from ckpttool.files.failures import reason


class ReaderGone(CheckFailed):
    """The reader of stdout has stopped, as `| head` does."""

    kind = "reader-gone"
    exit_code = 141


def say(text: str) -> None:
    """Print a line on stdout at once; raise CheckFailed if the disk is full or the reader has gone."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise CheckFailed(f"standard output: {reason(error)}") from error


def show(text: str) -> None:
    """Print what the program is called for, and nothing else comes of it; ReaderGone if nobody reads it."""
    try:
        say(text)
    except CheckFailed as failed:
        if isinstance(failed.__cause__, BrokenPipeError):
            raise ReaderGone(str(failed)) from failed
        raise


def note(text: str) -> None:
    """Print a line on stderr at once, if stderr can be written: no program ends because it can't."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Say on stderr what the user should know although the program goes on."""
    note(f"warning: {text}")
