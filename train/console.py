"""What a program prints: results on stdout, warnings and errors on stderr."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from typing import Any, TextIO

from ckpttool.core.files.commit import reason
from ckpttool.errors import CheckFailed


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


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; None is one that was closed before the program began."""
    return stream is not None and stream.isatty()


def folded(line: str, stream: TextIO | None, *, indent: int = 0) -> str:
    """Return a line broken between words for the terminal that `stream` is; as it is if that is none."""
    if not is_terminal(stream):
        return line
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * indent, **whole))


def note(text: str) -> None:
    """Print lines on stderr at once, if stderr can be written: no program ends because it can't.

    For a terminal they are broken between words, except those that begin with a blank, to be pasted.
    """
    if sys.stderr is None:  # closed before the program began; print would take stdout for it
        return
    with contextlib.suppress(OSError):
        lines = (line if line.startswith(" ") else folded(line, sys.stderr) for line in text.split("\n"))
        print("\n".join(lines), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Say on stderr what the user should know although the program goes on."""
    note(f"warning: {text}")
