"""What is said of one file: whether something in it could run, by which names, and what was not looked at."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..inert_pickle.known_names import is_dangerous, names_that_run
from ..inert_pickle.values import Global

DANGEROUS, UNKNOWN, UNREADABLE, SAFE = VERDICTS = ("dangerous", "unknown", "unreadable", "safe")


@dataclass(frozen=True, slots=True)
class Finding:
    """A name that could run something when it is unpickled.

    Attributes:
        name: the name in full, `posix.system`.
        where: the way to the pickle inside the file: `inner.zip > data.pkl`; empty where the file is it.
        dangerous: it is of what pickles are known to run code by, rather than of a class not known here.
    """

    name: str
    where: str
    dangerous: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a file that could not be looked at.

    Attributes:
        where: the way to it inside the file; empty for the file itself.
        reason: what is wrong with it.
    """

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Scanned:
    """What was found in one file.

    Attributes:
        path: the file.
        verdict: `dangerous`: it names what pickles are known to run code by. `unknown`: it names something
            that is not known to be harmless, such as a class of a package. `unreadable`: nothing of that was
            found, but not all could be looked at. `safe`: neither.
        found: the names that could run something, the worst first.
        problems: what could not be looked at, whatever the verdict.
        pickles: how many pickles were read.
    """

    path: str
    verdict: str
    found: tuple[Finding, ...] = ()
    problems: tuple[Problem, ...] = ()
    pickles: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names that could run something, the worst first."""
        return tuple(finding.name for finding in self.found)

    @classmethod
    def of(
        cls,
        path: str,
        names: Mapping[Global, str],
        problems: tuple[Problem, ...] = (),
        pickles: int = 0,
        allowed: Collection[str] = (),
    ) -> Scanned:
        """Judge a file by the names in it, each with where it is, and by what could not be looked at."""
        by_text = {str(name): name for name in names if not _is_allowed(name, allowed)}
        found = [by_text[text] for text in names_that_run(by_text.values())]
        findings = tuple(Finding(str(name), names[name], is_dangerous(name)) for name in found)
        if findings:
            verdict = DANGEROUS if any(finding.dangerous for finding in findings) else UNKNOWN
        else:
            verdict = UNREADABLE if problems else SAFE
        return cls(path, verdict, findings, problems, pickles)


def _is_allowed(name: Global, allowed: Collection[str]) -> bool:
    """Whether the user allows a name: by a pattern, or one of what attacks use only by the name itself."""
    text = str(name)
    return text in allowed or (not is_dangerous(name) and any(fnmatchcase(text, each) for each in allowed))


def unreadable(path: str, reason: str) -> Scanned:
    """Return what is said of a file that can't be opened."""
    return Scanned(path, UNREADABLE, problems=(Problem("", reason),))
