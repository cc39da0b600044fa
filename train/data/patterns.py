"""Files that a pattern names: braces as in a shell and as webdataset writes its shards, then globs."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator

from ckpttool.errors import Unreadable, UsageFault

INNERMOST = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST = 1_000_000  # names of one pattern


def files_of(pattern: str, what: str) -> list[str]:
    """Return the files of `train-{000..099}.tar`, `{a,b}/*.bin` or a plain name: sorted, each once.

    Raises:
        UsageFault: no file matches, or more than a million names; `what` is the flag, as `--data`.
        Unreadable: one that is named without a glob does not exist.
    """
    found: dict[str, None] = {}
    for number, name in enumerate(_braces(pattern)):
        if number == MOST:
            raise UsageFault(f"{what} {pattern}: its braces name more than {MOST:,} files")
        if glob.has_magic(name):
            found |= dict.fromkeys(sorted(glob.glob(os.path.expanduser(name), recursive=True)))
        elif os.path.isfile(path := os.path.expanduser(name)):
            found[path] = None
        else:
            reason = "is not a regular file" if os.path.exists(path) else "no such file"
            raise Unreadable(path, f"{reason}: {what} {pattern}")
    if not found:
        raise UsageFault(
            f"{what} {pattern}: no file matches", hint="quote the pattern: the shell expands it too"
        )
    return list(found)


def _braces(pattern: str) -> Iterator[str]:
    braces = INNERMOST.search(pattern)
    if braces is None:
        yield pattern
        return
    span = RANGE.fullmatch(braces[1])
    if span:
        first, last = int(span[1]), int(span[2])
        width = max(map(len, span.groups())) if span[1].startswith("0") or span[2].startswith("0") else 0
        numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
        parts: Iterator[str] = (f"{number:0{width}}" for number in numbers)
    else:
        parts = iter(braces[1].split(","))
    for part in parts:
        yield from _braces(pattern[: braces.start()] + part + pattern[braces.end() :])
