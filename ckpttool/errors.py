"""The errors that the package raises on purpose: what is wrong, in which file, and what to do next.

A training script can catch `CkptToolError` and print it: the message, and the hint below it. The command line
maps each class to an exit code by `exit_code`.
"""

from __future__ import annotations

import copyreg
import os
import re
from typing import Any

LONGEST = 600  # characters of a reason; of a longer one the beginning and the end are kept


class CkptToolError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        message: what is wrong, without the hint.
        reason: the message, without the path of the file that it begins with.
        hint: the next thing to do, as a sentence or a command; None when there is none.
        kind: a stable word for scripts, e.g. `damaged`.
        exit_code: 1 a check failed or there was nothing to do, 2 usage, 3 unreadable or refused input.

    Example:
        >>> try:
        ...     ckpttool.open("nowhere.pt")
        ... except ckpttool.CkptToolError as error:
        ...     print(error.kind, error.message)
        unreadable nowhere.pt: no such file
    """

    kind = "error"
    exit_code = 3

    def __init_subclass__(cls, *, kind: str | None = None, exit_code: int | None = None) -> None:
        cls.kind, cls.exit_code = kind or cls.kind, exit_code or cls.exit_code

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = masked(message)
        super().__init__(message)
        self.reason, self.hint = message, hint and masked(hint)

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and the attributes, whatever a class's `__init__` takes."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class FileError(CkptToolError):
    """A fault of one file.

    Attributes:
        path: the file as it was named; the message begins with it.
        reason: the message without the path, at most `LONGEST` characters.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, *, hint: str | None = None) -> None:
        path, reason = masked(os.fspath(path), whole=True), masked(reason)
        if len(reason) > LONGEST:  # names in the file may be of any length
            reason = f"{reason[: LONGEST - 100]} … {reason[-97:]}"
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path, self.reason = path, reason


class Unreadable(FileError, kind="unreadable"):
    """The file is missing, is a folder, or may not be read."""


class SeveralCheckpoints(Unreadable, kind="several-checkpoints"):
    """The folder holds checkpoints, and is none itself."""


class Damaged(FileError, kind="damaged"):
    """The file claims a format and breaks its rules: truncated, inconsistent, or made to mislead."""


class Unsupported(FileError, kind="unsupported"):
    """The file is whole, but this package can't read or write it."""


class Refused(FileError, kind="refused"):
    """The request would lose or overwrite something; the message names the key, the hint the way out."""


class NoState(FileError, kind="no-state"):
    """The file has no model state, or none where the caller looked for it."""


class NoTensor(CkptToolError, KeyError, kind="no-tensor"):
    """A state has no tensor of this name; the hint has the names that are like it."""


class Collision(CkptToolError, kind="collision"):
    """Two keys would get the same name."""


class NothingToDo(CkptToolError, kind="nothing-to-do", exit_code=1):
    """The command found nothing to change."""


class PartMissing(FileError, kind="part-missing", exit_code=1):
    """An output that is written in parts lacks one."""


class CheckFailed(CkptToolError, kind="check-failed", exit_code=1):
    """The state loads, but the model does not run with it."""


class Ambiguous(CkptToolError, kind="ambiguous", exit_code=1):
    """There are several ways to do what was asked, and nothing tells which is right.

    Attributes:
        candidates: what is open, each with the ways that there are.
    """

    def __init__(self, message: str, *, candidates: tuple[str, ...] = (), hint: str | None = None) -> None:
        # Names in a file may be of any length.
        super().__init__(message if len(message) <= 3 * LONGEST else f"{message[: 3 * LONGEST]} …", hint=hint)
        self.candidates = candidates


class Mismatch(CkptToolError, kind="mismatch", exit_code=1):
    """A state does not fit a model.

    Attributes:
        missing: names of the model that the file lacks.
        unexpected: names of the file that the model does not have.
        mismatched: (name, shape or type in the file, shape or type in the model).
    """

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
        self.missing, self.unexpected, self.mismatched = missing, unexpected, mismatched


class UsageFault(CkptToolError, kind="usage", exit_code=2):
    """The arguments of a call are wrong, whatever the files hold."""


class OutputExists(UsageFault, kind="output-exists"):
    """The output exists, and nothing allows overwriting it."""


def already_exists(path: str, more: str = "") -> OutputExists:
    """Return the error for an output that only `force` may replace."""
    return OutputExists(f"{path}: already exists{more}", hint=FORCE)


FORCE = "write it anyway: force=True"


def in_shell(hint: str | None) -> str | None:
    """Return a hint of the library as the command line says it."""
    return "write it anyway with --force" if hint == FORCE else hint


