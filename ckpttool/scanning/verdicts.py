"""The verdict on one file: the names in it that could run something, and what could not be looked at.

Also in SARIF, the format in which code scanning takes results. Source: SARIF 2.1.0 (OASIS, 2020), and what
GitHub reads of it: it shows a result at a line of a file, so each is at the first one, and tells results
apart by their fingerprints.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote

from ..core.inert_pickle.known_names import is_dangerous, names_that_run
from ..core.inert_pickle.values import Global
from ..errors import masked

DANGEROUS, UNKNOWN, UNREADABLE, SAFE = VERDICTS = ("dangerous", "unknown", "unreadable", "safe")

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

# By verdict: its level, its score for GitHub (0 to 10), and what it means.
RULES = {
    DANGEROUS: ("error", "9.3", "A pickle names what pickles are known to run code by"),
    UNKNOWN: ("warning", "5.0", "What a loader would read is not known to be harmless"),
    UNREADABLE: ("warning", "3.0", "A file, or a part of it, is damaged or can't be opened"),
}
HELP = "Load it with weights_only=True, or write it without code: ckpttool disarm FILE OUT."


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
class ScanProblem:
    """Something in a file that could not be looked at.

    Attributes:
        where: the way to it inside the file; empty for the file itself.
        reason: what is wrong with it.
        goes_on: a loader might read what was not looked at. Else it stops there too.
    """

    where: str
    reason: str
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Scanned:
    """What was found in one file.

    Attributes:
        path: the file.
        verdict: `dangerous`: it names what pickles are known to run code by. `unknown`: it names something
            that is not known to be harmless, such as a class of a package, or a loader might read something
            that was not looked at. `unreadable`: it is damaged, or no file. `safe`: nothing of that.
        found: the names that could run something, the worst first.
        problems: what could not be looked at, whatever the verdict.
        pickles: how many pickles were read.
    """

    path: str
    verdict: str
    found: tuple[Finding, ...] = ()
    problems: tuple[ScanProblem, ...] = ()
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
        problems: tuple[ScanProblem, ...] = (),
        pickles: int = 0,
        allowed: Collection[str] = (),
    ) -> Scanned:
        """Judge a file by the names in it, each with where it is, and by what could not be looked at."""
        by_text = {str(name): name for name in names if not _is_allowed(name, allowed)}
        found = [by_text[text] for text in names_that_run(by_text.values())]
        findings = tuple(Finding(str(name), names[name], is_dangerous(name)) for name in found)
        verdict = UNREADABLE if problems else SAFE
        if findings or any(problem.goes_on for problem in problems):
            verdict = DANGEROUS if any(finding.dangerous for finding in findings) else UNKNOWN
        return cls(path, verdict, findings, problems, pickles)

    @classmethod
    def told(cls, fields: list[Any]) -> Scanned:
        """Return what was found from its fields, and theirs, in order. TypeError, ValueError for others."""
        path, verdict, found, problems, pickles = fields
        findings = (Finding(str(name), str(where), bool(bad)) for name, where, bad in found)
        unseen = (ScanProblem(str(where), str(reason), bool(on)) for where, reason, on in problems)
        return cls(str(path), str(verdict), (*findings,), (*unseen,), int(pickles))


def _is_allowed(name: Global, allowed: Collection[str]) -> bool:
    """Whether the user allows a name: by a pattern, or one of what attacks use only by the name itself."""
    text = str(name)
    return text in allowed or (not is_dangerous(name) and any(fnmatchcase(text, each) for each in allowed))


def unreadable(path: str, reason: str) -> Scanned:
    """Return the verdict on a file that can't be opened."""
    return Scanned(masked(path, whole=True), UNREADABLE, problems=(ScanProblem("", reason),))


# ---- SARIF


def as_sarif(files: Iterable[Scanned], version: str) -> dict[str, object]:
    """Return a log of SARIF for files that `version` of this tool scanned."""
    rules = [
        {
            "id": f"pickle/{verdict}",
            "name": f"Pickle{verdict.title()}",
            "shortDescription": {"text": said},
            "help": {"text": HELP},
            "defaultConfiguration": {"level": level},
            "properties": {"security-severity": score, "tags": ["security"]},
        }
        for verdict, (level, score, said) in RULES.items()
    ]
    driver = {"name": "ckpttool", "semanticVersion": version, "rules": rules}
    results = [result for file in files for result in _results(file)]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SCHEMA, "version": VERSION, "runs": [run]}


def _results(file: Scanned) -> Iterator[dict[str, object]]:
    for finding in file.found:
        verdict = DANGEROUS if finding.dangerous else UNKNOWN
        text = f"{finding.name} could run when this is unpickled"
        yield _result(file.path, verdict, finding.where, text, finding.name)
    for problem in file.problems:
        verdict = UNKNOWN if problem.goes_on else UNREADABLE
        yield _result(file.path, verdict, problem.where, problem.reason, problem.reason)


def _result(path: str, verdict: str, where: str, text: str, told_by: str) -> dict[str, object]:
    place = f"{path}\0{where}\0{verdict}\0{told_by}".encode("utf-8", "surrogatepass")
    location = {"artifactLocation": {"uri": _uri(path)}, "region": {"startLine": 1}}
    return {
        "ruleId": f"pickle/{verdict}",
        "ruleIndex": [*RULES].index(verdict),
        "level": RULES[verdict][0],
        "message": {"text": f"{text} (in {where})" if where else text},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"placeAndName/v1": hashlib.sha256(place).hexdigest()},
    }


def _uri(path: str) -> str:
    """Return a path as a reference from the current folder, or a URL as it is."""
    if "://" in path:
        return path
    if os.path.isabs(path):
        inside = os.path.relpath(path)
        if inside.startswith(".."):
            return "file://" + quote(os.fsencode(path))
        path = inside
    return quote(os.fsencode(os.path.normpath(path)))
