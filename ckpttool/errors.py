"""Everything that can go wrong, as one family: what, in which file, and what to do next.

A training script can catch `CkptToolError` and show `str(error)` and `error.hint`. The command line maps
each class to an exit code by `exit_code`; nothing here knows about it otherwise.
"""

from __future__ import annotations

import os
from typing import Any


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and the attributes, whatever a class's `__init__` takes."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[CkptToolError], args: tuple[Any, ...], attributes: dict[str, Any]) -> CkptToolError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(attributes)
    return error


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
