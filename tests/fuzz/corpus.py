"""Files with which something was wrong once, kept so that it never is again."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.campaign import Found
from tests.fuzz.seeds import Files, put
from tests.support.running import ROOT

CORPUS = ROOT / "tests" / "corpus"


def keep(found: Found) -> Path:
    """Write a file, or a folder, into the corpus; return where."""
    path = CORPUS / found.name
    if not path.exists():
        put(found.files, path)
    return path


def kept() -> dict[str, Files]:
    """Return everything in the corpus, by name."""
    found = {}
    for path in sorted(CORPUS.iterdir()):
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        if path.suffix != ".md":
            found[path.name] = {"" if file == path else file.name: file.read_bytes() for file in files}
    return found
