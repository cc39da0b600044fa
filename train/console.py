"""What a program prints: results on stdout, warnings and errors on stderr."""

from __future__ import annotations

import contextlib
import sys

from ckpttool.errors import CheckFailed
from ckpttool.files.failures import reason


def say(text: str) -> None:
    """Print a line on stdout at once; raise CheckFailed if the disk is full or the reader has gone."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise CheckFailed(f"standard output: {reason(error)}") from error


def note(text: str) -> None:
    """Print a line on stderr at once, if stderr can be written: no program ends because it can't."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Say on stderr what the user should know although the program goes on."""
    note(f"warning: {text}")
