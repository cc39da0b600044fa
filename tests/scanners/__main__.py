"""Compare scanners: `python -m tests.scanners [--write] [--python PATH]`.

PATH is a Python that has picklescan, fickling, modelscan and modelaudit (extra `scanners`); else this one.
--write puts the table into docs/scan.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from ckpttool import __version__
from ckpttool.scanning.scan import scan
from ckpttool.scanning.verdicts import SAFE, UNREADABLE
from tests.scanners.peers import FOUND, PEERS, REFUSED, SILENT
from tests.support.generated_page import regenerate
from tests.support.running import ROOT
from tests.support.scan_corpus import ATTACKS, HONEST, written

PAGE = ROOT / "docs" / "scan.md"
MARKS = "<!-- scanners -->\n", "<!-- /scanners -->"
OURS = "ckpttool scan"


@dataclass(frozen=True)
class Judged:
    """What one scanner said of the corpus, by title; None where it can't be run."""

    version: str
    attacks: Mapping[str, str]
    honest: Mapping[str, str]


def ours(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return what our scan says of files."""
    words = {SAFE: SILENT, UNREADABLE: REFUSED}
    return {title: words.get(scan(path)[0].verdict, FOUND) for title, path in paths.items()}


def theirs(name: str, python: str, *corpora: Mapping[str, Path]) -> Judged | str:
    """Return what a peer says of files, or the reason why it can't be asked."""
    every = [str(path) for paths in corpora for path in paths.values()]
    ran = subprocess.run(
        [python, str(Path(__file__).with_name("peers.py")), name],
        input=json.dumps(every),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if ran.returncode:
        return (ran.stderr.strip().splitlines() or ["it failed"])[-1]
    found = json.loads(ran.stdout.splitlines()[-1])
    said = [{title: found["said"][str(path)] for title, path in paths.items()} for paths in corpora]
    return Judged(found["version"], *said)


def judged(python: str) -> dict[str, Judged | str]:
    """Return what every scanner says of the corpus."""
    with tempfile.TemporaryDirectory() as folder:
        attacks = written(ATTACKS, Path(folder, "attacks"))
        honest = written(HONEST, Path(folder, "honest"))
        result: dict[str, Judged | str] = {OURS: Judged(__version__, ours(attacks), ours(honest))}
        return result | {name: theirs(name, python, attacks, honest) for name in PEERS}


def table(results: Mapping[str, Judged | str]) -> Iterator[str]:
    """Yield the lines of the table, and below it what each missed and alarmed at."""
    yield from ("| scanner | attacks found | refused | missed | false alarms | honest files refused |",)
    yield "|---|---:|---:|---:|---:|---:|"
    for name, each in results.items():
        if isinstance(each, Judged):
            counts = [titles(each.attacks, word) for word in (FOUND, REFUSED, SILENT)]
            counts += [titles(each.honest, word) for word in (FOUND, REFUSED)]
            yield f"| {name} {each.version} | {' | '.join(str(len(found)) for found in counts)} |"
        else:
            yield f"| {name} | could not be run: {each} | | | | |"
    yield from ("", f"{len(ATTACKS)} attacks, {len(HONEST)} honest files. {date.today()}, {_versions()}.", "")
    for name, each in results.items():
        if isinstance(each, Judged):
            parts = [
                f"{what}: {', '.join(f'`{title}`' for title in found)}"
                for what, found in (
                    ("missed", titles(each.attacks, SILENT)),
                    ("false alarms", titles(each.honest, FOUND)),
                    ("refused", titles(each.honest, REFUSED)),
                )
                if found
            ]
            yield f"- **{name}** {'; '.join(parts) or 'missed nothing'}."


def titles(said: Mapping[str, str], word: str) -> list[str]:
    return [title for title, each in said.items() if each == word]


def _versions() -> str:
    import torch

    return f"Python {sys.version.split()[0]}, torch {torch.__version__.partition('+')[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    lines = [*table(judged(given.python))]
    print(*lines, sep="\n")
    if given.write:
        regenerate(PAGE, *MARKS, "\n".join(["", *lines, "", ""]))


if __name__ == "__main__":
    main()
