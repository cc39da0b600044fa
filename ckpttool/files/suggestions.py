"""The error for a path that does not exist, with a hint at the path the user may have meant."""

from __future__ import annotations

import os
import shlex
from itertools import islice

from ..errors import Unreadable

MOST_NAMES = 10_000
"""Names of a folder that are compared with a missing one at most."""


OF_MACOS = "._"
"""How the names of files begin in which macOS keeps what other file systems can't hold: they are nobody's."""

CHECKPOINT_ENDINGS = (".pt", ".pth", ".th", ".tar", ".bin", ".ckpt", ".safetensors", ".index.json")
"""Usual endings of checkpoints' names. Only for hints: a format is recognised by content."""


def no_such_file(path: str) -> Unreadable:
    """Return the error for a missing path, with a similar path or the checkpoints of the folder as hint."""
    if os.path.islink(path):
        hint = f"see what it points to: ls -l {shlex.quote(path)}"
        return Unreadable(path, f"is a link to {os.readlink(path)}, where there is no file", hint=hint)
    return Unreadable(path, "no such file", hint=_near(*os.path.split(path)))


def _near(folder: str, name: str) -> str:
    from difflib import get_close_matches

    if not os.path.isdir(folder or "."):
        return f"there is no folder {_first_missing(folder)}"
    names = [found for found in names_in(folder or ".") if found != name]
    if close := get_close_matches(name, names, n=2, cutoff=0.7):
        return f"did you mean {' or '.join(os.path.join(folder, found) for found in close)}?"
    here = f"the folder {folder}" if folder else "this folder"
    if found := checkpoints_among(names):
        return f"{here} has {', '.join(found[:4])}" + (f" and {len(found) - 4} more" if found[4:] else "")
    return f"see what is there: ls {shlex.quote(folder or '.')}"


def _first_missing(folder: str) -> str:
    while (above := os.path.dirname(folder)) and not os.path.isdir(above):
        folder = above
    return folder


def names_in(folder: str) -> list[str]:
    """Return the names in a folder, sorted, MOST_NAMES at most; none where it can't be read."""
    try:
        with os.scandir(folder) as found:
            names = (entry.name for entry in found if not entry.name.startswith(OF_MACOS))
            return sorted(islice(names, MOST_NAMES))
    except OSError:
        return []


def checkpoints_among(names: list[str]) -> list[str]:
    """Return the names with a usual ending of a checkpoint."""
    return [name for name in names if name.lower().endswith(CHECKPOINT_ENDINGS)]
