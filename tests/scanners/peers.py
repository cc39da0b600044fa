"""Other scanners, each asked as its own command asks itself: `python -m tests.scanners.peers NAME < FILES`.

Runs in whatever environment has them. Reads a JSON list of paths from stdin; prints a JSON object: the
version, and for each path `found`, `silent`, or `refused` where the scanner says that it could not look.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import sys
from collections.abc import Callable

FOUND, SILENT, REFUSED = "found", "silent", "refused"


def _picklescan(path: str) -> str:
    from picklescan.scanner import scan_file_path

    result = scan_file_path(path)
    return FOUND if result.issues_count else REFUSED if result.scan_err else SILENT


def _fickling(path: str) -> str:
    from fickling.analysis import is_likely_safe

    return SILENT if is_likely_safe(path) else FOUND


def _modelscan(path: str) -> str:
    from modelscan.modelscan import ModelScan

    scanner = ModelScan()
    result = scanner.scan(path)
    if scanner.issues.all_issues:
        return FOUND
    return REFUSED if result["errors"] or not result["summary"]["scanned"]["total_scanned"] else SILENT


def _modelaudit(path: str) -> str:
    from modelaudit.core import determine_exit_code, scan_model_directory_or_file

    code = determine_exit_code(scan_model_directory_or_file(path))
    return {0: SILENT, 1: FOUND}.get(code, REFUSED)


PEERS: dict[str, Callable[[str], str]] = {
    "picklescan": _picklescan,
    "fickling": _fickling,
    "modelscan": _modelscan,
    "modelaudit": _modelaudit,
}


def asked(name: str, paths: list[str]) -> dict[str, str]:
    """Return what a scanner says of each file; an exception is a refusal, as its command fails too."""
    said = {}
    for path in paths:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                said[path] = PEERS[name](path)
        except (Exception, SystemExit):  # noqa: PERF203
            said[path] = REFUSED
    return said


if __name__ == "__main__":
    (given,) = sys.argv[1:]
    found = {"version": importlib.metadata.version(given), "said": asked(given, json.load(sys.stdin))}
    print(json.dumps(found))
