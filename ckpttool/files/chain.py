"""A file of JSON objects, one a line, each with the SHA-256 of the line before: what was written, stays.

Whoever changes, removes or inserts a line breaks the chain there, unless all later lines are made anew. The
hash of the last line stands for the whole file; kept elsewhere, it rules that out too.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Damaged, Unreadable
from . import lines

NAME = "run.jsonl"
"""The chain in the folder of a training run."""

FIRST = "0" * 64
"""What the first line has in place of the hash of a line before it."""


@dataclass(frozen=True)
class Link:
    """One line of a chain.

    Attributes:
        number: of the line in the file, from 1.
        entry: its object.
        hash: of its bytes.
    """

    number: int
    entry: Mapping[str, Any]
    hash: str


@dataclass(frozen=True)
class Break:
    """A place where the chain does not hold.

    Attributes:
        number: of the line, from 1.
        message: what is wrong there.
    """

    number: int
    message: str


def append(path: str, before: Link | None, entry: Mapping[str, Any], *, durably: bool = False) -> Link:
    """Write a line behind the last one of a file.

    Args:
        before: the last line; None if the file has none.
        entry: values of JSON; NaN is none.
        durably: return only when it is on the disk.

    Raises:
        OSError: the file can't be written. What was written of the line is taken back.
        ValueError: a value is NaN or infinite.
    """
    number = before.number + 1 if before else 1
    whole = {"n": number, "prev": before.hash if before else FIRST, **entry}
    line = json.dumps(whole, allow_nan=False).encode()
    lines.append(path, line, durably=durably)
    return Link(number, whole, hashlib.sha256(line).hexdigest())


def read(path: str) -> tuple[list[Link], list[Break]]:
    """Return the lines of a chain, and where it does not hold. A last line that was cut off is left out.

    Raises:
        Unreadable: there is no such file, or it is no regular one, or can't be read.
        Damaged: no line of it is a JSON object.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a named pipe would wait, and a device never end
            raise Unreadable(path, "is not a regular file")
        with open(path, "rb") as file:
            found = file.read().split(b"\n")
    except FileNotFoundError as error:
        hint = "a run has a record if it is trained with --prove-every K"
        raise Unreadable(path, "no such file: there is no record of a run", hint=hint) from error
    except OSError as error:
        raise Unreadable(path, (error.strerror or str(error)).lower()) from error
    links, breaks, expected, shift = list[Link](), list[Break](), FIRST, 0
    for number, line in enumerate(found[:-1], start=1):  # behind the last line break nothing was finished
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get("n"), int):
            breaks.append(Break(number, "is no entry of a chain"))
            expected = hashlib.sha256(line).hexdigest()
            continue
        if entry.get("prev") != expected or entry["n"] != number + shift:
            breaks.append(_break(number, entry["n"] - number - shift))
            shift = entry["n"] - number
        expected = hashlib.sha256(line).hexdigest()
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
    """Remove what a crash has left behind the last line break.

    Raises:
        OSError: the file can't be written.
    """
    with open(path, "rb+") as file:
        whole = file.read()
        if not whole.endswith(b"\n"):
            file.truncate(whole.rfind(b"\n") + 1)