def install(extra: str = "") -> str:
    """Return how to install what an extra brings, or all of it again; no registry has ckpttool itself yet."""
    if not extra:
        return "install ckpttool again, from where it came"
    if libraries := _brought_by(extra):
        return f"pip install {' '.join(libraries)}"
    return f"in a clone of ckpttool: pip install -e '.[{extra}]'"  # one that is run without being installed


def _brought_by(extra: str) -> list[str]:
    """Return the libraries of an extra as this installation states them; none where it states nothing."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        stated = [each.partition(";") for each in requires("ckpttool") or ()]
    except PackageNotFoundError:  # in a clone or a zipapp
        return []
    found: list[str] = []
    for library, _, marker in stated:
        if re.search(rf"extra == ['\"]{extra}['\"]", marker):
            inner = re.fullmatch(r"ckpttool\[(.+)\]", library.strip())
            if inner is None:
                found.append(f"'{library.strip()}'")
            for other in inner[1].split(",") if inner else ():
                found += _brought_by(other)
    return found


class Irreversible(UsageFault, kind="irreversible"):
    """Rules that change an architecture have no way back; the message names the rule."""


class NeedsTorch(UsageFault, ImportError, kind="needs-torch"):
    """Something was asked for that needs torch, which is not installed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} needs torch, which is not installed", hint=install("torch"))


class MissingRoom(CkptToolError, kind="missing-room"):
    """Something was asked for whose folder was taken out of the package."""

    def __init__(self, room: str) -> None:
        what = f"this needs ckpttool's '{room}', which was taken out of this installation"
        super().__init__(what, hint=install())


class RanksDiffer(CkptToolError, kind="ranks-differ", exit_code=1):
    """Ranks hold different values where they must be equal; the message names the tensor and the rank.

    Attributes:
        path: the folder, where the values are those that ranks saved; the message begins with it.
        reason: the message without the path.
        ranks: two ranks that saved other values; empty where they were not saved.
    """

    def __init__(
        self, reason: str, *, path: str | None = None, ranks: tuple[int, ...] = (), hint: str | None = None
    ) -> None:
        super().__init__(reason if path is None else f"{path}: {reason}", hint=hint)
        self.path, self.reason, self.ranks = path, reason, ranks


# ---- What no message may hold

WEB = ("https", "http")
AT = re.compile("@|%40")
KNOWN = "https?|ftp|hf|s3|gs|az"  # with fewer slashes too, as a Path writes them
FORM = rf"((?:{KNOWN})(?=:)|[a-z][a-z0-9-]{{1,20}}(?=://)):/{{0,2}}"
IN_TEXT = re.compile(rf"{FORM}(\S+)", re.IGNORECASE)
WHOLE = re.compile(rf"{FORM}(.+)", re.IGNORECASE | re.DOTALL)
SITE = re.compile(r"(?:localhost|[\d.]+|\[[0-9a-f:.]+\])(?::\d*)?|[^:@]*\.[^:@]*:?", re.IGNORECASE)
TOKEN = re.compile(r"\bhf_\w{20,}")


def masked(text: str, *, whole: bool = False) -> str:
    """Return `text` with `…` for the passwords and queries of the URLs in it; of all of it if it is a URL.

    A password ends at the last `@`: it may hold whatever ends a host, but for a space in a longer text.
    """
    form = WHOLE if whole else IN_TEXT

    def one(url: re.Match[str]) -> str:
        inside = form.sub(one, url[2])  # of BASE+DELTA
        return url[0].removesuffix(url[2]) + _masked(url[1].lower(), inside)

    return TOKEN.sub("hf_…", form.sub(one, text)) if ":" in text else text


def _masked(scheme: str, rest: str) -> str:
    if is_login(scheme, rest):
        rest = f"…@{AT.split(rest)[-1]}"
    for mark in "?#" if scheme in WEB else "?":
        begin, found, secret = rest.partition(mark)
        end = secret[len(secret.rstrip(",;:.)'\"`")) :]
        if end != secret and not re.match("…[0-9a-f]{8}$", secret.removesuffix(end)):
            rest = f"{begin}{found}…{end}"
    return rest


def is_login(scheme: str, rest: str) -> bool:
    """Return whether what stands in a URL before its last `@` may be a name and a password."""
    if not AT.search(rest.lower()):
        return False
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if scheme in WEB:  # of a host without a dot, or with a port, the rest may be a password's
        return not SITE.fullmatch(host)
    is_known = scheme in ("hf", "s3", "gs", "az", "file") and (host or scheme == "file")
    return not is_known or ":" in host.rstrip(":") or (scheme != "hf" and bool(AT.search(host)))
