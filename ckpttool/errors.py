"""Everything that can go wrong, as one family: what, in which file, and what to do next.

A training script can catch `CkptToolError` and show `str(error)` and `error.hint`. The command line maps
each class to an exit code by `exit_code`; nothing here knows about it otherwise.
"""

from __future__ import annotations

import os
import shlex
from itertools import islice

MOST_NAMES = 10_000
"""Names of a folder that are looked at for one like a name that is not there."""

CHECKPOINT_ENDINGS = (".pt", ".pth", ".th", ".tar", ".bin", ".ckpt", ".safetensors", ".index.json")
"""How the names of checkpoints mostly end. Only for hints: formats are known by content."""


class CkptToolError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        hint: the next thing to do, as a sentence or a command; None when there is none.
        kind: a stable word for scripts, e.g. `damaged`.
        exit_code: 1 a check failed or there was nothing to do, 2 usage, 3 unreadable or refused input.
    """

    kind = "error"
    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def message(self) -> str:
        return str(self)


class FileError(CkptToolError):
    """A fault of one file: the message begins with its path."""

    def __init__(self, path: str | os.PathLike[str], reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}", hint=hint)
        self.path = os.fspath(path)
        self.reason = reason


class Unreadable(FileError):
    """The file is missing, a folder, or may not be read."""

    kind = "unreadable"


class Damaged(FileError):
    """The file claims a format and breaks its rules: truncated, inconsistent, or made to mislead."""

    kind = "damaged"


class Unsupported(FileError):
    """The file is whole but not something that can be read or written here."""

    kind = "unsupported"


class Refused(FileError):
    """What was asked would lose or overwrite something; names the key and the way out."""

    kind = "refused"


class NoState(FileError):
    """No model state was found where one was looked for."""

    kind = "no-state"


class Collision(CkptToolError):
    """Two keys would get the same name."""

    kind = "collision"


class NothingToDo(CkptToolError):
    """The command found nothing that it should change."""

    kind = "nothing-to-do"
    exit_code = 1


class CheckFailed(CkptToolError):
    """What was loaded does not do what it should."""

    kind = "check-failed"
    exit_code = 1


class Mismatch(CkptToolError):
    """A state does not fit a model. `missing`, `unexpected`: names; `mismatched`: (name, file, model)."""

    kind = "mismatch"
    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: tuple[tuple[str, str, str], ...] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing
        self.unexpected = unexpected
        self.mismatched = mismatched


class UsageFault(CkptToolError):
    """The call can't be carried out as it was given, whatever the files hold."""

    kind = "usage"
    exit_code = 2


class OutputExists(UsageFault):
    """The output already exists and may not be overwritten."""

    kind = "output-exists"


class RanksDiffer(CkptToolError):
    """Ranks hold different values where they must be equal; the message names the tensor and the rank."""

    kind = "ranks-differ"
    exit_code = 1


def no_such_file(path: str) -> Unreadable:
    """The error of a path where nothing is. Its hint names what was perhaps meant, or says what to check."""
    return Unreadable(path, "no such file", hint=_near(*os.path.split(path)))


def _near(folder: str, name: str) -> str:
    from difflib import get_close_matches

    if not os.path.isdir(folder or "."):
        return f"there is no folder {_first_missing(folder)}"
    names = names_in(folder or ".")
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
    """What a folder holds, sorted: the first few thousand names; none where it can't be read."""
    try:
        with os.scandir(folder) as found:
            return sorted(entry.name for entry in islice(found, MOST_NAMES))
    except OSError:
        return []


def checkpoints_among(names: list[str]) -> list[str]:
    """Names that end as those of checkpoints mostly do."""
    return [name for name in names if name.lower().endswith(CHECKPOINT_ENDINGS)]
