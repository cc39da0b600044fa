"""The command `ckpttool scan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from ..core.cli import joined, options
from ..core.cli.console import Console, counted, printable, say, to_json
from ..core.cli.reading import fields_of
from ..core.cli.schemas import NAMES, Fields, fields_like

if TYPE_CHECKING:
    from .verdicts import Scanned


def _printed() -> Fields:
    from .verdicts import Scanned

    file: Fields = {
        **fields_like(Scanned),
        "verdict": (Literal["safe", "unknown", "dangerous", "unreadable"], "what unpickling it could do"),
        "names": (NAMES, "the names that could run something, the worst first"),
    }
    return {"files": ([file], "every file that was looked at")}


@options.command("Check", "What could run in files and folders if unpickled", _printed)
@options.argument("paths", "PATH…", nargs=-1, required=True)
@options.several("--allow PATTERN", "Names that count as harmless, e.g. 'sklearn.*'.")
@options.flag("--sarif", "Print SARIF 2.1.0, which code scanning takes, instead of lines or JSON.")
@joined.reading_in_parts
def scan(console: Console, paths: tuple[str, ...], allow: tuple[str, ...], sarif: bool) -> int:
    """Say what could run in files and folders when they are unpickled, without running it.

    Pickles are found by content, whatever a file is called: in zips, tars, gzip, bzip2, xz and zlib, NumPy's
    and joblib's files, one inside another. Of each the names that it would import are compared with those
    known to be harmless. A file is dangerous (it names what runs code), unknown (it names a class or function
    not known here, or a loader could read on where this does not), unreadable (damaged) or safe.

    Exit 1 if something could run, else 3 if something is unreadable. docs/scan.md has more. --allow does not
    allow what attacks use, unless it names it without * or ?.

    \b
    Examples:
      ckpttool scan last.pt
      ckpttool scan . --sarif
      ckpttool scan last.pt --allow 'sklearn.*'
    """
    from .. import __version__
    from .scan import named_in, scan_each
    from .verdicts import DANGEROUS, UNKNOWN, UNREADABLE, as_sarif

    files = named_in(paths)
    scanned: list[Scanned] = []
    with console.bar("scanning") as bar:
        for number, file in enumerate(scan_each(files, allow), 1):
            scanned.append(file)
            bar.step(number, len(files))
    if not (console.json or sarif):
        _say_problems(scanned)
    if sarif:
        click.echo(to_json(as_sarif(scanned, __version__)))
    else:
        files_found = [fields_of(file) | {"names": file.names} for file in scanned]
        console.result("\n".join(_lines(console, scanned)), {"files": files_found})
    verdicts = {file.verdict for file in scanned}
    return 1 if verdicts & {DANGEROUS, UNKNOWN} else 3 if UNREADABLE in verdicts else 0


def _say_problems(scanned: list[Scanned]) -> None:
    """Say what could not be looked at: on stderr, with -q too."""
    from .verdicts import UNKNOWN, UNREADABLE

    for path, problem in ((file.path, problem) for file in scanned for problem in file.problems):
        where = f"{path}: {problem.where}" if problem.where else path
        label = UNKNOWN if problem.goes_on else UNREADABLE
        say(f"{label}:", "yellow", f"{printable(where)}: {printable(problem.reason)}")


def _lines(console: Console, scanned: list[Scanned]) -> list[str]:
    from .verdicts import SAFE, UNREADABLE, VERDICTS

    lines = []
    for file in scanned:
        if file.verdict == UNREADABLE or (file.verdict == SAFE and not console.verbose):
            continue
        places = dict.fromkeys(finding.where for finding in file.found if finding.where)
        inside = f" (in {console.names([*places])})" if places else ""
        worst = sum(finding.dangerous for finding in file.found)  # never shortened
        shown = console.names(file.names) if worst <= 4 else ", ".join(map(printable, file.names))
        said = f": {shown}{inside}" if file.names else ""
        lines.append(console.sentence(f"{printable(file.path)}: {file.verdict}{said}"))
    counts = [(sum(file.verdict == verdict for file in scanned), verdict) for verdict in VERDICTS]
    said = ", ".join(f"{count} {verdict}" for count, verdict in counts if count)
    total = f"scanned {counted(len(scanned), 'file')}" + (f": {said}" if said else "")
    return [*lines, console.sentence(total)]
