"""What was scanned in SARIF, the format in which code scanning takes results.

Source: SARIF 2.1.0 (OASIS, 2020), and what GitHub reads of it: it shows a result at a line of a file, so each
is at the first one, and tells results apart by their fingerprints.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from urllib.parse import quote

from .verdicts import DANGEROUS, UNKNOWN, UNREADABLE, Scanned

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

# By verdict: its level, its score for GitHub (0 to 10), and what it means.
RULES = {
    DANGEROUS: ("error", "9.3", "A pickle names what pickles are known to run code by"),
    UNKNOWN: ("warning", "5.0", "A pickle names something that is not known to be harmless"),
    UNREADABLE: ("warning", "3.0", "A file, or a part of it, could not be looked at"),
}
HELP = "Load it with weights_only=True, or write it without code: ckpttool disarm FILE OUT."


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
        yield _result(file.path, UNREADABLE, problem.where, problem.reason, problem.reason)


def _result(path: str, verdict: str, where: str, text: str, told_by: str) -> dict[str, object]:
    place = f"{path}\0{where}\0{verdict}\0{told_by}".encode("utf-8", "surrogatepass")
    return {
        "ruleId": f"pickle/{verdict}",
        "ruleIndex": [*RULES].index(verdict),
        "level": RULES[verdict][0],
        "message": {"text": f"{text} (in {where})" if where else text},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(path)},
                    "region": {"startLine": 1},
                }
            }
        ],
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
