"""A file of JSON objects, one per line, each with the SHA-256 of the line before it.

Whoever changes, removes or inserts a line breaks the chain there, unless all later lines are rewritten. The
hash of the last line stands for the whole file; kept elsewhere, it rules that out too.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import Damaged, Unreadable
from .commit import append_line
from .failures import reason

NAME = "run.jsonl"  # in the folder of a training run
FIRST = "0" * 64  # in the first line, in place of the hash of a line before it


@dataclass(frozen=True)
class Link:
    """One line of a chain."""

    number: int  # of the line, from 1
    entry: Mapping[str, Any]
    hash: str  # of the line's bytes


@dataclass(frozen=True)
class Break:
    """A place where the chain does not hold."""

    number: int
    message: str


def append(path: str, before: Link | None, entry: Mapping[str, Any], *, durably: bool = False) -> Link:
    """Append a line after `before`; raise ValueError for a NaN. After an OSError nothing of it is there."""
    number = before.number + 1 if before else 1
    entry = {"n": number, "prev": before.hash if before else FIRST, **entry}
    line = json.dumps(entry, allow_nan=False).encode()
    append_line(path, line, durably=durably)
    return Link(number, entry, hashlib.sha256(line).hexdigest())


def read(path: str) -> tuple[list[Link], list[Break]]:
    """Return the lines of a chain, and where it is broken. A last line that was cut off is left out."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a named pipe would wait, and a device never end
            raise Unreadable(path, "is not a regular file")
        with open(path, "rb") as file:
            raw_lines = file.read().split(b"\n")
    except FileNotFoundError as error:
        hint = "a run has a record if it is trained with --prove-every K"
        raise Unreadable(path, "no such file: there is no record of a run", hint=hint) from error
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    links, breaks, expected, shift = list[Link](), list[Break](), FIRST, 0
    for number, line in enumerate(raw_lines[:-1], start=1):  # nothing after the last line break is finished
        entry, before, expected = None, expected, hashlib.sha256(line).hexdigest()
        with suppress(ValueError, RecursionError):
            entry = json.loads(line)
        if not isinstance(entry, dict) or not isinstance(entry.get("n"), int):
            breaks.append(Break(number, "is no entry of a chain"))
            continue
        if entry.get("prev") != before or entry["n"] != number + shift:
            breaks.append(_break(number, entry["n"] - number - shift))
            shift = entry["n"] - number
        links.append(Link(number, entry, expected))
    if not links:
        raise Damaged(path, "holds no entries of a chain")
    return links, breaks


def _break(number: int, jump: int) -> Break:
    if jump > 0:
        return Break(number, f"{jump} line{'s' * (jump > 1)} before it {'are' if jump > 1 else 'is'} missing")
    if jump < 0:
        return Break(number, "was inserted or moved: its number is not that of its place")
    return Break(max(1, number - 1), "was changed: the next line holds another hash of it")


def cut_off(path: str) -> None:
    """Remove what a crash left after the last line break."""
    with open(path, "rb+") as file:
        text = file.read()
        if not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)
